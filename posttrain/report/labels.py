"""Labels that say yes or no: whether there are enough of both."""

from __future__ import annotations

from collections.abc import Iterable

from posttrain.report.finding import Finding, percent
from posttrain.report.survey import Survey

RARE = 0.1  # share of one label below which it is rare


def balance(each: Survey, yes: int, no: int, names: tuple[str, str], fix: str) -> Iterable[Finding]:
    """Findings on how many have each label. names: what is counted, with either label."""
    total, fewest = yes + no, min(yes, no)
    name = each.rows.name
    if total and not fewest:
        there, missing = names if yes else names[::-1]
        yield Finding(
            "fault",
            "one_label",
            "Only one label",
            f"All {total:,} labels of the {name} set are of {there}, and none of {missing}: nothing tells the model "
            "one from the other.",
            f"Add {missing}, or look whether the column was read as it is meant.",
            where=name,
        )
    elif fewest < RARE * total:
        yield Finding(
            "warning",
            "rare_label",
            "One label is rare",
            f"{fewest:,} of {total:,} labels of the {name} set ({percent(fewest / total)}) are of "
            f"{names[yes > no]}: a model that never says so is nearly always right.",
            fix,
            where=name,
        )
