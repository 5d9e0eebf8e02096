"""Bins over the whole data set."""

from __future__ import annotations

import gc
import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from posttrain.data.filling import full_bins
from posttrain.data.overflow import pieces_of
from posttrain.errors import ConfigError, DataError, suggest

logger = logging.getLogger(__name__)

GOOD = 0.998  # of the fewest bins that could hold the tokens: nothing better is looked for


class Piece(NamedTuple):
    """Tokens [start, end) of a row of the data set. e.g. the first four tokens of row 2 -> Piece(2, 0, 4)

    A tuple, since there is at least one a row and a dataclass takes three times as long to make.
    """

    row: int
    start: int
    end: int


def plan_bins(lengths: Sequence[int], capacity: int, strategy: str = "bfd", carry: int = 1) -> list[list[Piece]]:
    """Lay rows of the given lengths in bins of `capacity` tokens. The plan depends on its arguments only.

    bfd        best fit decreasing: whole rows, the longest first, each in the fullest bin that still takes it; where
               that leaves gaps, bins that are full are made first
    bfd_split  the same, after rows longer than a bin were cut in pieces of `capacity`
    wrapped    rows in their order, cut at the borders: every bin but the last is full, but for `carry` tokens

    Where a row is cut, the next piece begins with the last `carry` tokens of the one before, as context. The first
    token of a piece is no target, so with 1 every target is trained exactly once; with 0 every token is laid exactly
    once, and the first target of each later piece is lost. A bin of one token carries nothing.

    e.g. plan_bins([4, 4, 1], 5) -> [[Piece(0, 0, 4), Piece(2, 0, 1)], [Piece(1, 0, 4)]] up to the choice of bin
    Rows without tokens are in no bin. Raises `ConfigError` for an unknown strategy or capacity, and `DataError` for a
    row longer than a bin under `bfd`: cut it first.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(
            f"`packing_strategy` is {strategy!r}; choose one of {', '.join(STRATEGIES)}.{suggest(strategy, STRATEGIES)}"
        )
    if capacity < 1:
        raise ConfigError(f"The capacity of a bin is {capacity} tokens; set `max_length` to at least 1.")
    # A plan only makes small objects and frees none, yet the collector would walk over all of them again and again:
    # more than half of the time for a million rows.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return STRATEGIES[strategy](lengths, capacity, carry)
    finally:
        if collecting:
            gc.enable()


def has_targets(weights: Sequence[float], piece: Piece) -> bool:
    """Whether a piece trains anything: its first token has nothing before it."""
    return any(weights[piece.start + 1 : piece.end])


def drop_untrained(bins: list[list[Piece]], weights: Sequence[Sequence[float]]) -> tuple[list[list[Piece]], int]:
    """Take out the pieces that train nothing, and the bins that held only such. Returns the bins, and how many pieces
    were dropped."""
    kept, dropped = [], 0
    for pieces in bins:
        trained = [piece for piece in pieces if has_targets(weights[piece.row], piece)]
        dropped += len(pieces) - len(trained)
        if trained:
            kept.append(trained)
    return kept, dropped


def _best_fit_decreasing(lengths: Sequence[int], capacity: int, carry: int) -> list[list[Piece]]:
    sizes = np.asarray(lengths, dtype=np.int64)
    if sizes.size and int(sizes.max()) > capacity:
        row = int(sizes.argmax())
        raise DataError(
            f"Row {row} has {int(sizes[row])} tokens and a bin holds {capacity}; cut long rows first, or use the "
            "strategy 'bfd_split' or 'wrapped'."
        )
    return _fit([Piece(row, 0, size) for row, size in enumerate(sizes.tolist())], sizes, capacity)


def _split_and_fit(lengths: Sequence[int], capacity: int, carry: int) -> list[list[Piece]]:
    pieces = [
        Piece(row, start, end)
        for row, length in enumerate(lengths)
        for start, end in (((0, length),) if length <= capacity else pieces_of(length, capacity, carry))
    ]
    return _fit(pieces, np.asarray([p.end - p.start for p in pieces], dtype=np.int64), capacity)


def _fit(pieces: Sequence[Piece], sizes: np.ndarray, capacity: int) -> list[list[Piece]]:
    """Best fit decreasing; where that leaves gaps, bins that are full first, if there are fewer bins then."""
    bins = _fit_decreasing(pieces, sizes, capacity)
    fewest = -(-int(sizes.sum()) // capacity)
    if fewest >= GOOD * len(bins):
        return bins
    full, rest = full_bins(sizes, capacity)
    others = _fit_decreasing([pieces[at] for at in rest], sizes[rest], capacity)
    if len(full) + len(others) >= len(bins):
        return bins
    return [[pieces[at] for at in places] for places in full] + others


def _fit_decreasing(pieces: Sequence[Piece], sizes: np.ndarray, capacity: int) -> list[list[Piece]]:
    """Best fit decreasing. `spaces` lists the distinct free spaces in order and `open_bins` the bins having each: at
    most `capacity` entries, so a search is a bisection however many bins there are."""
    bins: list[list[Piece]] = []
    spaces: list[int] = []
    open_bins: dict[int, list[int]] = {}
    for index in np.argsort(-sizes, kind="stable").tolist():
        piece = pieces[index]
        size = piece.end - piece.start
        if size == 0:
            continue
        at = bisect_left(spaces, size)
        if at == len(spaces):
            space, chosen = capacity, len(bins)
            bins.append([])
        else:
            space = spaces[at]
            chosen = open_bins[space].pop()
            if not open_bins[space]:
                del spaces[at]
                del open_bins[space]
        bins[chosen].append(piece)
        left = space - size
        if left:
            if left not in open_bins:
                insort(spaces, left)
                open_bins[left] = []
            open_bins[left].append(chosen)
    return bins


def _wrap(lengths: Sequence[int], capacity: int, carry: int) -> list[list[Piece]]:
    carry = carry if capacity > carry else 0
    bins: list[list[Piece]] = []
    free = 0
    for row, length in enumerate(lengths):
        start = end = 0
        while end < length:
            # A piece of the carried tokens alone would train nothing.
            if free < min(carry + 1, length - start):
                bins.append([])
                free = capacity
            end = min(length, start + free)
            bins[-1].append(Piece(row, start, end))
            free -= end - start
            start = end - carry
    return bins


STRATEGIES: dict[str, Callable[[Sequence[int], int, int], list[list[Piece]]]] = {
    "bfd": _best_fit_decreasing,
    "bfd_split": _split_and_fit,
    "wrapped": _wrap,
}


def pack_dataset(dataset: Any, seq_length: int, strategy: str = "bfd", map_kwargs: dict[str, Any] | None = None) -> Any:
    """Return a data set whose rows are bins of at most `seq_length` tokens.

    Every list column as long as `input_ids` is concatenated; other columns are dropped. `seq_lengths` holds the length
    of each piece of a bin. Every token is laid once: unlike in training, a row that is cut carries no context. Under
    `bfd`, rows longer than a bin are cut and the tokens lost are logged. A `Dataset` is
    packed as a whole; a stream is packed by windows of `map_kwargs["batch_size"]` rows (1000).

    e.g. input_ids [[1, 2, 3], [4, 5], [6]], seq_length 4 -> [[1, 2, 3, 6], [4, 5]], seq_lengths [[3, 1], [2]]
    Raises `DataError` when there is no column `input_ids` or a list column is not aligned with it.
    """
    from datasets import Dataset, DatasetDict, Features, IterableDataset, IterableDatasetDict, LargeList, List, Value

    if isinstance(dataset, (DatasetDict, IterableDatasetDict)):
        packed = {name: pack_dataset(part, seq_length, strategy, map_kwargs) for name, part in dataset.items()}
        return type(dataset)(packed)
    if isinstance(dataset, IterableDataset):
        options = {"batch_size": 1000, **(map_kwargs or {})}
        options.pop("num_proc", None)
        drop = list(dataset.column_names or next(iter(dataset), {}))
        return dataset.map(
            lambda batch: _pack(batch, seq_length, strategy), batched=True, remove_columns=drop, **options
        )
    lists = [name for name, kind in dataset.features.items() if isinstance(kind, (List, LargeList))]
    columns = {name: dataset.with_format("numpy", columns=[name])[:][name] for name in lists}
    packed = _pack(columns, seq_length, strategy)
    features = {name: dataset.features.get(name, List(Value("int64"))) for name in packed}
    return Dataset.from_dict(packed, features=Features(features))


def _pack(columns: dict[str, Any], seq_length: int, strategy: str) -> dict[str, list[Any]]:
    if "input_ids" not in columns:
        raise DataError(f"Packing needs the column 'input_ids'; the list columns are {sorted(columns)}.")
    kept = {k: v for k, v in columns.items() if k != "seq_lengths" and _is_list_column(v)}
    lengths = [len(ids) for ids in columns["input_ids"]]
    for name, rows in kept.items():
        for row, (length, values) in enumerate(zip(lengths, rows, strict=True)):
            if len(values) != length:
                raise DataError(
                    f"Row {row}: column {name!r} has {len(values)} values and 'input_ids' {length}; packing needs one "
                    "a token. Remove the column or fix its length."
                )
    if strategy == "bfd":
        over = [length - seq_length for length in lengths if length > seq_length]
        if over:
            logger.warning(
                "Packing dropped %d tokens from %d rows longer than %d tokens.", sum(over), len(over), seq_length
            )
        lengths = [min(length, seq_length) for length in lengths]
    bins = plan_bins(lengths, seq_length, strategy, carry=0)
    out: dict[str, list[Any]] = {
        name: [np.concatenate([np.asarray(rows[p.row])[p.start : p.end] for p in pieces]) for pieces in bins]
        for name, rows in kept.items()
    }
    out["seq_lengths"] = [[p.end - p.start for p in pieces] for pieces in bins]
    return out


def _is_list_column(rows: Any) -> bool:
    return len(rows) > 0 and isinstance(rows[0], (list, np.ndarray))
