"""What a model wrote → a message, for templates written here and for the real ones where they are at hand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from data_fixtures import CHATML, CHATML_MARKED, CHATML_TOOLS, GEMMA, LLAMA2, byte_tokenizer, trained_text

from posttrain import (
    add_response_schema,
    get_training_chat_template,
    parse_response,
    supports_tool_calling,
)
from posttrain.data.rows import SFTRowOptions, prepare_sft
from posttrain.data.template import Template, common_prefix
from posttrain.errors import ConfigError, DataError

REAL = sorted(Path("/work/shared/templates").glob("*.jinja"))
ASK = {"role": "user", "content": "Which?"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo", "days": 3}}}
AS_TEXT = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo", "days": 3}'}}
# A template that writes a call as Qwen's families do.
HERMES = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    '{{ \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ (c.function.arguments | tojson) + '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tokenizer_for(path: Path) -> Any:
    source = path.read_text(encoding="utf-8")
    special = set(re.findall(r"<[|｜][^<>'\" ]*>|<[a-z_]+\|>|</?s>|<(?:start|end)_of_\w+>", source))
    # Only gpt-oss reads its end of a turn from the tokenizer.
    eos = "<|return|>" if path.stem == "gptoss" else "<eos>"
    return byte_tokenizer(sorted(special), source, bos="<bos>", eos=eos)


def written(tokenizer: Any, message: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Ids of the prompt, and of what a model that answers with the message writes after it."""
    template = Template(tokenizer)
    opened, whole = template.render([ASK], add_generation_prompt=True), template.render([ASK, message])
    start = common_prefix(opened, whole)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"] for text in (whole[:start], whole[start:]))


def reply(tokenizer: Any, **fields: Any) -> dict[str, Any]:
    prefix, ids = written(tokenizer, {"role": "assistant", "content": "", **fields})
    return parse_response(tokenizer, ids, prefix)


def test_a_message_is_read_back():
    tokenizer = byte_tokenizer(template=HERMES)
    assert add_response_schema(tokenizer) is tokenizer
    assert reply(tokenizer, content="Sunny.") == {"role": "assistant", "content": "Sunny."}
    assert reply(tokenizer, content="Sunny.", reasoning_content="Hm") == {
        "role": "assistant", "content": "Sunny.", "reasoning_content": "Hm",
    }  # fmt: skip
    two = [CALL, {"type": "function", "function": {"name": "ping", "arguments": {}}}]
    assert reply(tokenizer, tool_calls=two) == {"role": "assistant", "content": "", "tool_calls": two}


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "sun", "argu',
        "<tool_call>\n{}\n</tool_call>",
        '<tool_call>\n{"name": 3}\n</tool_call>',
    ],
)
def test_what_cannot_be_read_is_content(text: str):
    tokenizer = add_response_schema(byte_tokenizer(template=HERMES))
    ids = tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"]
    assert parse_response(tokenizer, ids) == {"role": "assistant", "content": text}


def test_a_tokenizer_without_a_schema_is_told_to_get_one():
    with pytest.raises(DataError, match="add_response_schema"):
        parse_response(byte_tokenizer(template=HERMES), [1])


def test_unknown_way_of_calling_is_an_error():
    with pytest.raises(DataError, match="not known"):
        add_response_schema(byte_tokenizer(template=CHATML_TOOLS))


@pytest.mark.parametrize(
    ("template", "can"), [(HERMES, True), (CHATML_TOOLS, True), (CHATML, False), (LLAMA2, False), (GEMMA, False)]
)
def test_tool_calling(template: str, can: bool):
    assert supports_tool_calling(byte_tokenizer(template=template, bos="<s>")) is can
    assert not supports_tool_calling(byte_tokenizer())


# ---- the real templates ----------------------------------------------------------------------------------------------

NO_CALLS = {"cohere", "cohere2", "deepseek_r1_distill", "gemma", "gemma3", "idefics3", "lfm2", "llama3", "llava_next"}
NO_CALLS |= {"phi3", "phi3_5", "qwen2_5_vl"}
NOT_READ = {"muse_glimmer": "not known", "llava_next": "opens no assistant turn"}
real = pytest.mark.parametrize("path", REAL, ids=[path.stem for path in REAL])


@real
def test_real_templates(path: Path):
    tokenizer = tokenizer_for(path)
    assert supports_tool_calling(tokenizer) == (path.stem not in NO_CALLS)
    if path.stem in NOT_READ:
        with pytest.raises(DataError, match=NOT_READ[path.stem]):
            add_response_schema(tokenizer)
        return
    add_response_schema(tokenizer)
    assert reply(tokenizer, content="Sunny.") == {"role": "assistant", "content": "Sunny."}
    if path.stem not in NO_CALLS:
        call = AS_TEXT if path.stem == "deepseekv3" else CALL
        assert reply(tokenizer, tool_calls=[call]) == {
            "role": "assistant", "content": "", "tool_calls": [CALL],
        }  # fmt: skip


def train_spans(tokenizer: Any, messages: list[dict[str, Any]]) -> list[str]:
    rows, _ = prepare_sft(
        [{"messages": messages}], tokenizer, SFTRowOptions(assistant_only_loss=True, max_length=None), None, "train"
    )
    return trained_text(tokenizer, rows[0]["input_ids"], rows[0]["weights"])


@real
def test_a_script_that_asks_for_the_training_template_trains_the_answers(path: Path):
    tokenizer = tokenizer_for(path)
    own = tokenizer.chat_template
    tokenizer.chat_template = get_training_chat_template(tokenizer)
    assert tokenizer.chat_template == own
    messages = [ASK, {"role": "assistant", "content": "Aone"}, ASK, {"role": "assistant", "content": "Atwo"}]
    spans = train_spans(tokenizer, messages)
    assert len(spans) == 2 and "Aone" in spans[0] and "Atwo" in spans[1] and "Which" not in "".join(spans)


def test_training_template_with_and_without_markers():
    messages = [ASK, {"role": "assistant", "content": "Yo"}]
    for template, spans in ((CHATML, ["Yo<|im_end|>"]), (CHATML_MARKED, None)):
        tokenizer = byte_tokenizer(template=template)
        assert get_training_chat_template(processing_class=tokenizer) == template
        assert get_training_chat_template(tokenizer=tokenizer) == template
        assert spans is None or train_spans(tokenizer, messages) == spans
    for arguments in ({}, {"processing_class": 1, "tokenizer": 1}):
        with pytest.raises(ConfigError, match="give one"):
            get_training_chat_template(**arguments)
