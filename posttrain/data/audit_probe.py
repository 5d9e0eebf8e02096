"""What the checks of the template audit look at: probes, as text and as the ids that training would see. A probe is a
conversation of words that no template writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from posttrain.data.chat import chat_spans
from posttrain.data.encode import Draft, Encoder
from posttrain.data.proof import REASONING, Span
from posttrain.data.template import Message, Template

Verdict = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One question asked of a template. e.g. Check("one_bos", "fail", "2", "the text begins '<s><s>[INST]'")"""

    name: str
    verdict: Verdict
    finding: str  # the answer in a word or two; part of the audit's hash
    evidence: str  # what was seen, for a reader


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


SYSTEM, THOUGHT = {"role": "system", "content": "probesystem"}, "probethought"
ONE = [user("probeask"), says("probesay")]
TWO = [*ONE, user("probenext"), says("probeend")]
TOOL = {
    "type": "function",
    "function": {
        "name": "probetool",
        "description": "probeuse",
        "parameters": {"type": "object", "properties": {"probekey": {"type": "string", "description": "probearg"}}},
    },
}
CALL = {
    "id": "probe0001",
    "type": "function",
    "function": {"name": "probetool", "arguments": {"probekey": "probeval"}},
}
RESULT = {"role": "tool", "name": "probetool", "tool_call_id": "probe0001", "content": "proberesult"}
CALLING = [user("probeask"), says("", tool_calls=[CALL]), RESULT, says("probeend")]


@dataclass(frozen=True)
class Trained:
    """A conversation as training sees it."""

    text: str
    spans: list[Span]
    ids: list[int]
    weights: list[float]

    @property
    def runs(self) -> list[list[int]]:
        """The trained tokens, a list a turn."""
        found: list[list[int]] = []
        for at, (token, weight) in enumerate(zip(self.ids, self.weights, strict=True)):
            if weight:
                if not (at and self.weights[at - 1]):
                    found.append([])
                found[-1].append(token)
        return found

    @property
    def prompt(self) -> list[int]:
        """What stands before the last turn."""
        last = max((at for at, weight in enumerate(self.weights) if weight), default=len(self.ids) - 1)
        first = next((at + 1 for at in range(last, -1, -1) if not self.weights[at]), 0)
        return self.ids[:first]


class Probe:
    """A template, and its renderings of the probes, each made once."""

    def __init__(self, tokenizer: Any, stops: frozenset[int] | None, kwargs: dict[str, Any]) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.template = Template(tokenizer, None, kwargs)
        self.with_tools = Template(tokenizer, [TOOL], kwargs)
        self.encoder = Encoder(tokenizer)

    def render(self, messages: Sequence[Message], **flags: Any) -> str | None:
        return self.template.try_render(messages, **flags)

    def train(self, messages: list[dict[str, Any]], tools: bool = False) -> Trained:
        """Ids and weights of a chat. Raises `DataError` where its turns cannot be found."""
        text, spans = chat_spans(self.with_tools if tools else self.template, messages)
        return self.encoded(Draft(text, spans, tuple(start for start, _ in spans if start)))

    def encoded(self, draft: Draft) -> Trained:
        [(ids, weights)] = self.encoder.encode([draft])
        return Trained(draft.text, draft.spans, ids.tolist(), weights.tolist())

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)

    @cached_property
    def two(self) -> Trained:
        return self.train(TWO)

    @cached_property
    def known_tokens(self) -> set[int]:
        """Tokens that are matched as a whole, special or not."""
        return set(self.tokenizer.added_tokens_decoder) | set(self.tokenizer.all_special_ids)

    @cached_property
    def reasoning_keys(self) -> list[str]:
        """The keys of a message whose text the template writes in the last turn."""
        chats = {key: [ONE[0], says("probesay", **{key: THOUGHT})] for key in REASONING}
        return [key for key, chat in chats.items() if THOUGHT in (self.render(chat) or "")]

    @cached_property
    def supports_tools(self) -> bool:
        text = self.with_tools.try_render(CALLING) or ""
        return all(word in text for word in ("probetool", "probekey", "probeval", "proberesult"))


def common_prefix_ids(a: Sequence[int], b: Sequence[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def brief(text: str, limit: int = 100) -> str:
    """Text for a report, cut in the middle. e.g. 'Hi\\n'"""
    if len(text) > limit:
        text = f"{text[: limit // 2]} … {text[-limit // 2 :]}"
    return repr(text)
