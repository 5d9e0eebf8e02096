"""One split of a data set, or part of one: `train`, `train[:1000]`, `train[10%:]`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from posttrain.data.joining import is_stream
from posttrain.errors import ConfigError, DataError, EmptyDataError, suggest


def pick_split(splits: Mapping[str, Any], split: str, path: str, count: Callable[[str], int | None]) -> Any:
    """One split, or part of one (`train[:100]`, `train[:10%]`). Raises `DataError` naming the splits there are."""
    name, bracket, part = split.partition("[")
    if name not in splits:
        raise DataError(f"{path!r} has no split {name!r}; it has {sorted(splits)}.{suggest(name, splits)}")
    return _slice(splits[name], part, split, lambda: count(name)) if bracket else splits[name]


def _slice(dataset: Any, part: str, split: str, count: Callable[[], int | None]) -> Any:
    low, colon, high = part.removesuffix("]").partition(":")
    wrong = DataError(f"Split {split!r} cannot be read; write it as 'train[10:20]' or 'train[:10%]'.")
    if not colon or not part.endswith("]"):
        raise wrong
    try:
        relative = any("%" in text or "-" in text for text in (low, high))
        rows = len(dataset) if not is_stream(dataset) else count() if relative else None
        if rows is None and relative:
            raise ConfigError(
                f"Split {split!r} needs the number of rows, which this stream does not tell; write it in rows from "
                "the start ('train[:1000]'), or turn streaming off."
            )
        start, end = _place(low, 0, rows), _place(high, rows, rows)
    except ConfigError:
        raise
    except ValueError as error:
        raise wrong from error
    if start is None or (end is not None and end <= start):
        raise EmptyDataError(f"Split {split!r} holds no row: it goes from {start} to {end} of {rows} rows.")
    if is_stream(dataset):
        rest = dataset.skip(start) if start else dataset
        found = rest if end is None else rest.take(end - start)
        if start and next(iter(found), None) is None:
            raise EmptyDataError(f"Split {split!r} holds no row: the stream ends before row {start}.")
        return found
    return dataset.select(range(start, len(dataset) if end is None else end))


def _place(text: str, default: int | None, rows: int | None) -> int | None:
    if not text.strip():
        return default
    if text.endswith("%"):
        assert rows is not None
        place = round(float(text[:-1]) * rows / 100)
    else:
        place = int(text)
    return place if rows is None else min(rows, max(0, place + rows if place < 0 else place))


def split_length(split: str, count: Callable[[str], int | None]) -> int | None:
    name, bracket, part = split.partition("[")
    rows = count(name)
    if rows is None or not bracket:
        return rows
    low, _, high = part.removesuffix("]").partition(":")
    return (_place(high, rows, rows) or 0) - (_place(low, 0, rows) or 0)
