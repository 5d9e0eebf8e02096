"""Text of any origin, made safe to look at: nothing invisible, nothing that moves a cursor or turns the line around."""

from __future__ import annotations

import unicodedata

_NAMED = {"\n": "↵\n", "\t": "→\t", "\r": "␍", "\x7f": "␡", "\xa0": "⍽"}
# Format characters that change what stands around them: joiners, direction marks and overrides, the byte order mark.
_UNSEEN = {"Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def visible(text: str, spaces: bool = False, keep_newlines: bool = True) -> str:
    """Control characters as their pictures, unseen format characters by number. A newline is marked and kept, unless
    `keep_newlines` is off. With `spaces`, spaces are marked too.

    e.g. "a\\tb\\x1b[0m" -> "a→\\tb␛[0m", "\\u202e" -> "⟨U+202E⟩"
    """
    shown = "".join(map(_shown, text))
    if spaces:
        shown = shown.replace(" ", "·")
    return shown if keep_newlines else shown.replace("\n", "").replace("\t", "")


def _shown(character: str) -> str:
    if character in _NAMED:
        return _NAMED[character]
    number = ord(character)
    if number < 32:
        return chr(0x2400 + number)
    if number < 127:
        return character
    kind = unicodedata.category(character)
    return f"⟨U+{number:04X}⟩" if kind == "Cc" or kind in _UNSEEN else character


def one_line(text: str, width: int = 80) -> str:
    """The beginning of a text on one line. e.g. "a\\nb" -> "a↵b" """
    # Cut before and after: a text may be megabytes long, and a mark is longer than what it stands for.
    shown = visible(text[: width + 1], keep_newlines=False)
    return shown if len(shown) <= width and len(text) <= width else shown[: width - 1] + "…"
