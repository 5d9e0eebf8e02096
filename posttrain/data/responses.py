"""What a model wrote → an assistant message; and what a chat template can say about tools.

The tokenizer's own `parse_response` reads a declarative `response_template`. Few tokenizers come with one, so it is
made here: the template renders a probe, and what surrounds thinking, calls and content in it is looked up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.data.template import Template
from posttrain.errors import ConfigError, DataError

ASK = {"role": "user", "content": "Which?"}
NAME, KEY, VALUE, ANSWER = "probe_name_q7", "probe_key_q7", "probe_value_q7", "probe_answer_q7"
_CALL = {"type": "function", "function": {"name": NAME, "arguments": {KEY: VALUE}}}
_CALL_AS_TEXT = {"type": "function", "function": {"name": NAME, "arguments": f'{{"{KEY}": "{VALUE}"}}'}}
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_JSON_OR_TEXT = {"name": "json", "args": {"allow_non_json": True}}


def _between_tags(tag_pattern: str, value_parser: Mapping[str, Any] = _JSON_OR_TEXT) -> dict[str, Any]:
    return {
        "content": "xml-inline",
        "content_args": {"tag_pattern": tag_pattern, "value_parser": dict(value_parser)},
        "transform": _NAMED,
    }


# How families write a call: what is seen in a rendered probe → how to read it back.
CALLS: dict[str, dict[str, Any]] = {
    # <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>
    rf'<tool_call>\s*\{{"name": ?"{NAME}", ?"arguments"': {
        "open": "<tool_call>",
        "close_pattern": r"</tool_call>\s*",
        "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    },
    # <tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>
    rf"<tool_call>\s*<function={NAME}>\s*<parameter={KEY}>": {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</tool_call>\s*",
        **_between_tags(r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"),
    },
    # <tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>
    rf"<tool_call>{NAME}\s*<arg_key>{KEY}</arg_key>": {
        "open_pattern": r"<tool_call>(?P<name>[^<\s]+)\s*",
        "close_pattern": r"</tool_call>\s*",
        **_between_tags(r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"),
    },
    # {"name": "f", "parameters": {"a": 1}}<|eot_id|>
    rf'\{{"name": ?"{NAME}", ?"parameters": ?': {
        "open_pattern": r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
        "close_pattern": r"\}\s*(?:<\|eot_id\|>|<\|eom_id\|>|$)",
        "content": "json",
        "transform": _NAMED,
    },
    # <|tool_call_start|>[f(a='x', b=2)]<|tool_call_end|>
    rf"<\|tool_call_start\|>\[{NAME}\(": {
        "open": "<|tool_call_start|>",
        "close_pattern": r"<\|tool_call_end\|>\s*",
        "repeats": False,
        "content": "python-call-list",
        "transform_each": True,
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
    },
    # <|tool_call>call:f{a:<|"|>x<|"|>,b:2}<tool_call|>
    rf"<\|tool_call>call:{NAME}\{{": {
        "open_pattern": r"<\|tool_call>call:(?P<name>[^{\s]+)",
        "close_pattern": r"<tool_call\|>\s*",
        "content": "json",
        "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
        "transform": _NAMED,
    },
    # <｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>
    rf"<｜tool▁sep｜>{NAME}\n```json": {
        "open_pattern": r"(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        r"(?P<name>[^\n]+)\n```json\n",
        "close_pattern": r"\n```<｜tool▁call▁end｜>\s*(?:<｜tool▁calls▁end｜>)?",
        "content": "json",
        "transform": _NAMED,
    },
    # to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>, or the channel first
    rf"to=functions\.{NAME}": {
        "open_pattern": r"(?:<\|channel\|>commentary )? ?to=functions\.(?P<name>[\w.-]+)(?:<\|channel\|>commentary)?"
        r"\s*(?:<\|constrain\|>)?(?:json)?<\|message\|>",
        "close_pattern": r"<\|call\|>\s*",
        "content": "json",
        "transform": _NAMED,
    },
}
# Written around thinking: seen in the template's text → (opens, closes).
THINKING = {
    "<|channel|>analysis<|message|>": ("<|channel|>analysis<|message|>", r"<\|end\|>(?:<\|start\|>assistant)?\s*"),
    "<think>": ("<think>", r"</think>\s*"),
    "<|channel>thought": ("<|channel>thought\n", r"<channel\|>\s*"),
}
# Templates in which content itself has an opening.
CONTENT_OPENS = ("<|channel|>final<|message|>",)


def supports_tool_calling(processing_class: Any) -> bool:
    """Whether the chat template writes a whole exchange with a tool: name and arguments of the call, and the answer."""
    if not processing_class.chat_template:
        return False
    template = Template(processing_class)
    answer = {"role": "tool", "name": NAME, "content": ANSWER}
    texts = (
        template.try_render([ASK, {"role": "assistant", "content": "", "tool_calls": [call]}, answer])
        for call in (_CALL, _CALL_AS_TEXT)
    )
    return any(text is not None and all(part in text for part in (NAME, KEY, VALUE, ANSWER)) for text in texts)


def get_training_chat_template(processing_class: Any = None, tokenizer: Any = None) -> str | None:
    """The template to train with: the tokenizer's own.

    The spans that `assistant_only_loss` trains are located in the rendered text, so no template needs
    `{% generation %}` markers, and none is replaced. A template that has markers is used by them. `tokenizer` is
    another name of the argument. Masks made by `apply_chat_template(return_assistant_tokens_mask=True)` need markers.
    """
    if (processing_class is None) == (tokenizer is None):
        raise ConfigError("get_training_chat_template takes `processing_class`, or `tokenizer` in its place: give one.")
    return (tokenizer if processing_class is None else processing_class).chat_template


def add_response_schema(processing_class: Any) -> Any:
    """Set `response_template` on the tokenizer, so that `parse_response` reads what this family writes.

    Returns the same object. Raises `DataError` when the template writes tool calls in a way that is not known.
    """
    template = Template(processing_class)
    calls, after_calls = _calls(template)
    fields = {**_thinking(template), **calls, **_content(template, after_calls)}
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": _turn_start(template),
        "fields": fields,
    }
    return processing_class


def _turn_start(template: Template) -> str:
    """What opens the assistant's turn, less any thinking that the generation prompt opens for it."""
    header = template.facts.header
    cut = [header.index(opener) for opener, _ in THINKING.values() if opener in header]
    start = header[: min(cut, default=len(header))]
    if not start.strip():
        raise DataError("The chat template opens no assistant turn; set `response_template` on the tokenizer by hand.")
    return start


