"""Several data sets as one: one after another, or drawn by weight. Tables and streams alike."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.data.columns import encode
from posttrain.errors import DataError

STOPPING_RULES = ("first_exhausted", "all_exhausted", "all_exhausted_without_replacement")
# The one column of a stream on its way through `datasets`, which would fit every row to the columns of the first ones.
PACKED = "packed_row"


def concatenate(parts: Sequence[Any], names: Sequence[str]) -> Any:
    """The rows of every part, in order. `names` are for the error when their columns do not fit together."""
    from datasets import concatenate_datasets

    if len(parts) == 1:
        return parts[0]
    if is_stream(parts[0]):
        return unpack(concatenate_datasets([pack(part) for part in parts]))
    return concatenate_datasets(align(parts, names))


def interleave(parts: Sequence[Any], names: Sequence[str], weights: Sequence[float], seed: int, rule: str) -> Any:
    """Rows drawn from the parts with these probabilities, each part in its order. A table and a stream of the same rows
    give the same order."""
    from datasets import interleave_datasets

    total = sum(weights)
    options: Any = {"probabilities": [weight / total for weight in weights], "seed": seed, "stopping_strategy": rule}
    if len(parts) == 1:
        return parts[0]
    if is_stream(parts[0]):
        return unpack(interleave_datasets([pack(part) for part in parts], **options))
    return interleave_datasets(align(parts, names), **options)


def drawn(lengths: Sequence[int], weights: Sequence[float], seed: int, rule: str) -> list[int]:
    """How many rows `interleave` draws from parts of these lengths.

    e.g. [100, 10] with weights 1, 1 and first_exhausted -> about [10, 10]
    """
    from datasets import Dataset

    parts = [Dataset.from_dict({"part": [at] * length}) for at, length in enumerate(lengths)]
    order = interleave(parts, [""] * len(parts), weights, seed, rule)["part"][:]
    return [order.count(at) for at in range(len(lengths))]


def is_stream(rows: Any) -> bool:
    from datasets import IterableDataset

    return isinstance(rows, IterableDataset)


# Streams


def pack(rows: Any, rename: Mapping[str, str] | None = None, others: bool = True) -> Any:
    """A stream with one column, the whole row as bytes; its columns renamed, and without `others` only those named."""
    return rows.map(_Pack(dict(rename or {}), others)).select_columns([PACKED])


def unpack(rows: Any) -> Any:
    """The rows of a packed stream, as they were."""
    return rows.map(_unpack, remove_columns=[PACKED])


class _Pack:
    def __init__(self, rename: dict[str, str], others: bool) -> None:
        self.rename, self.others = rename, others

    def __call__(self, row: Mapping[str, Any]) -> dict[str, bytes]:
        kept = {self.rename.get(n, n): value for n, value in row.items() if self.others or n in self.rename}
        return {PACKED: pickle.dumps(kept)}


def _unpack(row: Mapping[str, bytes]) -> dict[str, Any]:
    # Packed above, in this process or in one that it started; nothing from outside comes this way.
    return pickle.loads(row[PACKED])


# Tables


def align(parts: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """The parts with the same types of columns. A column that some lack is None there.

    Raises `DataError` naming the column, its types and the sources.
    """
    from datasets import Features, Value

    together: dict[str, Any] = {}
    for part, name in zip(parts, names, strict=True):
        for column, feature in part.features.items():
            try:
                together[column] = _join(together.get(column, Value("null")), feature)
            except TypeError:
                before = next(
                    (other, earlier.features[column])
                    for other, earlier in zip(names, parts, strict=True)
                    if column in earlier.features
                )
                raise DataError(
                    f"Column {column!r} is {_short(feature)} in {name!r} and {_short(before[1])} in {before[0]!r}; "
                    "give it one type, or leave it out with `columns`."
                ) from None
    features = Features(together)
    return [part if part.features == features else _recast(part, features) for part in parts]


def _short(feature: Any) -> str:
    text = str(getattr(feature, "dtype", None) or feature)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _join(one: Any, other: Any) -> Any:
    from datasets import Json, List, Value

    if one == other or other == Value("null"):
        return one
    if one == Value("null"):
        return other
    if isinstance(one, dict) and isinstance(other, dict):
        null = Value("null")
        return {name: _join(one.get(name, null), other.get(name, null)) for name in {**one, **other}}
    if isinstance(one, List) and isinstance(other, List):
        return List(_join(one.feature, other.feature))
    if isinstance(one, Json) or isinstance(other, Json):
        return Json()
    kinds = {getattr(feature, "dtype", "") for feature in (one, other)}
    for wide, narrow in (("large_string", "string"), ("float64", "float32"), ("float64", "int64"), ("int64", "int32")):
        if kinds == {wide, narrow}:
            return Value("string" if wide == "large_string" else wide)
    raise TypeError


def _recast(part: Any, features: Any) -> Any:
    return part.map(_Recast(features), features=features, desc="Aligning columns")


class _Recast:
    def __init__(self, features: Any) -> None:
        self.features = features

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: encode(row.get(name), feature) for name, feature in self.features.items()}
