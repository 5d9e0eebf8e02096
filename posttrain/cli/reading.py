"""A set of rows → what a report counts and shows, read with the code that trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar, final

from posttrain.data.formats import format_of
from posttrain.data.overflow import CONTINUED, FILLED, KEPT, MASKED, PreparationReport
from posttrain.data.rows import in_memory, prepare_sft, whole_rows
from posttrain.errors import DataError
from posttrain.report.survey import Laid, Rows, RowView
from posttrain.trainer.options import sft_row_options

SEARCHED = 2000  # rows tried one by one when one of them cannot be encoded


class Reader(ABC):
    """How one method reads the rows of one set. first_tells: the first row tells what the others are."""

    first_tells: ClassVar[bool] = False

    def __init__(self, tokenizer: Any, args: Any, name: str) -> None:
        self.tokenizer, self.args, self.name = tokenizer, args, name

    def rows_of(self, raw: Any, numbers: list[int]) -> tuple[Any, list[int]]:
        """The rows that the method makes of those of the source, and their numbers."""
        return raw, numbers

    @abstractmethod
    def prepare(self, raw: Any) -> tuple[Any, PreparationReport]:
        """Columns `input_ids`, `weights` and `source` of what is kept, and what became of the rows."""

    @abstractmethod
    def try_row(self, raw: Any, at: int) -> None:
        """Raise `DataError` for a row that cannot be encoded."""

    @abstractmethod
    def view(self, raw: Any, at: int, number: int) -> RowView:
        """A row as the model sees it, and what became of it. Raises `DataError` as `try_row`."""

    @abstractmethod
    def details(self) -> dict[str, Any]:
        """Fields of `Rows` that are the method's own."""

    def kind(self, raw: Any) -> str:
        """The dataset type."""
        found = format_of(raw[0]) if len(raw) else None
        return "tokenized" if found is None else found.type.replace("_", "-")


def read_set(reader: Reader, dataset: Any, limit: int) -> Rows:
    """Prepare a set. Rows that cannot be encoded are set aside. limit: most rows that are read, 0 for all."""
    raw, numbers, total = _read(dataset, limit, reader.name)
    count = len(numbers)
    raw, numbers = reader.rows_of(raw, numbers)
    total = total if total is None or not count else total * len(numbers) // count
    kind = reader.kind(raw)
    raw, numbers, broken, prepared, report = _prepared(reader, raw, numbers)

    def view(at: int) -> RowView:
        try:
            return reader.view(raw, at, numbers[at])
        except DataError:
            return RowView(numbers[at], "cannot be encoded", ())

    return Rows(
        name=reader.name,
        kind=kind,
        prepared=prepared,
        report=report,
        raw=raw,
        numbers=numbers,
        total=total,
        view=lambda places: [view(at) for at in places],
        max_length=reader.args.max_length,
        broken=broken,
        **reader.details(),
    )


def _read(dataset: Any, limit: int, name: str) -> tuple[Any, list[int], int | None]:
    """The rows to look at, their numbers in the source, and how many it has."""
    import numpy as np
    from datasets import IterableDataset

    if isinstance(dataset, IterableDataset):
        rows = list(islice(iter(dataset), limit or None))
        return in_memory([dict(row) for row in rows], name), list(range(len(rows))), None
    total = len(dataset)
    if not limit or total <= limit:
        return dataset, list(range(total)), total
    numbers = np.linspace(0, total - 1, limit).round().astype(int).tolist()
    return dataset.select(numbers), numbers, total


def _prepared(reader: Reader, raw: Any, numbers: list[int]) -> Any:
    """(raw rows, their numbers, the broken ones, prepared rows, the report)."""
    try:
        return raw, numbers, [], *reader.prepare(raw)
    except DataError as error:
        if not len(raw) or str(error).startswith(f"The {reader.name} set"):  # no row of it would do
            raise
    raw, numbers = raw.select(range(min(len(raw), SEARCHED))), numbers[:SEARCHED]
    broken: list[tuple[int, str]] = []
    good = []
    for at, number in enumerate(numbers):
        try:
            reader.try_row(raw, at)
            good.append(at)
        except DataError as error:
            broken.append((number, str(error).replace(f"Row {at} of", f"Row {number} of")))
    if not good or (good[0] and reader.first_tells):
        return raw, numbers, broken, _no_rows(), PreparationReport(reader.name, rows_in=len(raw))
    prepared, report = reader.prepare(raw.select(good))
    sources = [good[at] for at in prepared["source"]]
    prepared = prepared.remove_columns("source").add_column("source", sources)
    report.examples = {key: [good[at] for at in places] for key, places in report.examples.items()}
    return raw, numbers, broken, prepared, report


def _no_rows() -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"input_ids": [], "weights": [], "source": []})


@final
class SFTReader(Reader):
    """Rows of supervised fine-tuning."""

    first_tells = True

    def __init__(self, tokenizer: Any, args: Any, name: str) -> None:
        super().__init__(tokenizer, args, name)
        options = sft_row_options(args, args.packing, name)
        self.overflow = options.overflow
        # With `error` the run would stop at the first; here all are counted.
        self.options = replace(options, overflow="drop") if options.overflow == "error" else options

    def prepare(self, raw: Any) -> tuple[Any, PreparationReport]:
        return prepare_sft(raw, self.tokenizer, self.options, self.args.dataset_num_proc, self.name, allow_empty=True)

    def try_row(self, raw: Any, at: int) -> None:
        self._whole(raw, [at])

    def _whole(self, raw: Any, places: Sequence[int]) -> Any:
        return whole_rows(raw, places, self.tokenizer, self.options, self.name)

    def details(self) -> dict[str, Any]:
        return {"overflow": self.overflow, "keep": self.args.truncation_mode}

    def kind(self, raw: Any) -> str:
        try:
            return self._whole(raw, [])[0].replace("_", "-")
        except DataError:
            return "unknown"

    def view(self, raw: Any, at: int, number: int) -> RowView:
        _, [(ids, weights)] = self._whole(raw, [at])
        limit = self.options.max_length
        pieces = self.options.limit.apply(ids, weights)
        whole = (Laid(ids.tolist(), [0.0, *weights[1:].tolist()]),)
        state, cut = pieces[0][2:]
        if len(pieces) > 1:
            laid = [(piece, kept) for piece in pieces if (kept := piece[2]) in (KEPT, CONTINUED)]
            parts = tuple(
                Laid(part[0].tolist(), part[1].tolist(), f"piece {i} of {len(laid)}")
                for i, (part, _) in enumerate(laid, 1)
            )
            return RowView(number, f"split in {len(laid)} pieces", parts)
        if state == KEPT:
            fate = f"cut to {len(pieces[0][0]):,} of {len(ids):,} tokens" if cut else "kept"
            return RowView(number, fate, (Laid(pieces[0][0].tolist(), pieces[0][1].tolist()),))
        why = {FILLED: f"the prompt fills max_length={limit}", MASKED: "nothing is trained"}
        return RowView(number, f"dropped: {why.get(state, f'longer than max_length={limit}')}", whole)