def _thinking(template: Template) -> dict[str, Any]:
    for seen, (opens, closes) in THINKING.items():
        if seen in template.text or seen in template.facts.header:
            field = "reasoning_content" if "reasoning_content" in template.text else "thinking"
            return {field: {"open": opens, "close_pattern": closes, "content": "text"}}
    return {}


def _calls(template: Template) -> tuple[dict[str, Any], str]:
    """How calls are read, and what ends a turn of calls."""
    turns = ([ASK, {"role": "assistant", "content": "", "tool_calls": [call]}] for call in (_CALL, _CALL_AS_TEXT))
    text = next(filter(None, map(template.try_render, turns)), "")
    if NAME not in text:
        return {}, ""
    for seen, reading in CALLS.items():
        if re.search(seen, text):
            *_, last = re.finditer(reading["close_pattern"], text)
            return {"tool_calls": {"repeats": True, **reading}}, text[last.end() :].strip()
    at = text.index(NAME)
    raise DataError(
        f"The chat template writes tool calls in a way that is not known ({text[max(0, at - 40) : at + 40]!r}); set "
        "`response_template` on the tokenizer by hand."
    )


def _content(template: Template, after_calls: str) -> dict[str, Any]:
    tail = template.facts.tail
    stops = [tail.strip(), *(match.group() for match in template.tokens.finditer(tail)), after_calls]
    if "<|channel|>final" in template.text:
        stops += ["<|return|>", "<|end|>"]
    known = dict.fromkeys(stop for stop in [*stops, *_eos(template.tokenizer)] if stop)
    content = {"content": "text", "close_pattern": "|".join([*(rf"{re.escape(stop)}\s*" for stop in known), "$"])}
    opens = [opener for opener in CONTENT_OPENS if opener in template.text]
    return {"content": {**content, "open": opens[0]} if opens else content}


def _eos(tokenizer: Any) -> list[str]:
    return [tokenizer.eos_token] if tokenizer.eos_token else []


def parse_response(tokenizer: Any, ids: Sequence[int], prefix: Sequence[int] | None = None) -> dict[str, Any]:
    """The assistant message a model wrote, from its token ids. Text that cannot be read is returned as content.

    prefix: the ids of the prompt; needed where the prompt opens the message, with a thinking block for instance.

    e.g. '<tool_call>\\n{"name": "add", "arguments": {"a": 1}}\\n</tool_call><|im_end|>' -> {"role": "assistant",
    "content": "", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]}
    """
    if getattr(tokenizer, "response_template", None) is None:
        raise DataError("The tokenizer has no `response_template`; call add_response_schema(tokenizer) first.")
    try:
        message = tokenizer.parse_response(list(ids), prefix=list(prefix or []))
        _check_calls(message.get("tool_calls", []))
    except (ValueError, TypeError, KeyError):  # what a model writes may be anything
        return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
    content = message.get("content") or ""
    for end in _eos(tokenizer):
        content = content.removesuffix(end)
    return {**message, "content": content}


def _check_calls(calls: Any) -> None:
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError("a call without a name")
        if not isinstance(function.get("arguments"), Mapping):
            raise ValueError("a call without arguments")
