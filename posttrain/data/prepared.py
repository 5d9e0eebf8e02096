"""Rows of a data set or a stream → prepared ones, and a count of what became of each: for pairs, labelled responses and
labelled steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from posttrain.data.joining import is_stream
from posttrain.data.rows import STREAM_BATCH, in_memory
from posttrain.errors import EmptyDataError

Prepare = Callable[[Mapping[str, Sequence[Any]], Sequence[int]], dict[str, list[Any]]]


class Report(Protocol):
    """Counts of a set, from columns of numbers that `Prepare` makes beside the rows."""

    def kept(self, found: Mapping[str, np.ndarray]) -> np.ndarray:
        """[rows] bool: which are kept."""
        ...

    def add(self, found: Mapping[str, np.ndarray]) -> None:
        """Count these rows."""
        ...


def opened(dataset: Any, name: str) -> tuple[Any, list[str]]:
    """The data set, a list as a table, and its columns: also those that a stream shows in its first row alone. Raises
    `EmptyDataError` for one without rows."""
    if isinstance(dataset, list):
        dataset = in_memory(dataset, name)
    first = next(iter(dataset), None)
    if first is None:
        raise EmptyDataError(f"The {name} set has no rows; check the file, the split and any filter.")
    return dataset, list(dict.fromkeys([*(dataset.column_names or ()), *first]))


def prepare_rows(
    dataset: Any,
    columns: list[str],
    prepare: Prepare,
    report: Report,
    made: Mapping[str, Any],
    counted: Sequence[str],
    num_proc: int | None,
    name: str,
) -> Any:
    """The rows that are kept, in the columns `made` ({name: feature}). A data set is counted at once, a stream while it
    flows."""
    from datasets import Features, Value

    arguments: dict[str, Any] = {"batched": True, "with_indices": True, "remove_columns": columns}
    if is_stream(dataset):
        streamed = _Streamed(prepare, report, counted, columns)
        found = dataset.map(streamed, batch_size=STREAM_BATCH, features=Features(made), **arguments)
        # Selected again: a later row may bring columns the first one did not have.
        return found.select_columns(list(made))
    features = Features({**made, **{count: Value("int32") for count in counted}})
    found = dataset.map(prepare, features=features, num_proc=num_proc, desc=f"Preparing the {name} set", **arguments)
    counts = {count: np.asarray(found.data.column(count)) for count in counted}
    report.add(counts)
    kept = report.kept(counts)
    if not kept.all():
        found = found.select(np.flatnonzero(kept))
    return found.remove_columns(list(counted))


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
