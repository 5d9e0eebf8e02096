"""Token ids → what to show for each: its text, whether it is trained, whether it is special."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.report.survey import Laid
from posttrain.report.visible import visible

_LONGEST = 8  # tokens that may share one character


@dataclass(frozen=True)
class Shown:
    """One token, or a few that hold the bytes of one character."""

    text: str
    ids: tuple[int, ...]
    at: int
    weight: float
    special: bool


@dataclass(frozen=True)
class Run:
    """Neighbours of equal weight. A gap has no tokens, and says how many are left out."""

    weight: float
    tokens: tuple[Shown, ...]
    left_out: int = 0


class TokenTexts:
    """Texts of a tokenizer's tokens as they stand in the middle of a text, leading spaces included."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.anchor: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
        self.before = self._decode(self.anchor)
        self.special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special |= set(tokenizer.all_special_ids)
        self._known: dict[tuple[int, ...], str] = {}

    def runs(self, laid: Laid, head: int = 350, tail: int = 350) -> list[Run]:
        """A sequence as runs of equal weight; of a long one the first and the last tokens."""
        ids, weights = laid.ids, laid.weights
        whole = len(ids) <= head + tail + 50
        parts = [(0, len(ids))] if whole else [(0, head), (len(ids) - tail, len(ids))]
        out: list[Run] = []
        for number, (start, end) in enumerate(parts):
            if number:
                out.append(Run(0.0, (), start - parts[0][1]))
            held: list[Shown] = []
            for token in self._tokens(ids[start:end], weights[start:end], laid.start + start):
                if held and held[-1].weight != token.weight:
                    out.append(Run(held[0].weight, tuple(held)))
                    held = []
                held.append(token)
            if held:
                out.append(Run(held[0].weight, tuple(held)))
        return out

    def _tokens(self, ids: Sequence[int], weights: Sequence[float], start: int) -> Iterator[Shown]:
        at = 0
        while at < len(ids):
            size = self._size(ids, at)
            group = tuple(int(i) for i in ids[at : at + size])
            special = size == 1 and group[0] in self.special
            yield Shown(self._text(group), group, start + at, float(weights[at]), special)
            at += size

    def _size(self, ids: Sequence[int], at: int) -> int:
        for size in range(1, min(_LONGEST, len(ids) - at) + 1):
            if not self._text(tuple(int(i) for i in ids[at : at + size])).endswith("\ufffd"):
                return size
        return 1

    def _text(self, group: tuple[int, ...]) -> str:
        if group not in self._known:
            text = self._decode([*self.anchor, *group])
            self._known[group] = text[len(self.before) :] if text.startswith(self.before) else self._decode(group)
        return self._known[group]

    def _decode(self, ids: Sequence[int]) -> str:
        try:
            return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        except (IndexError, OverflowError, KeyError, TypeError, ValueError):  # an id the tokenizer does not have
            return "".join(f"⟨id {i}⟩" for i in ids)


def shown_text(token: Shown) -> str:
    """What stands for a token: marks for whitespace, pictures for control characters, its id where it has no text."""
    if not token.text:
        return f"⟨id {token.ids[0]}⟩"
    return visible(token.text, spaces=not token.special)


def weight_mark(weight: float) -> str:
    """What stands before a run of tokens. e.g. 1 -> "", 0.5 -> "×0.5 ", -1 -> "✗ " """
    size = abs(weight)
    return f"{'✗' if weight < 0 else ''}{'' if size in (0.0, 1.0) else f'×{size:g}'} ".lstrip()
