"""A whole set of rows from one dataset type to another, every row counted."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from posttrain.data.conversions import CONVERSIONS, Dropped, Options, Row, RowConversion, preference_to_implicit
from posttrain.data.formats import (
    TYPES,
    Format,
    FormatChecker,
    TypeName,
    is_conversational,
    maybe_convert_to_chatml,
)
from posttrain.data.preference import extract_prompt
from posttrain.errors import ConfigError, suggest

# Conversions that look at all rows. Each waits for the answer that another row may bring.
PAIRED: frozenset[tuple[TypeName, TypeName]] = frozenset(
    {("unpaired_preference", "preference"), ("unpaired_preference", "implicit_preference")}
)
ROLE_OF = {"prompt": "user", "completion": "assistant", "chosen": "assistant", "rejected": "assistant"}


@dataclass
class ConversionReport:
    """What became of the rows. Filled as they flow."""

    source: Format | None = None
    rows_in: int = 0
    rows_out: int = 0
    rows_paired: int = 0  # of those in, the ones that share a row of the result with another
    dropped: Counter[str] = field(default_factory=Counter)  # reason -> rows

    def summary(self) -> str:
        """e.g. "3 rows in (standard unpaired_preference), 1 row out; 1 row dropped: …" """
        parts = [f"{_count(self.rows_in)} in ({self.source}), {_count(self.rows_out)} out"]
        parts += [f"{_count(number)} dropped: {reason}" for reason, number in self.dropped.most_common()]
        return "; ".join(parts)


def _count(number: int) -> str:
    return f"{number} row{'' if number == 1 else 's'}"


def targets_of(source: TypeName) -> list[TypeName]:
    """The types a type can become, itself among them."""
    return [source, *(to for one, to in (*CONVERSIONS, *sorted(PAIRED)) if one == source)]


def convert(
    rows: Iterable[Mapping[str, Any]],
    to: str,
    conversational: bool = False,
    options: Options | None = None,
    report: ConversionReport | None = None,
    name: str = "train",
) -> Iterator[Row]:
    """Yield the rows as the type `to`. Their own type is found from the first; other columns are kept.

    `from` and `value` become `role` and `content`. With `conversational`, prompts and answers that are text become
    messages of the user and the assistant. A row without a counterpart is dropped, and counted in `report`.

    e.g. convert([{"prompt": "a", "chosen": "b", "rejected": "c"}], "prompt_completion")
      -> {"prompt": "a", "completion": "b"}
    Raises `ConfigError` for a type that there is no way to, and `DataError` for rows that are not whole or mix types.
    """
    options, report = options or Options(), report if report is not None else ConversionReport()
    if to not in TYPES:
        raise ConfigError(f"`to` is {to!r}; expected {', '.join(TYPES)}.{suggest(to, TYPES)}")
    target = cast("TypeName", to)
    checker = FormatChecker()
    pairs: Pairing | None = None
    for index, given in enumerate(rows):
        checker.see(given, partial("Row {} of the {} set".format, index, name))
        assert checker.first is not None and checker.first[0] is not None
        report.source = checker.first[0]
        report.rows_in += 1
        _check_target(report.source.type, target)
        try:
            row = _as_chat(given, report.source) if conversational else _normal(given, report.source)
            if (report.source.type, target) in PAIRED:
                pairs = pairs or Pairing()
                pairs.add(row)
                continue
            made = _conversion(report.source.type, target)(row, options)
        except Dropped as reason:
            report.dropped[str(reason)] += 1
            continue
        report.rows_out += len(made)
        yield from made
    for row in pairs.rows(report) if pairs else ():
        yield from (preference_to_implicit(row, options) if target == "implicit_preference" else [row])


def _check_target(source: TypeName, to: TypeName) -> None:
    known = targets_of(source)
    if to not in known:
        raise ConfigError(f"`to` is {to!r} and the rows are {source}, which can become {', '.join(known)}.")


def _conversion(source: TypeName, to: TypeName) -> RowConversion:
    return CONVERSIONS[source, to] if source != to else lambda row, options: [dict(row)]


def _normal(given: Mapping[str, Any], source: Format) -> Row:
    """The row with `role` and `content`, and with a prompt that its answers do not repeat."""
    row = maybe_convert_to_chatml(given)
    if source.type == "preference" and is_conversational(row) and isinstance(row["prompt"], str):
        return {**row, **extract_prompt(row)}
    return row


def _as_chat(given: Mapping[str, Any], source: Format) -> Row:
    """Text as messages. e.g. {"prompt": "a", "completion": "b"} -> prompt of the user, completion of the assistant"""
    row = _normal(given, source)
    if source.type in ("language_modeling", "implicit_preference", "tokenized") and not source.conversational:
        raise Dropped("the text says not who speaks, so it makes no chat")
    for name, role in ROLE_OF.items():
        if name in TYPES[source.type] and isinstance(row[name], str):
            row[name] = [{"role": role, "content": row[name]}]
    return row


class Pairing:
    """Answers to one prompt, wanted and unwanted ones joined in the order in which they came.

    e.g. (p, a, true), (p, b, false), (p, c, false) -> (p, chosen a, rejected b), and c is left over
    """

    def __init__(self) -> None:
        self.waiting: dict[str, tuple[deque[Row], deque[Row]]] = {}
        self.found: list[tuple[Row, Row]] = []

    def add(self, row: Row) -> None:
        """Take a row, and pair it when one of the other label waits."""
        sides = self.waiting.setdefault(json.dumps(row["prompt"], sort_keys=True, default=str), (deque(), deque()))
        mine, other = (sides[1], sides[0]) if row["label"] else (sides[0], sides[1])
        if not other:
            mine.append(row)
            return
        partner = other.popleft()
        self.found.append((row, partner) if row["label"] else (partner, row))

    def rows(self, report: ConversionReport) -> Iterator[Row]:
        """The pairs. A column whose value differs within any pair is kept twice, as `chosen_…` and `rejected_…`."""
        own = set(TYPES["unpaired_preference"])
        names = dict.fromkeys(name for pair in self.found for row in pair for name in row if name not in own)
        split = {name for name in names if any(a.get(name) != b.get(name) for a, b in self.found)}
        for chosen, rejected in self.found:
            row = {"prompt": chosen["prompt"], "chosen": chosen["completion"], "rejected": rejected["completion"]}
            for name in names:
                if name in split:
                    row |= {f"chosen_{name}": chosen.get(name), f"rejected_{name}": rejected.get(name)}
                else:
                    row[name] = chosen.get(name)
            yield row
        report.rows_out += len(self.found)
        report.rows_paired += 2 * len(self.found)
        for side, label in ((0, "true"), (1, "false")):
            left = sum(len(sides[side]) for sides in self.waiting.values())
            if left:
                report.dropped[f"no answer with label {label} to the same prompt is left to pair it with"] += left
