"""Which items, in what order, on which rank; and the loader's dataset and collator.

A *window* is what one optimizer step uses over all ranks. Every rank computes the same order and takes its own part, so
nothing is repeated to even batches out: the last window's short micro-batches may be empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc
import xxhash
from torch.utils.data import BatchSampler, Dataset

from posttrain.data.forest import build_forest
from posttrain.data.packing import Piece
from posttrain.errors import DataError
from posttrain.types import Row, TokenBatch

Item = list[tuple[Row, int]]
"""What one index of the loader stands for: a row, or the pieces of a bin; each with its row in the data set."""
_HASHED_ROWS = 10_000  # at once: rows behind an indices table are copied to be read


class WindowSampler(BatchSampler):
    """Indices of this rank's micro-batches.

    A window holds `batch_size × accumulation × world_size` items. With `costs` (tokens an item), the window's items
    are dealt out so that micro-batches and ranks cost alike; which optimizer step an item belongs to does not change.

    e.g. 5 items, batch_size 2, 1 rank -> [0, 1], [2, 3], [4]
    """

    def __init__(
        self,
        num_items: int,
        batch_size: int,
        accumulation: int = 1,
        world_size: int = 1,
        rank: int = 0,
        seed: int | None = None,
        costs: Sequence[int] | None = None,
        drop_last: bool = False,
    ) -> None:
        self.num_items, self.batch_size, self.accumulation = num_items, batch_size, accumulation
        self.world_size, self.rank, self.seed, self.costs = world_size, rank, seed, costs
        self.drop_last = drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The order of an epoch depends on the seed and the epoch alone, so resuming finds it again."""
        self.epoch = epoch

    def __len__(self) -> int:
        each = self.batch_size * self.world_size
        return self.num_items // each if self.drop_last else -(-self.num_items // each)

    def __iter__(self) -> Iterator[list[int]]:
        order = np.arange(self.num_items)
        if self.seed is not None:
            order = np.random.default_rng((self.seed, self.epoch)).permutation(self.num_items)
        order = order[: len(self) * self.batch_size * self.world_size]
        size = self.batch_size * self.accumulation * self.world_size
        for start in range(0, len(order), size):
            yield from self._mine(order[start : start + size].tolist())

    def _mine(self, window: list[int]) -> Iterator[list[int]]:
        count = -(-len(window) // (self.batch_size * self.world_size))  # micro-batches of each rank
        slots = count * self.world_size
        if self.costs is None or slots == 1:
            dealt = [window[i * self.batch_size : (i + 1) * self.batch_size] for i in range(slots)]
        else:
            dealt = _deal(window, slots, self.costs)
        return (dealt[i * self.world_size + self.rank] for i in range(count))


def _deal(window: list[int], slots: int, costs: Sequence[int]) -> list[list[int]]:
    """Longest first, to and fro over the slots: equal counts, and nearly equal costs."""
    dealt: list[list[int]] = [[] for _ in range(slots)]
    for at, item in enumerate(sorted(window, key=lambda i: (-costs[i], i))):
        turn, position = divmod(at, slots)
        dealt[position if turn % 2 == 0 else slots - 1 - position].append(item)
    return [sorted(slot, key=window.index) for slot in dealt]


class RowItems(Dataset):
    """Prepared rows (`input_ids`, `weights`, `source`), one an item; or, with bins, the pieces of one bin an item."""

    def __init__(self, rows: Any, bins: list[list[Piece]] | None = None) -> None:
        self.rows, self.bins = rows, bins
        self.lengths: list[int] = row_lengths(rows)
        self.costs = self.lengths if bins is None else [sum(p.end - p.start for p in b) for b in bins]

    def __len__(self) -> int:
        return len(self.rows) if self.bins is None else len(self.bins)

    @property
    def row_lengths(self) -> list[int]:
        """Tokens of every sequence the loader will yield: rows, or pieces of rows."""
        return self.lengths if self.bins is None else [p.end - p.start for each in self.bins for p in each]

    def __getitem__(self, index: int) -> Item:
        if self.bins is None:
            return [self._row(index, 0, None)]
        return [self._row(piece.row, piece.start, piece.end) for piece in self.bins[index]]

    def fingerprint(self) -> str:
        """A hash (XXH3) of every token, weight and bin: the same rows in the same order have the same one."""
        digest = xxhash.xxh3_128()
        table = self.rows.with_format("arrow")
        for start in range(0, len(self.rows), _HASHED_ROWS):
            part = table[start : start + _HASHED_ROWS]
            for name in ("input_ids", "weights", "source"):
                column = part.column(name)
                if name == "input_ids":
                    lengths = pc.call_function("list_value_length", [column])
                    digest.update(lengths.to_numpy().astype("<i4").tobytes())
                values = column if name == "source" else pc.call_function("list_flatten", [column])
                digest.update(np.ascontiguousarray(values.to_numpy()).tobytes())
            if "values" in part.column_names:
                values = pc.call_function("list_flatten", [part.column("values")])
                digest.update(values.to_numpy().astype("<f8").tobytes() + b"|")
        for pieces in self.bins or ():
            digest.update(np.asarray([(p.row, p.start, p.end) for p in pieces], dtype="<i8").tobytes() + b"|")
        return digest.hexdigest()

    def _row(self, index: int, start: int, end: int | None) -> tuple[Row, int]:
        row = self.rows[index]
        values = tuple(row.get("values") or ())
        return Row(row["input_ids"][start:end], row["weights"][start:end], values), int(row["source"])


def row_lengths(rows: Any) -> list[int]:
    """Tokens of each prepared row."""
    return (
        pc.call_function("list_value_length", [rows.with_format("arrow")[:]["input_ids"]]).to_pylist()
        if len(rows)
        else []
    )


def refuse_unknown_ids(low: int, high: int, vocabulary: int, where: str = "") -> None:
    """Raise `DataError` for token ids that the model has no embedding for."""
    if low < 0 or high >= vocabulary:
        raise DataError(
            f"{where}`input_ids` hold {low if low < 0 else high}, and the model has {vocabulary} embeddings "
            f"(0 … {vocabulary - 1}); give `processing_class` the tokenizer that belongs to the model, or make "
            "room for new tokens first: `model.resize_token_embeddings(len(tokenizer))`, or `clone_chat_template`."
        )


def refuse_long_rows(lengths: Sequence[int], positions: int | None, where: str = "") -> None:
    """Raise `DataError` for rows longer than the positions a model has learned."""
    long = [length for length in lengths if positions is not None and length > positions]
    if long:
        raise DataError(
            f"{where}{len(long)} of {len(lengths)} rows are longer than the {positions} positions the model has "
            f"learned, the longest has {max(long)} tokens; set `max_length` to {positions} or less."
        )


@dataclass(frozen=True)
class Collator:
    """Items of a micro-batch → {"batch": TokenBatch}. `grouped`: an item is one unit of loss, a pair or a group. `own`:
    read-outs lie at their own tokens."""

    share: bool
    grouped: bool = False
    own: bool = False

    def __call__(self, items: list[Item]) -> dict[str, TokenBatch]:
        rows = [row for item in items for row, _ in item]
        sources = [source for item in items for _, source in item]
        units = [unit for unit, item in enumerate(items) for _ in item] if self.grouped else []
        return {"batch": build_forest(rows, share=self.share, sources=sources, units=units, own=self.own)}
