"""Text with trained spans → token ids with one weight a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from posttrain.data.spans import Span


@dataclass(frozen=True)
class Draft:
    """A row as text. `borders` are places no token may lie across: what stands before one is a prompt at inference.

    e.g. prompt "x." and completion "mem" -> Draft("x.mem", [(2, 5)], (2,), plain=True)
    """

    text: str
    spans: list[Span]
    borders: tuple[int, ...] = ()
    plain: bool = False  # not rendered by a template: BOS is the tokenizer's to add, EOS ours


class Encoder:
    """A tokenizer and what it adds around plain text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.eos = tokenizer.eos_token_id
        bare = tokenizer("a", add_special_tokens=False)["input_ids"]
        full = tokenizer("a")["input_ids"]
        # What follows the text (an EOS, on some tokenizers) is left out: `encode` adds exactly one itself.
        self.prefix = next((full[:i] for i in range(len(full)) if full[i : i + len(bare)] == bare), [])

    def encode(self, drafts: Sequence[Draft]) -> list[tuple[list[int], list[float]]]:
        """Return token ids and weights of each draft, in one call of the tokenizer."""
        fast = bool(self.tokenizer.is_fast)
        texts = [draft.text for draft in drafts]
        out = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=fast, verbose=False)
        rows = []
        for index, draft in enumerate(drafts):
            if fast:
                ids, weights = self._weigh(draft, out["input_ids"][index], out["offset_mapping"][index])
            else:
                ids, weights = self._pieces(draft)
            rows.append(self._close(ids, weights, draft) if draft.plain else (ids, weights))
        return rows

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) if text else []

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def _close(self, ids: list[int], weights: list[float], draft: Draft) -> tuple[list[int], list[float]]:
        if self.prefix and ids[: len(self.prefix)] != self.prefix:
            ids = [*self.prefix, *ids]
            weights = [0.0] * len(self.prefix) + weights
        if self.eos is not None and (not ids or ids[-1] != self.eos):
            ids = [*ids, self.eos]
            weights = [*weights, 1.0]
        return ids, weights

    def _weigh(self, draft: Draft, ids: list[int], offsets: Sequence[Span]) -> tuple[list[int], list[float]]:
        starts = _token_starts(offsets)
        for border in draft.borders:
            lies_across = any(start < border < end for start, (_, end) in zip(starts, offsets, strict=True))
            if lies_across and not self._is_true_border(draft.text, border, ids, starts):
                parts = self._pieces(draft)
                # Some tokenizers write a space before every text they are given: the parts would then not add up.
                if self._decode(parts[0]) == self._decode(ids):
                    return parts
                starts = [border if s < border < e else s for s, (_, e) in zip(starts, offsets, strict=True)]
        return list(ids), _inside(starts, draft.spans)

    def _is_true_border(self, text: str, border: int, ids: list[int], starts: list[int]) -> bool:
        """Whether the text before the border has the same ids alone. Offsets may leave out the spaces of a token, so a
        token can seem to lie across a border when none does."""
        before = self.ids(text[:border])
        if ids[: len(before)] != before:
            return False
        if len(before) < len(starts) and starts[len(before)] < border:
            starts[len(before)] = border
        return True

    def _pieces(self, draft: Draft) -> tuple[list[int], list[float]]:
        """Tokenize the parts between borders on their own, as inference does."""
        cuts = sorted({0, len(draft.text), *draft.borders})
        if not self.tokenizer.is_fast:
            cuts = sorted({*cuts, *(place for span in draft.spans for place in span)})
        ids: list[int] = []
        weights: list[float] = []
        for start, end in pairwise(cuts):
            part = draft.text[start:end]
            if self.tokenizer.is_fast:
                out = self.tokenizer(part, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
                piece = list(out["input_ids"])
                starts = [start + at for at in _token_starts(out["offset_mapping"])]
            else:
                piece = self.ids(part)
                starts = [start] * len(piece)
            ids += piece
            weights += _inside(starts, draft.spans)
        return ids, weights


def _token_starts(offsets: Sequence[Span]) -> list[int]:
    """Where each token starts, spaces included: byte-level tokenizers leave a token's leading space out of its offset.

    e.g. "a b" as (0, 1), (2, 3) -> [0, 1]
    """
    starts: list[int] = []
    end = 0
    for start, stop in offsets:
        starts.append(min(start, end))
        end = max(end, stop)
    return starts


def _inside(starts: Sequence[int], spans: Sequence[Span]) -> list[float]:
    """1.0 for each token that starts inside a span. Both are in order, so one pass is enough."""
    weights: list[float] = []
    index = 0
    for start in starts:
        while index < len(spans) and start >= spans[index][1]:
            index += 1
        weights.append(1.0 if index < len(spans) and start >= spans[index][0] else 0.0)
    return weights
