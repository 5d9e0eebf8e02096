"""Micro-batches of a stream, with a cursor that is saved and resumed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import xxhash
from torch.utils.data import IterableDataset

from posttrain.data.packing import has_targets, plan_bins
from posttrain.data.sampling import Item, refuse_long_rows, refuse_unknown_ids
from posttrain.types import Row


class RowReader:
    """Items of a stream of prepared rows, one a row, in the order they are used, drawn from a window of `window` of
    them when it is above 0.

    At the end of the stream the next pass begins when `start` is called; each pass is shuffled on its own. At most
    `window` rows are held. A row drawn is replaced by the next one of the stream, so that memory is bounded.
    """

    def __init__(self, rows: Any, parse: Callable[[dict[str, Any]], Item], window: int, seed: int) -> None:
        self.rows, self.parse, self.window, self.seed = rows, parse, window, seed
        self.read = 0  # rows taken from the stream in this pass
        self.start(0)

    def start(self, number: int) -> None:
        """Begin a pass over the stream."""
        self.passed = number
        self.read, self.ended = 0, False
        self.held: list[Item] = []
        self.draw = np.random.default_rng((self.seed, number))
        self.rows.load_state_dict({})  # whatever was loaded for an earlier run
        self.rows.set_epoch(number)
        self._rows = iter(self.rows)

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if not self.window:
            return self._take()
        while len(self.held) < self.window and not self.ended:
            try:
                self.held.append(self._take())
            except StopIteration:
                self.ended = True
        if not self.held:
            raise StopIteration
        at = int(self.draw.integers(len(self.held)))
        self.held[at], self.held[-1] = self.held[-1], self.held[at]
        return self.held.pop()

    def _take(self) -> Item:
        row = next(self._rows)
        self.read += 1
        return self.parse(row)

    def state_dict(self) -> dict[str, Any]:
        """Where reading stands, with the rows held and the state of the generator."""
        return {
            "pass": self.passed,
            "read": self.read,
            "ended": self.ended,
            "stream": None if must_count(self.rows) else self.rows.state_dict(),
            "held": list(self.held),
            "draw": self.draw.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. Where the stream cannot be told to, its rows are read again and passed over."""
        self.start(state["pass"])
        self.read, self.ended, self.held = state["read"], state["ended"], list(state["held"])
        self.draw.bit_generator.state = state["draw"]
        if self.ended:
            self._rows = iter(())
        elif not self.read:
            pass  # the state of a stream is that of whoever read it last, until its first row is taken
        elif state["stream"] is None:
            self._rows = itertools.islice(self._rows, self.read, None)
        else:
            self.rows.load_state_dict(state["stream"])
            self._rows = iter(self.rows)


def must_count(rows: Any) -> bool:
    """Whether a stream does not know where it stands: `datasets` shuffles in a buffer that its state leaves out."""
    waiting, seen = [rows], set()
    while waiting:
        value = waiting.pop()
        if type(value).__name__ == "BufferShuffledExamplesIterable":
            return True
        if id(value) in seen:
            continue
        seen.add(id(value))
        parts = value if isinstance(value, (list, tuple)) else [getattr(value, n, None) for n in _INNER]
        waiting += [part for part in parts if part is not None]
    return False


_INNER = ("_ex_iterable", "ex_iterable", "ex_iterables")


