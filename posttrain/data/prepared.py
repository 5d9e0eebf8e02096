"""Rows of a data set or a stream → prepared ones, and a count of what became of each: for pairs, labelled responses and
labelled steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from posttrain.data.joining import is_stream
from posttrain.data.rows import STREAM_BATCH, in_memory
from posttrain.errors import EmptyDataError

Prepare = Callable[[Mapping[str, Sequence[Any]], Sequence[int]], dict[str, list[Any]]]


class Report(Protocol):
    """Counts of a set, from columns of numbers that `Prepare` makes beside the rows."""

    @staticmethod
    def kept(found: Mapping[str, np.ndarray]) -> np.ndarray:
        """[rows] bool: which are kept."""
        ...

    def add(self, found: Mapping[str, np.ndarray]) -> None:
        """Count these rows."""
        ...


R = TypeVar("R", bound=Report)


def opened(dataset: Any, name: str) -> tuple[Any, list[str]]:
    """The data set, a list as a table, and its columns: also those that a stream shows in its first row alone. Raises
    `EmptyDataError` for one without rows."""
    if isinstance(dataset, list):
        dataset = in_memory(dataset, name)
    first = next(iter(dataset), None)
    if first is None:
        raise EmptyDataError(f"The {name} set has no rows; check the file, the split and any filter.")
    return dataset, list(dict.fromkeys([*(dataset.column_names or ()), *first]))


@dataclass(frozen=True)
class Plan(Generic[R]):
    """How the rows of a set are prepared, and where they are counted."""

    dataset: Any
    columns: list[str]
    prepare: Prepare
    report: R
    made: Mapping[str, Any]  # {column: feature} of a prepared row
    counts: Sequence[str]  # columns of numbers beside it, which `report` counts
    num_proc: int | None
    name: str

    def rows(self) -> Any:
        """The rows that are kept. A data set is counted at once, a stream while it flows."""
        if not is_stream(self.dataset):
            return keep(self.counted_rows(), self.report.kept, self.counts)
        from datasets import Features

        streamed = _Streamed(self.prepare, self.report, self.counts, self.columns)
        found = self.dataset.map(streamed, batch_size=STREAM_BATCH, features=Features(self.made), **self._arguments)
        # Selected again: a later row may bring columns the first one did not have.
        return found.select_columns(list(self.made))

    def counted_rows(self) -> Any:
        """All rows of a data set, with their counts."""
        from datasets import Features, Value

        features = Features({**self.made, **{count: Value("int32") for count in self.counts}})
        shown = f"Preparing the {self.name} set"
        found = self.dataset.map(self.prepare, features=features, num_proc=self.num_proc, desc=shown, **self._arguments)
        self.report.add(_counts(found, self.counts))
        return found

    @property
    def _arguments(self) -> dict[str, Any]:
        return {"batched": True, "with_indices": True, "remove_columns": self.columns}


def keep(found: Any, kept: Callable[[Mapping[str, np.ndarray]], np.ndarray], counts: Sequence[str]) -> Any:
    """The rows of `Plan.counted_rows` that are kept, without their counts."""
    which = kept(_counts(found, counts))
    if not which.all():
        found = found.select(np.flatnonzero(which))
    return found.remove_columns(list(counts))


def _counts(found: Any, counts: Sequence[str]) -> dict[str, np.ndarray]:
    return {count: np.asarray(found.data.column(count)) for count in counts}


class _Streamed:
    """Leaves out the rows that are not kept, and counts each row once, however often the stream begins again. Final."""

    def __init__(self, prepare: Prepare, report: Report, counted: Sequence[str], columns: Sequence[str]) -> None:
        self.prepare, self.report, self.counted, self.known = prepare, report, counted, frozenset(columns)
        self.seen = 0

    def __call__(self, batch: Mapping[str, Sequence[Any]], indices: Sequence[int]) -> dict[str, list[Any]]:
        out = self.prepare(batch, indices)
        found = {count: np.asarray(out.pop(count)) for count in self.counted}
        fresh = np.asarray(indices) >= self.seen
        self.seen = max(self.seen, indices[-1] + 1)
        self.report.add({count: values[fresh] for count, values in found.items()})
        kept = np.flatnonzero(self.report.kept(found)).tolist()
        rows = {column: [plain(values[at]) for at in kept] for column, values in out.items()}
        # A column that only later rows have stays in the stream, and must be as long as the others.
        late = [column for column in batch if column not in rows and column not in self.known]
        return rows | {column: [None] * len(kept) for column in late}


def plain(value: Any) -> Any:
    """Arrays as lists, also inside lists: a stream hands on what it is given, and rows are lists everywhere else."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    return value.tolist() if isinstance(value, np.ndarray) else value
