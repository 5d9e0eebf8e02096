"""Proof that spans are the assistant's: the conversation is rendered twice more, and what must not move is compared.

1. With every question and every tool result replaced, each span reads as before, and between two spans stands each of
   the messages that were said between the turns. So no span holds what others said, and no message was dropped.
2. With every answer replaced, the text outside the spans reads as before. So nothing the assistant said lies outside.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.data.shapes import QUESTION
from posttrain.data.template import SENTINEL, Message, Template, common_prefix
from posttrain.errors import DataError

Span = tuple[int, int]
REASONING = ("reasoning_content", "reasoning", "thinking")


def prove(template: Template, messages: Sequence[Message], text: str, spans: Sequence[Span], marked: bool) -> None:
    """Raise `DataError` with the doubtful place of the rendering when the spans are not the assistant's turns.

    marked: the template says which spans to train; then it may leave out what it likes, but not train what others said.
    """
    _prove_spans(template, messages, text, spans, counted=not marked)
    if not marked:
        answered = [same_shape(m) if m.get("role") == "assistant" else m for m in messages]
        _prove_gaps(text, spans, template.try_render(answered))


def _prove_spans(
    template: Template, messages: Sequence[Message], text: str, spans: Sequence[Span], counted: bool
) -> None:
    lost: int | None = None
    # Said again between sentinels too: some templates look for switches in a question ("/no_think").
    for again in (False, True):
        other = template.try_render([_asked(message, again) for message in messages])
        if other is None:  # a template that reads questions, and takes not every one
            continue
        lost = _first_lost(text, spans, other)
        if lost is None:
            dropped = _dropped(template, messages, other) if counted else None
            if dropped is not None:
                raise _not_written(messages[dropped], dropped, text)
            return
    if lost is not None:
        raise _doubt(text, *spans[lost], f"turn {lost} of the assistant holds what the user or a tool said")


def _asked(message: Message, again: bool) -> Message:
    if message.get("role") not in ("user", "tool"):
        return message
    content = message.get("content")
    keep = again and isinstance(content, str)
    return {**message, "content": f"{QUESTION}{content}{QUESTION}" if keep else QUESTION}


def _first_lost(text: str, spans: Sequence[Span], other: str) -> int | None:
    """The first span that another rendering does not hold, in order."""
    position = 0
    for number, (start, end) in enumerate(spans):
        at = other.find(text[start:end], position)
        if at < 0:
            return number
        position = at + (end - start)
    return None


def _not_written(message: Message, index: int, text: str) -> DataError:
    return DataError(
        f"message {index} ({message['role']}, {message.get('content')!r:.60}) is not written by the chat template: "
        f"{shown(text, len(text), len(text))}. Remove the message, or set `chat_template_path` to a template that "
        "writes it."
    )


def _dropped(template: Template, messages: Sequence[Message], other: str) -> int | None:
    """The first message of a user or a tool that is not written, when fewer are written than there are."""
    places = [i for i, m in enumerate(messages) if m.get("role") in ("user", "tool")]
    if other.count(QUESTION) >= len(places):
        return None
    for index in places:
        one = [{**m, "content": QUESTION} if i == index else m for i, m in enumerate(messages)]
        if QUESTION not in (template.try_render(one) or QUESTION):
            return index
    return None


def refuse_dropped(template: Template, messages: Sequence[Message], text: str) -> None:
    """Raise `DataError` when the template does not write a message or a call. Cheap where content is written as is."""
    messages = template.normalize(messages)
    for index, message in enumerate(messages):
        content = message.get("content")
        doubtful = isinstance(content, str) and content.strip() and content.strip() not in text
        if doubtful and not _writes(template, messages, index):
            raise _not_written(message, index, text)
        calls = message.get("tool_calls")
        if calls and SENTINEL not in _with(template, messages, index, same_shape({**message, "content": ""}), SENTINEL):
            raise call_not_written(index, str((calls[0].get("function") or calls[0]).get("name", "")))


def _writes(template: Template, messages: Sequence[Message], index: int) -> bool:
    return QUESTION in _with(template, messages, index, {**messages[index], "content": QUESTION}, QUESTION)


def _with(template: Template, messages: Sequence[Message], index: int, other: Message, refused: str) -> str:
    """The text with another message at `index`; `refused` where the template does not take it."""
    return template.try_render([*messages[:index], other, *messages[index + 1 :]]) or refused


def call_not_written(index: int, name: str) -> DataError:
    return DataError(
        f"message {index} (assistant) calls the tool {name!r} and the chat template does not write the call, so the "
        "turn would be trained without it. Set `chat_template_path` to a template with tool calls, or write the call "
        "into the content."
    )


def _prove_gaps(text: str, spans: Sequence[Span], other: str | None) -> None:
    if other is None:
        return
    borders = [0, *(place for span in spans for place in span), len(text)]
    gaps = [(borders[i], borders[i + 1]) for i in range(0, len(borders), 2)]
    position = 0
    for number, (start, end) in enumerate(gaps):
        gap = text[start:end]
        if number == 0:
            at = 0 if other.startswith(gap) else -1
        elif number == len(gaps) - 1:
            at = len(other) - len(gap) if other.endswith(gap) else -1
        else:
            at = other.find(gap, position)
        if at < position:
            place = start + common_prefix(gap, other[position:]) if number == 0 else start
            raise _doubt(text, place, end, "what the assistant said changes the text outside its turns")
        position = at + len(gap)


def _doubt(text: str, start: int, end: int, why: str) -> DataError:
    return DataError(
        f"the chat template's turns cannot be proved: {why}: {shown(text, start, end)}. Mark the turns in the template "
        "with {% generation %}, or train without `assistant_only_loss`."
    )


def shown(text: str, start: int, end: int, around: int = 60) -> str:
    """A place of a rendering in one line, between ⟦ and ⟧, with what stands around it."""
    inside = text[start:end]
    if len(inside) > 2 * around:
        inside = f"{inside[:around]} … {inside[-around:]}"
    before, after = text[max(0, start - around) : start], text[end : end + around]
    return repr(f"{'…' if start > around else ''}{before}⟦{inside}⟧{after}{'…' if end + around < len(text) else ''}")


# ---- a turn with other words -----------------------------------------------------------------------------------------


def same_shape(message: Message) -> dict[str, Any]:
    """A turn in other words: its calls kept and their arguments replaced, its thinking still thinking."""
    shaped = dict(message)
    for name in ("content", *REASONING):
        if shaped.get(name):
            shaped[name] = _other_words(shaped[name])
    if "tool_calls" in shaped:
        shaped["tool_calls"] = [_replace_arguments(call) for call in shaped["tool_calls"]]
    return shaped


def _other_words(value: Any) -> Any:
    if isinstance(value, str):
        # Tags stay: templates cut thinking out at them.
        parts = re.split(r"(</?think>)", value)
        return "".join(
            part if part.startswith(("<think", "</think")) or not part.strip() else SENTINEL for part in parts
        )
    if isinstance(value, list):
        return [
            {**part, "text": _other_words(part.get("text", ""))} if isinstance(part, Mapping) else part
            for part in value
        ]
    return SENTINEL


def _replace_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _replace_arguments(call["function"])}
    arguments = call.get("arguments")
    if isinstance(arguments, Mapping):
        return {**call, "arguments": dict.fromkeys(arguments, SENTINEL) or {SENTINEL: SENTINEL}}
    return {**call, "arguments": SENTINEL}


def thinking(message: Message) -> list[str]:
    """What a turn thinks: under a key of its own, or before </think> in its content. Stripped, none empty."""
    thoughts = [message.get(key) for key in REASONING]
    content = message.get("content")
    if isinstance(content, str) and "</think>" in content:
        thoughts.append(content.rpartition("</think>")[0].rpartition("<think>")[2])
    return [thought.strip() for thought in thoughts if isinstance(thought, str) and thought.strip()]
