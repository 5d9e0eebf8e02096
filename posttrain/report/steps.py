"""What labelled steps must have known: how many, how they are labelled, where the first mistake lies.

Weights below 0 are of steps that are not correct.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from posttrain.report.finding import Chart, Facts, Finding, percent
from posttrain.report.labels import balance
from posttrain.report.pairs import lost_rows
from posttrain.report.survey import Survey, laid_rows

LOST = (
    (
        "steps_cut",
        "Steps beyond the limit",
        "have steps that end beyond `max_length` or `max_completion_length`, which are dropped.",
        "Raise the limit, or shorten the prompts: the last steps are the ones that are lost.",
    ),
    (
        "no_step",
        "Rows without a step",
        "have no step left to train, and are dropped.",
        "Raise the limit; rows with no steps, and those of `sample_weight` 0, train nothing.",
    ),
)
MANY_ROWS = 20  # with a mistake; fewer say nothing about where it lies
_PLACES = 10  # drawn one by one


def facts(each: Survey) -> Facts:
    """What is to know of a set of labelled steps."""
    lost = tuple(lost_rows(each, LOST))
    if not len(each.targets):
        return Facts(findings=lost)
    labels = [weights[weights != 0] > 0 for _, weights, _ in laid_rows(each.rows.prepared)]
    counts = np.array([len(row) for row in labels])
    first = [int(np.argmin(row)) + 1 for row in labels if not row.all()]
    yes, steps = int(sum(row.sum() for row in labels)), int(counts.sum())
    median = (f"step {int(np.median(first)):,}", "in the median; ") if first else ("none", "")
    lines = (
        ("steps", f"{counts.mean():.1f}", f"a row; median {int(np.median(counts)):,}, most {counts.max():,}"),
        ("correct", percent(yes / steps), f"of steps: {yes:,} of {steps:,}"),
        ("first wrong step", median[0], f"{median[1]}{len(first):,} of {len(labels):,} rows have one"),
    )
    name = each.rows.name
    charts = (
        Chart(f"Steps of {name} rows", counts.tolist(), "steps"),
        Chart(f"Labels of {name} steps", bars=(("correct", yes), ("incorrect", steps - yes))),
        Chart(f"First wrong step of {name} rows", bars=_places(first, len(labels))),
    )
    fix = "Add rows with the other label, and look at `accuracy/correct` and `accuracy/incorrect`, not at `accuracy`."
    told = balance(each, yes, steps - yes, ("correct steps", "incorrect steps"), fix)
    return Facts(lines, charts, (*lost, *told, *_ends_there(each, labels, first)))


def _places(first: Sequence[int], rows: int) -> list[tuple[str, int]]:
    """How many rows have their first mistake at each step. e.g. [2, 2, 14], 5 -> "none" 2, "step 2" 2, "later" 1"""
    counts = np.bincount(np.minimum(first, _PLACES + 1), minlength=2) if len(first) else np.zeros(2, np.int64)
    named = [(f"step {at}" if at <= _PLACES else "later", int(n)) for at, n in enumerate(counts) if n]
    return [("none", rows - len(first)), *named]


def _ends_there(each: Survey, labels: Sequence[np.ndarray], first: Sequence[int]) -> Iterable[Finding]:
    wrong = [row for row in labels if not row.all()]
    if len(wrong) >= MANY_ROWS and all(at == len(row) for at, row in zip(first, wrong, strict=True)):
        yield Finding(
            "note",
            "ends_at_mistake",
            "Rows end at their first wrong step",
            f"In all {len(wrong):,} {each.rows.name} rows with a wrong step it is the first and the last: the model "
            "never sees what follows a mistake.",
            "Judge such a model by its answers up to the first step it calls wrong.",
            where=each.rows.name,
        )
