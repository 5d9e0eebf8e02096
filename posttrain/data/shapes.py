"""The shape in which a template takes messages, found by rendering probes: content as text or as parts, arguments of a
call as a mapping or as JSON text, and how a call without content is written.

Data sets write these in every way. A template that was given another way than its own fails, drops the call, or quotes
JSON twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from posttrain.errors import DataError

Message = Mapping[str, Any]
# `apply_chat_template` drops keys that are None, so None and an absent key are one.
Blank = Literal["absent", "empty"]
BLANKS: tuple[Blank, ...] = ("absent", "empty")
QUESTION = "\ue0d4\ue0e5\ue0f6"
_NAME, _KEY, _VALUE = "shapetool", "shapekey", "shapevalue"
# Keys of a message that are ours: weights of a turn.
OURS = ("weight", "train")


@dataclass(frozen=True)
class Shape:
    """What a template takes. e.g. Shape() takes everything as it is given"""

    wants_parts: bool = False  # content must be a list of parts: text is dropped or refused
    flattens_parts: bool = False  # content must be text: parts are refused, or written as Python writes a list
    arguments: Literal["any", "mapping", "text"] = "any"
    blank: tuple[Blank, ...] = BLANKS  # ways to write a call without content, those that work


def without_none(value: Any) -> Any:
    """Drop keys whose value is None at every depth: Arrow adds them to rows that lack a key other rows have."""
    if isinstance(value, Mapping):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [without_none(item) for item in value]
    return value


def as_parts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages whose text content is a list of parts. e.g. "Hi" -> [{"type": "text", "text": "Hi"}]"""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else dict(message)
        for message in messages
    ]


def find_shape(render: Callable[[list[dict[str, Any]]], str | None]) -> Shape:
    """The shape a template takes. `render` gives None where the template refuses."""
    ask = [{"role": "user", "content": QUESTION}]
    plain, parts = render(ask) or "", render(as_parts(ask)) or ""
    wants_parts = QUESTION not in plain and QUESTION in parts
    ask = as_parts(ask) if wants_parts else ask
    blanks: list[tuple[str, Blank]] = [(form, blank) for form in ("mapping", "text") for blank in BLANKS]
    chats = {pair: [*ask, _with_blank(_call(pair[0]), pair[1])] for pair in blanks}
    works = [pair for pair, chat in chats.items() if _writes_call(render(chat))]
    # Some fail only where the call is history.
    works = [pair for pair in works if _writes_call(render([*chats[pair], *ask]))] or works
    forms = {form for form, _ in works}
    arguments: Any = "any" if len(forms) != 1 else forms.pop()
    blank: tuple[Blank, ...] = tuple(b for b in BLANKS if any(b == other for _, other in works)) or BLANKS
    return Shape(wants_parts, not wants_parts and parts != plain, arguments, blank)


def _call(form: str) -> dict[str, Any]:
    arguments = {_KEY: _VALUE} if form == "mapping" else json.dumps({_KEY: _VALUE})
    call = {"id": "shape0001", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def _with_blank(message: Message, blank: Blank) -> dict[str, Any]:
    bare = {key: value for key, value in message.items() if key != "content"}
    return bare if blank == "absent" else {**bare, "content": ""}


def _writes_call(text: str | None) -> bool:
    """Whether a call was written, its JSON quoted once, and no word for missing content."""
    if text is None or not all(word in text for word in (_NAME, _KEY, _VALUE)):
        return False
    return f'\\"{_KEY}' not in text and "None" not in text


def fit(messages: Sequence[Message], shape: Shape) -> list[dict[str, Any]]:
    """Messages in the shape a template takes. Idempotent.

    Raises `DataError` for arguments that must be a mapping and are no JSON of one.
    """
    fitted = [_fit(message, index, shape) for index, message in enumerate(messages)]
    return as_parts(fitted) if shape.wants_parts else fitted


def _fit(message: Message, index: int, shape: Shape) -> dict[str, Any]:
    given = message.get("content")
    fitted = {key: value for key, value in without_none(message).items() if key not in OURS}
    if shape.flattens_parts and isinstance(given, (list, tuple)):
        fitted["content"] = "".join(part.get("text", "") if isinstance(part, Mapping) else str(part) for part in given)
    calls = fitted.get("tool_calls")
    if not calls:
        # Few templates can do without: most read the content of every message.
        return fitted if "content" in fitted else {**fitted, "content": ""}
    fitted["tool_calls"] = [_fit_call(call, index, shape) for call in calls]
    if given not in (None, ""):
        return fitted
    was: Blank = "empty" if given == "" else "absent"
    return _with_blank(fitted, was if was in shape.blank else shape.blank[0])


def _fit_call(call: Any, index: int, shape: Shape) -> Any:
    if not isinstance(call, Mapping):
        raise DataError(f"message {index} (assistant): a tool call is {call!r:.60}; write a mapping with 'function'.")
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _fit_call(call["function"], index, shape)}
    arguments = call.get("arguments")
    if shape.arguments == "text" and isinstance(arguments, Mapping):
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
    if shape.arguments == "mapping" and isinstance(arguments, str):
        return {**call, "arguments": _parsed(arguments, index, call)}
    return call


def _parsed(arguments: str, index: int, call: Message) -> Any:
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except json.JSONDecodeError as error:
        raise DataError(
            f"message {index} (assistant): the arguments of the call of {call.get('name')!r} are no JSON ({error}): "
            f"{arguments!r:.60}; the template takes a mapping."
        ) from error
    if not isinstance(value, Mapping):
        raise DataError(
            f"message {index} (assistant): the arguments of the call of {call.get('name')!r} are {arguments!r:.60}; "
            "write a JSON object."
        )
    return value
