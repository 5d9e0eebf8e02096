"""Trained spans of every template: exactly what the assistant said, in order, each turn with its stop token.

What is expected is known from words that each message alone holds, and from reading the templates; nothing of it is
asked of the code under test.
"""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from own_templates import EVERY, MARK, OFFICIAL, REAL, TOOLS, conversation, tokenizer_for

from posttrain.data.chat import check_messages, template_of
from posttrain.data.drafts import chat_draft
from posttrain.data.encode import Encoder
from posttrain.errors import DataError


def train(name: str, messages: list[dict[str, Any]], tools: Any = None, kind: str = "byte") -> tuple[Any, str, str]:
    """The draft of a chat, and its trained and its other tokens, decoded."""
    tokenizer = tokenizer_for(name, kind)
    template = template_of(tokenizer, {}, tools)
    draft = chat_draft(template, check_messages(messages, "messages", template), assistant_only=True)
    [(ids, weights)] = Encoder(tokenizer).encode([draft])
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == draft.text
    parts = [[int(i) for i, w in zip(ids, weights, strict=True) if bool(w) is trained] for trained in (True, False)]
    return draft, *(tokenizer.decode(part, clean_up_tokenization_spaces=False) for part in parts)


def marks(*values: Any) -> list[str]:
    return [mark for value in values for mark in MARK.findall(str(value))]


def expected(messages: list[dict[str, Any]], text: str) -> tuple[list[str], int]:
    """The words that must be trained, and the number of trained turns. A turn whose thinking was left out is none."""
    words, turns = [], 0
    for message in messages:
        if message["role"] == "assistant":
            thought = marks(message.get("reasoning", ""))
            if all(word in text for word in thought):
                words += [*thought, *marks(message["content"], message.get("tool_calls", ""))]
                turns += 1
    return words, turns


def refused(name: str, messages: list[dict[str, Any]], tools: bool) -> str | None:
    """Why a template cannot take a chat, known by reading it."""
    habits = EVERY[name]
    reasons = []
    if messages[0]["role"] == "system" and not habits.system:
        reasons.append("cannot render|not written")
    if tools and not habits.tools:
        reasons.append("cannot render|does not write the call|not written")
    if "thinking" in messages[-1] and habits.thinks in ("no", "calls"):
        reasons.append("thinks")
    return "|".join(reasons) or None


def check(name: str, messages: list[dict[str, Any]], tools: bool, kind: str = "byte") -> None:
    why = refused(name, messages, tools)
    if why is not None:
        with pytest.raises(DataError, match=why):
            train(name, messages, TOOLS if tools else None, kind)
        return
    draft, trained, rest = train(name, messages, TOOLS if tools else None, kind)
    words, turns = expected(messages, draft.text)
    assert marks(trained) == words
    silent = {word for m in messages if m["role"] == "assistant" and "thinking" in m for word in marks(m)} - set(words)
    assert not [word for word in marks(rest) if word.startswith(("SAY", "ARG", "WHY")) and word not in silent]
    said = [mark for message in messages for mark in marks(message["content"])]
    assert [mark for mark in said if mark not in draft.text] == []
    habits = EVERY[name]
    if habits.stop and "<|im_end|>" not in str(messages) and "</s>" not in str(messages) and not tools:
        stops = trained.count(habits.stop) + (trained.count(habits.last_stop) if habits.last_stop else 0)
        inner = sum(word.startswith("WHY") for word in words) if habits.last_stop else 0  # thinking ends in one too
        assert stops == turns + inner
        assert trained.endswith((habits.stop, habits.last_stop or habits.stop)) or not turns


FEATURES = {
    "one turn": {"turns": 1},
    "turns": {},
    "system": {"system": True},
    "tools": {"tools": True},
    "system and tools": {"system": True, "tools": True},
    "thinking": {"thinks": True},
    "thinking and tools": {"thinks": True, "tools": True},
    "noise": {"noise": True, "system": True},
}


@pytest.mark.parametrize("kind", ["byte", "word"])
@pytest.mark.parametrize("name", EVERY)
def test_every_template_trains_what_the_assistant_said(name, kind):
    draw = random.Random(name)
    for options in FEATURES.values():
        for _ in range(2 if kind == "byte" else 1):
            chat = conversation(draw, **options)
            if "Roles must alternate" in EVERY[name].template and options.get("tools"):
                continue
            check(name, chat, bool(options.get("tools")), kind)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


ORDERS = {
    "two answers": [user("USER0z"), says("SAY1z"), says("SAY2z"), user("USER3z"), says("SAY4z")],
    "an answer first": [says("SAY0z"), user("USER1z"), says("SAY2z")],
    "two questions": [user("USER0z"), user("USER1z"), says("SAY2z")],
    "a question last": [user("USER0z"), says("SAY1z"), user("USER2z")],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", EVERY)
def test_speakers_out_of_turn(name, order):
    """Written and trained, or refused with the template's own complaint; never trained in part."""
    chat = ORDERS[order]
    try:
        _, trained, _ = train(name, chat)
    except DataError as error:
        assert re.search("cannot render", str(error)), error
        return
    assert marks(trained) == [mark for message in chat if message["role"] == "assistant" for mark in marks(message)]


def test_turns_that_are_merged_share_one_stop_token():
    _, trained, _ = train("merges_turns", ORDERS["two answers"])
    assert trained == "SAY1zSAY2z<|im_end|>SAY4z<|im_end|>"


def test_at_least_thirty_real_templates_are_known():
    assert len(OFFICIAL) >= 30
    assert set(REAL) <= set(OFFICIAL), "a new template in the folder: add its habits to OFFICIAL"


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), name=st.sampled_from(sorted(EVERY)), flags=st.tuples(*[st.booleans()] * 4))
def test_any_conversation_in_any_template(seed, name, flags):
    system, tools, thinks, noise = flags
    chat = conversation(random.Random(seed), system, tools, thinks, noise)
    if not (name == "merges_system" and tools):
        check(name, chat, tools)
