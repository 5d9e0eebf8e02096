"""Text with trained spans → token ids with one weight a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from posttrain.data.spans import Span


@dataclass(frozen=True)
class Draft:
    """A row as text. `borders` are places no token may lie across: what stands before one is a prompt at inference.

    e.g. prompt "x." and completion "mem" -> Draft("x.mem", [(2, 5)], (2,), is_pair=True, plain=True)
    """

    text: str
    spans: list[Span]
    borders: tuple[int, ...] = ()
    is_pair: bool = False  # what stands before the border must have the ids it has alone, wherever they are cut
    plain: bool = False  # not rendered by a template: BOS is the tokenizer's to add, EOS ours
    weights: tuple[float, ...] | None = None  # of each span; 1 where None
    weight: float = 1.0  # of the row: multiplies all others

    @property
    def is_whole(self) -> bool:
        return not self.borders and self.weights is None and self.spans == [(0, len(self.text))]


class Encoder:
    """A tokenizer and what it adds around plain text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.eos = tokenizer.eos_token_id
        self._special = np.asarray(
            sorted({*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}), dtype=np.int64
        )
        self._headers: dict[str, np.ndarray] = {}
        bare = tokenizer("a", add_special_tokens=False)["input_ids"]
        full = tokenizer("a")["input_ids"]
        # What follows the text (an EOS, on some tokenizers) is left out: `encode` adds exactly one itself.
        self.prefix = next((full[:i] for i in range(len(full)) if full[i : i + len(bare)] == bare), [])

    def encode(self, drafts: Sequence[Draft]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return token ids (int32) and weights (float32) of each draft, in one call of the tokenizer."""
        fast = bool(self.tokenizer.is_fast)
        # Offsets cost as much as the tokens, and a row that is trained from end to end needs none.
        wanted = fast and not all(draft.is_whole for draft in drafts)
        texts = [draft.text for draft in drafts]
        out = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=wanted, verbose=False)
        prompts = self._prompts(drafts) if fast else {}
        rows = []
        for index, draft in enumerate(drafts):
            ids = np.asarray(out["input_ids"][index], dtype=np.int32)
            if draft.is_whole:
                weights = np.ones(len(ids), dtype=np.float32)
            elif fast:
                ids, weights = self._weigh(draft, ids, _pairs(out["offset_mapping"][index]), prompts.get(index))
            else:
                ids, weights = _joined(self._pieces(draft))
            ids, weights = self._close(ids, weights) if draft.plain else (ids, weights)
            rows.append((ids, weights if draft.weight == 1.0 else weights * np.float32(draft.weight)))
        return rows

    def apart(self, draft: Draft) -> list[np.ndarray]:
        """Ids (int32) of each part between the borders, tokenized on its own: they depend on no other part. Nothing is
        added around them."""
        parts = self._adding_up(draft, self._ids(draft.text)) or self._pieces(draft)
        return [ids for ids, _ in parts]

    def _prompts(self, drafts: Sequence[Draft]) -> dict[int, np.ndarray]:
        """The ids each prompt of a pair has alone. They can differ from the start of the whole without any token across
        the border: many tokenizers read "\\n\\n" as one token at the end and as two before a word."""
        texts = {
            at: draft.text[: draft.borders[0]] for at, draft in enumerate(drafts) if draft.is_pair and draft.borders
        }
        if not texts:
            return {}
        out = self.tokenizer(list(texts.values()), add_special_tokens=False, verbose=False)["input_ids"]
        return {at: np.asarray(ids, dtype=np.int32) for at, ids in zip(texts, out, strict=True)}

    def _ids(self, text: str) -> np.ndarray:
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []
        return np.asarray(ids, dtype=np.int32)

    def _decode(self, ids: np.ndarray) -> str:
        return self.tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)

    def _close(self, ids: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self.prefix and ids[: len(self.prefix)].tolist() != self.prefix:
            ids = np.concatenate([np.asarray(self.prefix, dtype=np.int32), ids])
            weights = np.concatenate([np.zeros(len(self.prefix), dtype=np.float32), weights])
        if self.eos is not None and (not len(ids) or ids[-1] != self.eos):
            ids = np.append(ids, np.int32(self.eos))
            weights = np.append(weights, np.float32(1.0))
        return ids, weights

    def _weigh(
        self, draft: Draft, ids: np.ndarray, offsets: np.ndarray, prompt: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        starts = _token_starts(offsets)
        for border in draft.borders:
            across = (starts < border) & (border < offsets[:, 1])
            if prompt is None and not across.any() and self._reads_alike(draft.text, border, ids, starts):
                continue
            before = self._ids(draft.text[:border]) if prompt is None else prompt
            if not np.array_equal(ids[: len(before)], before):
                parts = self._adding_up(draft, ids)
                if parts is not None:
                    return _joined(parts)
                starts[across] = border
            elif across.any() and len(before) < len(starts):
                # Offsets leave spaces out, so the token only seemed to lie across the border.
                starts[len(before)] = max(starts[len(before)], border)
        return ids, _inside(starts, draft)

    def _reads_alike(self, text: str, border: int, ids: np.ndarray, starts: np.ndarray) -> bool:
        """Whether the text up to a border has the ids it has alone. What stands before its last special token has, so
        the rest is compared: a header such as "assistant\n", which many rows share."""
        until = int(np.searchsorted(starts, border))
        special = np.flatnonzero(np.isin(ids[:until], self._special))
        first = int(special[-1]) if len(special) else 0
        header = text[int(starts[first]) : border] if len(special) else text[:border]
        if header not in self._headers:
            if len(self._headers) > 1024:
                self._headers.clear()
            self._headers[header] = self._ids(header)
        return np.array_equal(ids[first:until], self._headers[header])

    def _adding_up(self, draft: Draft, whole: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]] | None:
        """The parts tokenized on their own, where they read as the whole does: some tokenizers write a space before
        every text they are given."""
        for anchor in (self.tokenizer.eos_token or "", ""):
            parts = self._pieces(draft, anchor)
            if self._decode(_joined(parts)[0]) == self._decode(whole):
                return parts
        return None

    def _pieces(self, draft: Draft, anchor: str = "") -> list[tuple[np.ndarray, np.ndarray]]:
        """Tokenize the parts between borders on their own, as inference does.

        With an anchor, a special token stands before every part but the first and is taken off again: the part is then
        read as the middle of a text, not as its beginning.
        """
        cuts = [0, *draft.borders, len(draft.text)]
        if not self.tokenizer.is_fast:
            cuts += [place for span in draft.spans for place in span]
        parts = []
        for start, end in pairwise(sorted(cuts)):
            part = draft.text[start:end]
            if self.tokenizer.is_fast:
                lead = anchor if start else ""
                out = self.tokenizer(lead + part, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
                skip = 1 if lead else 0
                ids = np.asarray(out["input_ids"], dtype=np.int32)[skip:]
                starts = start - len(lead) + _token_starts(_pairs(out["offset_mapping"]))[skip:]
            else:
                ids = self._ids(part)
                starts = np.full(len(ids), start)
            parts.append((ids, _inside(starts, draft)))
        return parts


def _joined(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    ids, weights = zip(*parts, strict=True)
    return np.concatenate(ids), np.concatenate(weights)


def _pairs(offsets: Sequence[Span]) -> np.ndarray:
    return np.asarray(offsets, dtype=np.int64).reshape(-1, 2)


def _token_starts(offsets: np.ndarray) -> np.ndarray:
    """Where each token starts, spaces included: byte-level tokenizers leave a token's leading space out of its offset.

    e.g. "a b" as [[0, 1], [2, 3]] -> [0, 1]
    """
    ends = np.maximum.accumulate(offsets[:, 1])
    return np.minimum(offsets[:, 0], np.concatenate([[0], ends[:-1]]) if len(ends) else ends)


def _inside(starts: np.ndarray, draft: Draft) -> np.ndarray:
    """The weight of each token: that of the span it starts in, 0 outside. Spans are in order and do not overlap."""
    if not draft.spans:
        return np.zeros(len(starts), dtype=np.float32)
    spans = np.asarray(draft.spans, dtype=np.int64)
    at = np.searchsorted(spans[:, 0], starts, side="right") - 1
    inside = (at >= 0) & (starts < spans[at, 1])
    weights = np.ones(len(spans)) if draft.weights is None else np.asarray(draft.weights)
    return np.where(inside, weights[at], 0.0).astype(np.float32)
