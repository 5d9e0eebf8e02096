"""What the words of a chat tell before a template has touched them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from typing import Any

CHATS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
# UTF-8 that was read as Latin-1 or Windows-1252, and what stands for bytes that were no text.
_MOJIBAKE = re.compile("\ufffd|Ã[\x80-\xbf©¨ªº¼½¾±¡¤¶]|â€|Â[\xa0-\xbf]")
_NAMES = {"human": "user", "gpt": "assistant"}

TEXT_FAULTS = (
    (
        "markup",
        "Special tokens inside messages",
        "hold a special token of the tokenizer in the text of a message, which is read as that token. Rows that were "
        "rendered once already are rendered twice.",
        "Give the messages without the template's markup, or the rendered rows as `text`.",
    ),
    (
        "order",
        "Turns in an unusual order",
        "begin with the assistant, have the user speak twice in a row, or do not end with the assistant.",
        "Look whether roles are swapped or turns are lost. What the assistant never answers trains nothing.",
    ),
    (
        "mojibake",
        "Broken characters",
        "hold characters of a wrong encoding, such as Ã© for é.",
        "Read the source as UTF-8, or mend the text.",
    ),
)
"""Key, title, what the rows do, and the fix."""


def text_flags(raw: Any, specials: Collection[str]) -> dict[str, list[int]]:
    """Places of the rows with each of `TEXT_FAULTS`; at most once each. `raw`: rows as they are in the source."""
    found: dict[str, list[int]] = {key: [] for key, *_ in TEXT_FAULTS}
    marks = [text for text in specials if len(text) > 2]
    columns = [name for name in (*CHATS, "text") if name in raw.column_names]
    at = 0
    for batch in raw.select_columns(columns).iter(batch_size=256) if columns else ():
        for values in zip(*(batch[name] for name in columns), strict=True):
            for key in _flags(dict(zip(columns, values, strict=True)), marks):
                found[key].append(at)
            at += 1
    return found


def _flags(row: Mapping[str, Any], marks: list[str]) -> Iterator[str]:
    chats = {name: value for name, value in row.items() if isinstance(value, list)}
    said = [text for messages in chats.values() for text in _texts(messages)]
    if any(mark in text for text in said for mark in marks):
        yield "markup"
    # A prompt may be any part of a conversation; a whole one begins with a question and ends with an answer.
    if any(_is_out_of_order(chats[name]) for name in ("messages", "conversations") if name in chats):
        yield "order"
    if any(_MOJIBAKE.search(text) for text in (*said, *(v for v in row.values() if isinstance(v, str)))):
        yield "mojibake"


def _texts(messages: list[Any]) -> Iterator[str]:
    for message in messages:
        if isinstance(message, Mapping):
            yield from (v for k, v in message.items() if isinstance(v, str) and k not in ("role", "from", "name"))


def _is_out_of_order(messages: list[Any]) -> bool:
    roles = [m.get("role") or m.get("from") for m in messages if isinstance(m, Mapping)]
    roles = [_NAMES.get(str(role), str(role)) for role in roles]
    turns = [role for role in roles if role not in ("system", "developer")]
    if not turns:
        return False
    twice = any(a == b == "user" for a, b in pairwise(turns))
    return turns[0] != "user" or twice or turns[-1] != "assistant"
