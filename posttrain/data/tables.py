"""Text files as a table on disk: written once, exactly as read, and found again while the files are the same."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.data.columns import Column, encoded, features_of, observe, plain_schema
from posttrain.data.formats import TYPES, Format, FormatChecker, format_of
from posttrain.data.readers import Row, place, read_rows
from posttrain.errors import DataError, EmptyDataError

# Changes when the same file would give another table.
VERSION = "1"
# Few enough to hold when they are huge.
ROWS_AT_ONCE = 256

First = tuple[Format | None, str]


def checked_rows(files: Sequence[Path | str], check: bool, first: First | None = None) -> Iterator[Row]:
    """The rows of text files, one file after another, held to one format.

    With `first` (a format, and the row that had it), to that one. Raises `DataError` naming file and line.
    """
    checker = FormatChecker(strict=False)
    checker.first = first
    for file in files:
        for line, row in read_rows(file):
            if check:
                checker.see(row, partial(place, file, line))
            yield row


def read_table(files: Sequence[Path], check: bool = True) -> Any:
    """The rows of text files as a `Dataset`, kept in the cache folder of `datasets`.

    A column has one type over all rows; what has none is kept as JSON. Raises `DataError` naming file and line, and
    `EmptyDataError` when there is no row.
    """
    from datasets import Dataset
    from filelock import FileLock

    target = _cache_file(files, check)
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not target.exists():
            _write(files, check, target)
    return Dataset.from_file(str(target))


def first_row(files: Sequence[Path]) -> tuple[Row, str]:
    """The first row and where it is. Raises `EmptyDataError` when there is none."""
    for file in files:
        for line, row in read_rows(file):
            return row, place(file, line)
    raise EmptyDataError(f"{_named(files)} no row; write rows to it or remove it.")


def _named(files: Sequence[Path]) -> str:
    return f"File {str(files[0])!r} holds" if len(files) == 1 else f"Files {[str(file) for file in files]} hold"


def _cache_file(files: Sequence[Path], check: bool) -> Path:
    from datasets import config

    stamps = [(str(f.resolve()), s.st_size, s.st_mtime_ns) for f in files for s in [f.stat()]]
    key = hashlib.sha256(json.dumps([VERSION, check, stamps]).encode()).hexdigest()[:32]
    return Path(config.HF_DATASETS_CACHE) / "posttrain" / f"{key}.arrow"


def _write(files: Sequence[Path], check: bool, target: Path) -> None:
    import pyarrow as pa

    columns: dict[str, Column] = {}
    for row in checked_rows(files, check):
        observe(columns, row)
    if not columns:
        first_row(files)
        raise DataError(f"{_named(files)} rows without a column; write objects with values in them.")
    handle, partial = tempfile.mkstemp(prefix=target.stem, suffix=".partial", dir=target.parent)
    os.close(handle)
    try:
        _write_arrow(files, features_of(columns), partial)
        os.replace(partial, target)
    except pa.ArrowException as error:
        raise DataError(f"{_named(files)} rows that make no table ({error}); write simpler values.") from error
    except OSError as error:
        raise DataError(
            f"The table of {[str(file) for file in files]} cannot be written to {str(target.parent)!r} ({error}); make "
            "room there, or set HF_DATASETS_CACHE to another folder."
        ) from error
    finally:
        Path(partial).unlink(missing_ok=True)


def _write_arrow(files: Sequence[Path], features: Any, path: str) -> None:
    import pyarrow as pa
    from datasets.table import table_cast

    plain, schema = plain_schema(features), features.arrow_schema
    rows = iter(encoded((row for file in files for _, row in read_rows(file)), features))
    with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        while some := list(islice(rows, ROWS_AT_ONCE)):
            writer.write_table(table_cast(pa.Table.from_pylist(some, schema=plain), schema))


def write_parquet(rows: Sequence[Mapping[str, Any]], file: Any) -> None:
    """Write rows as parquet. `datasets` reads it back as they were; other readers see JSON columns as text."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets.table import table_cast

    columns: dict[str, Column] = {}
    for row in rows:
        observe(columns, row)
    features = features_of(columns)
    table = pa.Table.from_pylist(list(encoded(rows, features)), schema=plain_schema(features))
    pq.write_table(table_cast(table, features.arrow_schema), file)


# Tables that `datasets` read


def check_tables(parts: Mapping[str, Any], path: str, check: bool) -> None:
    """Raise `EmptyDataError` for a split without rows, and with `check` `DataError` for rows of different formats."""
    for name, part in parts.items():
        if not len(part):
            raise EmptyDataError(f"{path!r} holds no row in its split {name!r}; write rows to it or remove it.")
        if check:
            _check_one_format(part, path)


def _check_one_format(rows: Any, path: str) -> None:
    """Look at which columns hold something, and read one row of each kind."""
    own = {"text", "conversations", *(column for columns in TYPES.values() for column in columns)}
    known = [name for name in rows.column_names if name in own]
    if not known:
        return
    table = rows.with_format("arrow")[:]
    held = np.stack([np.asarray(table[name].is_valid()) for name in known])
    _, places = np.unique(held, axis=1, return_index=True)
    formats = {int(index): format_of(rows[int(index)]) for index in sorted(places)}
    first, *others = formats
    for other in others:
        if formats[other] != formats[first]:
            seen, before = (formats[index] or "of no known type" for index in (other, first))
            raise DataError(
                f"{path!r}: row {other} is {seen} and row {first} is {before}; the rows of one source are of one type: "
                "keep them apart, or write them alike."
            )
