"""The types of the columns of some rows, found from every row, so that a table holds what was written.

Messages are structs whose missing keys are None, as in every data set of chats. Other mappings become structs when all
of them have the same keys. What has no one type (arguments of tools, a value that is text here and a number there) is
kept as JSON, and comes back as it was.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

MESSAGE_KEYS = frozenset({"role", "from"})
# Deeper structs are kept as JSON: Arrow stops at 64.
DEEPEST = 16
EXACT_IN_A_FLOAT = 2**53


class Column:
    """What has been seen of one value: its kinds, and those of what it holds."""

    __slots__ = ("fields", "item", "kinds", "mappings", "wide")

    def __init__(self) -> None:
        self.wide = False  # a whole number that no float holds
        self.kinds: set[type] = set()
        self.item: Column | None = None
        self.fields: dict[str, tuple[Column, list[int]]] = {}
        self.mappings = 0

    def see(self, value: Any) -> None:
        """Take in one more value."""
        kind = type(value)
        if value is None:
            return
        self.kinds.add(kind)
        if kind is int:
            self.wide = self.wide or not -EXACT_IN_A_FLOAT <= value <= EXACT_IN_A_FLOAT
        elif kind is list:
            if self.item is None:
                self.item = Column()
            for item in value:
                self.item.see(item)
        elif kind is dict:
            self.mappings += 1
            for name, item in value.items():
                column, count = self.fields.setdefault(name, (Column(), [0]))
                column.see(item)
                count[0] += 1

    def feature(self, depth: int = 0) -> Any:
        """The type in the words of `datasets`."""
        from datasets import Json, List, Value

        kinds = self.kinds
        if not kinds:
            return Value("null")
        if kinds <= {int, float} and not (self.wide and float in kinds):
            return Value("float64" if float in kinds else "int64")
        if len(kinds) > 1 or depth > DEEPEST:
            return Json()
        if kinds == {list}:
            inner = self.item.feature(depth + 1) if self.item is not None else Value("null")
            # `datasets` reads the JSON in a list only where the list holds mappings.
            return List(inner) if isinstance(inner, dict) or not _holds_json(inner) else Json()
        if kinds == {dict}:
            same = all(count[0] == self.mappings for _, count in self.fields.values())
            known = self.fields and (same or MESSAGE_KEYS & set(self.fields))
            return {name: column.feature(depth + 1) for name, (column, _) in self.fields.items()} if known else Json()
        return Value("bool" if kinds == {bool} else "string")


def features_of(columns: Mapping[str, Column]) -> Any:
    """e.g. {"text": Column that saw "a"} -> Features({"text": Value("string")})"""
    from datasets import Features

    return Features({name: column.feature() for name, column in columns.items()})


def observe(columns: dict[str, Column], row: Mapping[str, Any]) -> None:
    """Take in a row."""
    for name, value in row.items():
        column = columns.get(name)
        if column is None:
            column = columns[name] = Column()
        column.see(value)


def encoded(rows: Iterable[Mapping[str, Any]], features: Any) -> Iterable[dict[str, Any]]:
    """The rows with every JSON value as its text.

    `datasets` would write them itself, but with ten digits of a number, and text that reads as JSON ("12") as what it
    reads as.
    """
    holding = {name: feature for name, feature in features.items() if _holds_json(feature)}
    for row in rows:
        yield {**row, **{name: encode(row.get(name), feature) for name, feature in holding.items()}}


def _holds_json(feature: Any) -> bool:
    from datasets import Json, List

    if isinstance(feature, List):
        return _holds_json(feature.feature)
    if isinstance(feature, dict):
        return any(map(_holds_json, feature.values()))
    return isinstance(feature, Json)


def encode(value: Any, feature: Any) -> Any:
    """A value with every JSON part of it as its text."""
    from datasets import Json, List

    if value is None:
        return None
    if isinstance(feature, Json):
        return _json_text(value)
    if isinstance(feature, List):
        return [encode(item, feature.feature) for item in value]
    if isinstance(feature, dict):
        return {name: encode(value.get(name), inner) for name, inner in feature.items()}
    return value


def _json_text(value: Any) -> str:
    """JSON that `datasets` reads as this value. Its reader is off by a bit for one number in ten, 0.3 among them, and
    reads it right in another spelling.   e.g. {"t": 0.3} -> {"t": 3.00e-01}"""
    text = json.dumps(value, ensure_ascii=False)
    return text if _reads_as(text, value) else _spelt(value)


def _reads_as(text: str, value: Any) -> bool:
    from datasets import Json

    try:
        return Json().decode_example(text) == value
    except ValueError:
        return False


def _spelt(value: Any) -> str:
    if isinstance(value, dict):
        inner = (f"{json.dumps(name, ensure_ascii=False)}: {_spelt(item)}" for name, item in value.items())
        return f"{{{', '.join(inner)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_spelt, value))}]"
    text = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, float) or not math.isfinite(value):
        return text
    # A number of 17 digits may have no spelling that is read to its last bit.
    return next((spelling for spelling in (text, *_spellings(value)) if _reads_as(spelling, value)), text)


def _spellings(value: float) -> Iterator[str]:
    yield from (f"{value:.{digits}e}" for digits in range(18))
    yield from (f"{value:.{digits}f}" for digits in range(1, 18) if abs(value) < 1e15)
    whole = Decimal(repr(value))
    for shift in range(-20, 21):
        yield f"{whole.scaleb(shift):f}e{-shift}"
        yield f"{Decimal(value).scaleb(shift):.17g}e{-shift}"


def plain_schema(features: Any) -> Any:
    """The Arrow schema with text in the place of JSON: what rows are first written as."""
    import pyarrow as pa

    return pa.schema([(name, _plain(feature)) for name, feature in features.items()])


def _plain(feature: Any) -> Any:
    import pyarrow as pa
    from datasets import Json, List

    if isinstance(feature, List):
        return pa.list_(_plain(feature.feature))
    if isinstance(feature, dict):
        return pa.struct([(name, _plain(inner)) for name, inner in feature.items()])
    return pa.string() if isinstance(feature, Json) else feature()
