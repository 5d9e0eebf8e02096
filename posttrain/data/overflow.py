"""What becomes of each row: kept, cut, split, or dropped and why. Nothing is lost that is not counted here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np

from posttrain.errors import ConfigError, DataError

Overflow = Literal["truncate", "split", "drop", "error"]
OVERFLOWS: tuple[str, ...] = get_args(Overflow)

# What became of a row, or of a piece of one. A row that was split is KEPT once and CONTINUED after; a piece of it that
# trains nothing is EMPTY.
KEPT, FILLED, MASKED, TOO_LONG, CONTINUED, EMPTY = range(6)
REASONS = {FILLED: "filled", MASKED: "masked", TOO_LONG: "too_long"}
EXAMPLES = 64

Piece = tuple[np.ndarray, np.ndarray, int, int]
"""Token ids, weights, what became of it, and tokens cut away."""


@dataclass(frozen=True)
class Limit:
    """The longest row, and what happens to one that is longer.

    truncate  one end is cut away; `keep` says which is kept: "keep_start" or "keep_end"
    split     it goes on in another row, which begins with the last token of the one before as context: the first target
              of a piece has something before it, so every target is trained once, however the row was cut
    drop      it is left out and counted
    error     it stops the run
    """

    tokens: int | None = None
    overflow: Overflow = "truncate"
    keep: str = "keep_start"

    def __post_init__(self) -> None:
        if self.overflow not in OVERFLOWS:
            raise ConfigError(f"`overflow` is {self.overflow!r}; choose one of {', '.join(OVERFLOWS)}.")
        if self.overflow == "split" and self.tokens is not None and self.tokens < 2:
            raise ConfigError(f"`max_length` is {self.tokens}; a target needs one token before it: set at least 2.")

    def apply(self, ids: np.ndarray, weights: np.ndarray) -> list[Piece]:
        """Return the rows a row becomes: one, or several where it is split.

        e.g. 5 tokens at a limit of 3: truncate -> [0, 3); split -> [0, 3), [2, 5)
        Raises `DataError` for a long row under `error`.
        """
        over = 0 if self.tokens is None else max(0, len(ids) - self.tokens)
        if over and self.overflow == "error":
            raise DataError(
                f"{len(ids)} tokens, and `max_length` is {self.tokens} with `overflow` 'error'; raise `max_length`, "
                "shorten the row, or choose another `overflow`."
            )
        if over and self.overflow == "drop":
            return [(ids[:0], weights[:0], TOO_LONG, 0)]
        if over and self.overflow == "split":
            return self._split(ids, weights)
        had_targets = weights[1:].any()
        if over:
            keep = slice(over, None) if self.keep == "keep_end" else slice(0, self.tokens)
            ids, weights = ids[keep], weights[keep]
        weights = _without_first(weights)
        if weights.any():
            return [(ids, weights, KEPT, over)]
        return [(ids[:0], weights[:0], FILLED if had_targets else MASKED, over)]

    def _split(self, ids: np.ndarray, weights: np.ndarray) -> list[Piece]:
        pieces: list[Piece] = []
        state = KEPT
        for start, end in pieces_of(len(ids), self.tokens or len(ids)):
            part = _without_first(weights[start:end])
            if part.any():
                pieces.append((ids[start:end], part, state, 0))
                state = CONTINUED
            else:
                pieces.append((ids[:0], part[:0], EMPTY, 0))
        return pieces if state == CONTINUED else [(ids[:0], weights[:0], MASKED, 0)]


def pieces_of(length: int, capacity: int, carry: int = 1) -> list[tuple[int, int]]:
    """Cut a row at a capacity; each piece after the first begins with the `carry` tokens before it.

    e.g. 5, 3 -> [(0, 3), (2, 5)]; 5, 3, carry=0 -> [(0, 3), (3, 5)]
    """
    step = max(1, capacity - carry) if capacity > carry else capacity
    last = max(1, length - carry) if capacity > carry else length
    return [(start, min(start + capacity, length)) for start in range(0, last, step)]


def _without_first(weights: np.ndarray) -> np.ndarray:
    """The first token has nothing before it to be predicted from."""
    weights = weights.copy()
    weights[:1] = 0.0
    return weights


@dataclass
class PreparationReport:
    """What happened to the rows. Nothing is dropped or cut that is not counted here. Filled as rows flow when the data
    is streamed.

    `examples` names the first rows of each fate: filled, masked, too_long, cut, split.
    """

    name: str = "train"
    rows_in: int = 0
    rows_kept: int = 0
    rows_without_targets: int = 0
    rows_filled: int = 0  # of those without targets, the ones whose targets `max_length` cut away
    rows_cut: int = 0
    tokens_cut: int = 0
    rows_split: int = 0
    pieces: int = 0  # rows made by splitting
    pieces_without_targets: int = 0
    rows_too_long: int = 0  # dropped
    tokens: int = 0
    targets: int = 0
    examples: dict[str, list[int]] = field(default_factory=dict)

    def summary(self) -> str:
        """One line. e.g. "train: 7 of 10 rows, 120 tokens, 60 targets; 3 rows without targets dropped" """
        parts = [f"{self.name}: {self.rows_kept} of {self.rows_in} rows, {self.tokens} tokens, {self.targets} targets"]
        if self.rows_without_targets:
            parts.append(f"{count_of(self.rows_without_targets, 'row')} without targets dropped")
        if self.rows_too_long:
            parts.append(f"{count_of(self.rows_too_long, 'row')} longer than `max_length` dropped")
        if self.rows_cut:
            parts.append(f"{count_of(self.tokens_cut, 'token')} cut from {count_of(self.rows_cut, 'row')}")
        if self.rows_split:
            made = f"{count_of(self.rows_split, 'row')} split in {count_of(self.pieces, 'piece')}"
            empty = self.pieces_without_targets
            parts.append(made + (f", {empty} without targets dropped" if empty else ""))
        return "; ".join(parts)

    def add(self, states: Any, cut: Any, tokens: Any, targets: Any, sources: Any) -> None:
        """Count rows and pieces: what became of each, the tokens cut, kept and trained, and the row it is of."""
        state, lost, source = (np.asarray(values, dtype=np.int64) for values in (states, cut, sources))
        kept = state == KEPT
        lost = np.where(kept, lost, 0)
        parts = kept | (state == CONTINUED) | (state == EMPTY)
        of_split = np.isin(source, source[(state == CONTINUED) | (state == EMPTY)])
        self.rows_in += int((state <= TOO_LONG).sum())
        self.rows_kept += int(kept.sum())
        self.rows_filled += int((state == FILLED).sum())
        self.rows_without_targets += int(((state == FILLED) | (state == MASKED)).sum())
        self.rows_too_long += int((state == TOO_LONG).sum())
        self.rows_cut += int((lost > 0).sum())
        self.tokens_cut += int(lost.sum())
        self.rows_split += int((kept & of_split).sum())
        self.pieces += int((parts & of_split).sum())
        self.pieces_without_targets += int((state == EMPTY).sum())
        self.tokens += int(np.asarray(tokens, dtype=np.int64)[parts].sum())
        self.targets += int(np.asarray(targets, dtype=np.int64)[parts].sum())
        for name, where in (
            *((name, state == number) for number, name in REASONS.items()),
            ("cut", lost > 0),
            ("split", kept & of_split),
        ):
            held = self.examples.setdefault(name, [])
            held.extend(source[where][: EXAMPLES - len(held)].tolist())

    def why_empty(self, max_length: int | None) -> str:
        """Why no row is left, and what to change."""
        masked = self.rows_without_targets - self.rows_filled
        reasons = []
        if self.rows_filled:
            reasons.append(f"in {self.rows_filled} the prompt fills `max_length`={max_length}; raise it")
        if masked:
            reasons.append(f"in {masked} every token is masked or the row is shorter than two tokens; check the rows")
        if self.rows_too_long:
            reasons.append(f"{self.rows_too_long} are longer than `max_length`={max_length} and dropped; raise it")
        return f"The {self.name} set: all {self.rows_in} rows have nothing to train: {', '.join(reasons)}."


def count_of(number: int, noun: str) -> str:
    """e.g. 1, "row" -> "1 row"; 2, "row" -> "2 rows" """
    return f"{number} {noun}{'' if number == 1 else 's'}"
