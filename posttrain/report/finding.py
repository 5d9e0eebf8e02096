"""One thing to know about the rows, and what a method adds to what is known of all rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from posttrain.report.page import Gravity

if TYPE_CHECKING:
    from posttrain.report.survey import Survey

ORDER: tuple[Gravity, ...] = ("fault", "warning", "good", "note")
FEW = 0.05  # below this share of rows, a fault of rows is a warning
SHOWN = 3


@dataclass(frozen=True)
class Finding:
    """Something to know. `rows` are numbers in the source of the set `where`, the first to be shown."""

    gravity: Gravity
    key: str
    title: str
    text: str
    fix: str = ""
    count: int = 0
    rows: tuple[int, ...] = ()
    where: str = "train"


@dataclass(frozen=True)
class Chart:
    """Numbers to draw: whole values, whose histogram is drawn, or named counts, each a bar."""

    title: str
    values: Sequence[int] = ()
    unit: str = "tokens"
    bars: Sequence[tuple[str, int]] = ()


@dataclass(frozen=True)
class Facts:
    """What a method wants known of its rows. lines: name, value, and a note on it."""

    lines: tuple[tuple[str, str, str], ...] = ()
    charts: tuple[Chart, ...] = ()
    findings: tuple[Finding, ...] = ()


def grave(count: int, total: int) -> Gravity:
    return "fault" if count >= FEW * max(1, total) else "warning"


def of(count: int, each: Survey) -> str:
    """e.g. "12 of 100 train rows (12 %)" """
    total = max(1, len(each.rows.numbers))
    return f"{count:,} of {total:,} {each.rows.name} rows ({percent(count / total)})"


def percent(share: float) -> str:
    """e.g. 0.1234 -> "12 %", 0.0123 -> "1.2 %" """
    value = 100 * share
    if 0 < value < 0.1:
        return "under 0.1 %"
    return f"{value:.1f} %" if value < 10 and value != round(value) else f"{value:.0f} %"