class StreamItems(IterableDataset):
    """Micro-batches of a stream of prepared rows; the stream starts again when it ends.

    Every rank reads the whole stream and keeps its own part, so any number of ranks uses the rows in the same order.
    With a capacity, bins are packed over `buffer` rows at a time. `grouped`: a row of the stream is the sequences of a
    pair, and its columns hold a list for each. `shuffle_window`: see `RowReader`. `report`: what is counted of rows.

    The cursor is a place in the stream and how many items were used since: bins are planned again from there.
    """

    def __init__(
        self,
        rows: Any,
        batch_size: int,
        world_size: int,
        rank: int,
        capacity: int | None = None,
        strategy: str = "bfd",
        buffer: int = 1024,
        on_empty: Callable[[], Exception] | None = None,
        shuffle_window: int = 0,
        seed: int = 0,
        made_of: dict[str, Any] | None = None,
        grouped: bool = False,
        report: Any = None,
    ) -> None:
        self.made_of = made_of or {}  # what `opening_fingerprint` may not show: {name: value}
        self.rows, self.batch_size, self.world_size, self.rank = rows, batch_size, world_size, rank
        self.capacity, self.strategy, self.buffer, self.on_empty = capacity, strategy, buffer, on_empty
        self.shuffle_window, self.seed = shuffle_window, seed
        self.grouped, self.report = grouped, report
        self.vocabulary: int | None = None  # how many token ids the model knows, once it is loaded
        self.positions: int | None = None  # tokens of the longest row it can take
        self._place: Callable[[], dict[str, Any]] | None = None  # a place in the stream
        self._used = 0  # items used since
        self._resumed: tuple[dict[str, Any], int] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The cursor after the last micro-batch, the same on every rank: {"place": …, "used": items since}."""
        if self._place is None:
            raise RuntimeError("the stream was not read yet")
        return {"place": self._place(), "used": self._used}

    def load_state_dict(self, state: dict[str, Any], micro_batches: int) -> None:
        """Go on from a cursor in the next iteration, after as many empty micro-batches, which its caller skips."""
        self._resumed = state, micro_batches

    def opening_fingerprint(self, rows: int = 64) -> str:
        """A hash of the first rows as they are trained: another template, limit or order of sources most likely shows
        in them. Not while the stream is read."""
        found = xxhash.xxh3_128()
        for row in itertools.islice(iter(self.rows), rows):
            values = [row["values"]] if "values" in row else []
            found.update(repr((list(row["input_ids"]), list(row["weights"]), *values)).encode())
        return found.hexdigest()

    def first(self, count: int) -> list[Item]:
        """The first items. Not while the stream is read."""
        return [self._item(row) for row in itertools.islice(iter(self.rows), count)]

    def __iter__(self) -> Iterator[list[Item]]:
        reader = RowReader(self.rows, self._item, self.shuffle_window, self.seed)
        used, resumed, self._resumed = 0, self._resumed, None
        if resumed is not None:
            cursor, micro_batches = resumed
            reader.load_state_dict(cursor["place"])
            used = cursor["used"]
            yield from ([] for _ in range(micro_batches))
        pending: list[Item] = []
        each = self.batch_size * self.world_size
        while True:
            for item in itertools.islice(self._items(reader, used), used, None):
                pending.append(item)
                self._used += 1
                if len(pending) == each:
                    start = self.rank * self.batch_size
                    yield pending[start : start + self.batch_size]
                    pending = []
            used = 0
            if not reader.read:
                raise self.on_empty() if self.on_empty else StopIteration
            reader.start(reader.passed + 1)

    def _mark(self, place: Callable[[], dict[str, Any]], used: int = 0) -> None:
        self._place, self._used = place, used

    def _items(self, reader: RowReader, used: int) -> Iterator[Item]:
        """Items from where the reader stands; of the first `used` it is known that they were used before."""
        if self.capacity is None:
            for item in reader:
                self._mark(reader.state_dict, -1)
                yield item
            return
        while True:
            place = reader.state_dict()
            held = [row for item in itertools.islice(reader, self.buffer) for row in item]
            if not held:
                return
            self._mark(lambda place=place: place, used)
            used = 0
            yield from self._bins(held)

    def _item(self, row: dict[str, Any]) -> Item:
        parts = ("input_ids", "weights", *(["values"] if "values" in row else []))
        columns = [row[part] if self.grouped else [row[part]] for part in parts]
        rows = [
            Row(list(ids), list(weights), *map(tuple, values)) for ids, weights, *values in zip(*columns, strict=True)
        ]
        where = f"row {row['source']}: "
        if self.vocabulary is not None:
            ids = [i for each in rows for i in each.input_ids]
            refuse_unknown_ids(min(ids), max(ids), self.vocabulary, where)
        if self.capacity is None or self.capacity > (self.positions or self.capacity):
            refuse_long_rows([len(each.input_ids) for each in rows], self.positions, where)
        return [(each, int(row["source"])) for each in rows]

    def _bins(self, held: Item) -> Iterator[Item]:
        assert self.capacity is not None
        for pieces in plan_bins([len(row.input_ids) for row, _ in held], self.capacity, self.strategy):
            item = []
            for piece in (p for p in pieces if has_targets(held[p.row][0].weights, p)):
                row, source = held[piece.row]
                part = slice(piece.start, piece.end)
                item.append((Row(row.input_ids[part], row.weights[part]), source))
            if item:
                yield item
