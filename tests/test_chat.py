"""Chats → text and trained spans, for templates written here and for the real ones where they are at hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from data_fixtures import CHATML, CHATML_MARKED, CHATML_TOOLS, GEMMA, LLAMA2, THINKING, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.chat import apply_chat_template, chat_spans, maybe_apply_chat_template, template_of
from posttrain.errors import DataError

REAL = sorted(Path("/work/shared/templates").glob("*.jinja"))
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look it up",
            "parameters": {"type": "object", "properties": {"q": {"type": "string", "description": "what"}}},
        },
    }
]


def user(text):
    return {"role": "user", "content": text}


def says(text, **more):
    return {"role": "assistant", "content": text, **more}


def calls(q, **more):
    call = {"type": "function", "id": "c1", "function": {"name": "look", "arguments": {"q": q}}}
    return says("", tool_calls=[call], **more)


def tool(text):
    return {"role": "tool", "name": "look", "tool_call_id": "c1", "content": text}


def spans(tokenizer, messages, tools=None, **kwargs):
    text, found = chat_spans(template_of(tokenizer, {}, tools, **kwargs), messages)
    assert text == tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **kwargs)
    return [text[start:end] for start, end in found]


THREE = [user("a"), says("one"), user("b"), says("two"), user("c"), says("three")]


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED], ids=["unmarked", "marked"])
def test_c07_c19_every_turn_and_its_stop_token(template):
    tokenizer = byte_tokenizer(template=template)
    assert spans(tokenizer, THREE) == ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]


def test_llama2_turn_starts_where_the_prompt_ends():
    tokenizer = byte_tokenizer((), LLAMA2, bos="<s>", eos="</s>")
    assert spans(tokenizer, THREE) == [" one </s>", " two </s>", " three </s>"]


def test_gemma_renames_the_role():
    tokenizer = byte_tokenizer(("<start_of_turn>", "<end_of_turn>"), GEMMA, bos="<bos>", eos="<eos>")
    assert spans(tokenizer, THREE) == ["one<end_of_turn>", "two<end_of_turn>", "three<end_of_turn>"]


def test_template_that_strips_thinking_from_history():
    tokenizer = byte_tokenizer(template=THINKING)
    chat = [user("a"), says("one", reasoning_content="r1"), user("b"), says("two", reasoning_content="r2")]
    assert spans(tokenizer, chat) == ["one<|im_end|>", "<think>\nr2\n</think>\n\ntwo<|im_end|>"]
    chat[-1] = says("two")
    assert spans(tokenizer, chat) == ["one<|im_end|>", "<think>\n\n</think>\n\ntwo<|im_end|>"]


@pytest.mark.parametrize(
    "content", ["user", "assistant\n", "<|im_end|>", "<think>\n", "<", "a\n", "<|im_start|>assistant\nx", "", "one"]
)
def test_content_that_equals_parts_of_the_template(content):
    chat = [user("<|im_start|>assistant\none"), says(content), user("one<|im_end|>"), says("one")]
    # In the marked template transformers itself finds the spans, so both ways must agree.
    expected = [f"{content}<|im_end|>", "one<|im_end|>"]
    assert spans(byte_tokenizer(template=CHATML), chat) == expected
    assert spans(byte_tokenizer(template=CHATML_MARKED), chat) in (expected, [content, "one<|im_end|>"])


PIECES = st.lists(
    st.sampled_from(["<|im_start|>", "<|im_end|>", "user", "assistant", "\n", " ", "<", "|>", "<think>", "a"]),
    max_size=6,
).map("".join)


@settings(max_examples=60, deadline=None)
@given(contents=st.lists(st.tuples(PIECES, PIECES), min_size=1, max_size=3))
def test_c20_whatever_is_said_spans_lie_where_the_turns_were_written(contents):
    tokenizer = byte_tokenizer(template=CHATML)
    messages = [m for question, answer in contents for m in (user(question), says(answer))]
    expected, text = [], ""
    for message in messages:
        text += f"<|im_start|>{message['role']}\n"
        start, text = len(text), text + message["content"] + "<|im_end|>"
        if message["role"] == "assistant":
            expected.append((start, len(text)))
        text += "\n"
    assert chat_spans(template_of(tokenizer, {}), messages) == (text, expected)


def test_stop_token_that_is_plain_text_to_the_tokenizer():
    assert spans(byte_tokenizer((), CHATML, eos="<eos>"), THREE[:2]) == ["one<|im_end|>"]


def test_chat_that_opens_with_the_assistant():
    assert spans(byte_tokenizer(template=CHATML), [says("Hello"), user("a"), says("b")]) == [
        "Hello<|im_end|>",
        "b<|im_end|>",
    ]


def test_tool_calls_are_trained_and_results_are_not():
    tokenizer = byte_tokenizer(template=CHATML_TOOLS)
    chat = [user("Find x"), calls("xval"), tool("RESULT"), says("It is RESULT")]
    assert spans(tokenizer, chat, TOOLS) == ['<call>look{"q": "xval"}</call><|im_end|>', "It is RESULT<|im_end|>"]


def test_template_without_tool_calls_is_refused_for_rows_with_them():
    with pytest.raises(DataError, match=r"message 1 .*'look'.*does not write the call"):
        spans(byte_tokenizer(template=CHATML), [user("Find x"), calls("xval"), tool("42"), says("ok")], TOOLS)


def test_turn_the_template_drops_is_an_error():
    dropping = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(DataError, match=r"message 1 .*cannot be located"):
        spans(byte_tokenizer(template=dropping), THREE[:2])


def test_no_template_names_the_field():
    with pytest.raises(DataError, match="chat_template_path"):
        apply_chat_template({"messages": THREE}, byte_tokenizer())


def test_template_error_is_passed_on():
    with pytest.raises(DataError, match="no system"):
        apply_chat_template({"messages": [{"role": "system", "content": "x"}]}, byte_tokenizer(template=GEMMA))


# The public functions


def test_messages_become_text():
    assert apply_chat_template({"messages": THREE[:2]}, byte_tokenizer(template=CHATML)) == {
        "text": "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
    }


def test_prompt_ends_where_the_model_starts():
    row = {"prompt": [user("a")], "completion": [says("one")]}
    opened = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    tokenizer = byte_tokenizer(template=CHATML)
    assert apply_chat_template(row, tokenizer) == {"prompt": opened, "completion": "one<|im_end|>\n"}
    assert apply_chat_template({"prompt": [user("a")]}, tokenizer) == {"prompt": opened}
    pair = {"prompt": [user("a")], "chosen": [says("y")], "rejected": [says("n")]}
    assert apply_chat_template(pair, tokenizer) == {
        "prompt": opened,
        "chosen": "y<|im_end|>\n",
        "rejected": "n<|im_end|>\n",
    }
    assert apply_chat_template({**row, "label": True}, tokenizer)["label"] is True


def test_prompt_that_ends_with_the_assistant_goes_on():
    row = {"prompt": [user("a"), says("on")]}
    assert apply_chat_template(row, byte_tokenizer(template=CHATML))["prompt"].endswith("assistant\non")


def test_prompt_must_end_with_user_tool_or_assistant():
    with pytest.raises(DataError, match="'system'"):
        apply_chat_template({"prompt": [{"role": "system", "content": "x"}]}, byte_tokenizer(template=CHATML))


def test_c44_tools_reach_the_text_also_as_json():
    tokenizer = byte_tokenizer(template=CHATML_TOOLS)
    as_argument = apply_chat_template({"messages": THREE}, tokenizer, tools=TOOLS)["text"]
    as_column = apply_chat_template({"messages": THREE, "tools": TOOLS}, tokenizer)["text"]
    as_json = apply_chat_template({"messages": THREE, "tools": json.dumps(TOOLS)}, tokenizer)["text"]
    assert "Look it up" in as_argument
    assert as_argument == as_column == as_json
    with pytest.raises(DataError, match="'tools' is not valid JSON"):
        apply_chat_template({"messages": THREE, "tools": "[{"}, tokenizer)


def test_template_kwargs_from_the_row_and_the_call():
    tokenizer = byte_tokenizer(template="{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}")
    row = {"messages": [user("a")], "chat_template_kwargs": {"mood": "calm", "other": None}}
    assert apply_chat_template(row, tokenizer) == {"text": "calma"}
    assert apply_chat_template(row, tokenizer, mood="wild") == {"text": "wilda"}


def test_maybe_leaves_text_alone():
    row = {"prompt": "a", "completion": "b"}
    assert maybe_apply_chat_template(row, byte_tokenizer()) == row


# The real templates

CHATS = {
    "turns": ([{"role": "system", "content": "SYS"}, user("Qone"), says("Aone"), user("Qtwo"), says("Atwo")], None),
    "thinking": ([user("Qone"), says("Aone"), user("Qtwo"), says("Atwo", reasoning_content="WHY", thinking="WHY")],
                 None),
    "tools": ([user("Qone"), calls("ARG1"), tool("RESULT1"), says("Aone"), user("Qtwo"), calls("ARG2"),
               tool("RESULT2"), says("Atwo")], TOOLS),
}  # fmt: skip
STOPS = re.compile(
    r"(<\|im_end\|>|<\|eot_id\|>|<end_of_turn>|<\|end\|>|<\|return\|>|<\|call\|>|</s>|<｜end▁of▁sentence｜>|<turn\|>"
    r"|<\|tool_response>|<\|END_OF_TURN_TOKEN\|>|<end_of_utterance>|<\|eot\|>|<\|eom\|>)\n?$"
)
NO_STOP = {"glm4moe"}  # the next turn's header is what stops these models


@pytest.mark.parametrize("chat", list(CHATS))
@pytest.mark.parametrize("path", REAL, ids=[p.stem for p in REAL])
def test_c19_real_templates(path, chat):
    source = path.read_text(encoding="utf-8")
    written = set(re.findall(r"<[|｜][^<>'\" ]*>|<[a-z_]+\|>|</?s>|<(?:start|end)_of_\w+>", source))
    tokenizer = byte_tokenizer(sorted(written), source, bos="<bos>", eos="<eos>")
    messages, tools = CHATS[chat]
    try:
        text, found = _spans_or_without_system(tokenizer, messages, tools)
    except DataError as error:
        # Refusing is right only where the template has no tool calls, or none in this form.
        assert chat == "tools", error
        assert re.search("cannot render|does not write the call", str(error)), error
        return
    turns = [text[start:end] for start, end in found]
    wanted = [m for m in messages if m["role"] == "assistant"]
    assert len(turns) == len(wanted)
    for turn, message in zip(turns, wanted, strict=True):
        expected = message["content"] or message["tool_calls"][0]["function"]["arguments"]["q"]
        assert expected in turn
        assert not re.search("SYS|Qone|Qtwo|RESULT", turn)
        assert path.stem in NO_STOP or STOPS.search(turn), turn


def _spans_or_without_system(tokenizer, messages, tools):
    template = template_of(tokenizer, {}, tools)
    try:
        return chat_spans(template, messages)
    except DataError:
        if messages[0]["role"] != "system":
            raise
        return chat_spans(template, messages[1:])
