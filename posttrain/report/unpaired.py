"""What labelled responses must have known: the labels, and where they contradict each other.

Weights below 0 are of responses that are not desirable.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from posttrain.report.duplicates import row_hash
from posttrain.report.finding import Chart, Facts, Finding, grave, of, percent
from posttrain.report.labels import balance
from posttrain.report.pairs import CUT, DROPPED, lost_rows
from posttrain.report.survey import Survey, laid_rows


def facts(each: Survey) -> Facts:
    """What is to know of a set of labelled responses."""
    lost = (*lost_rows(each, DROPPED), *lost_rows(each, CUT))
    if not len(each.targets):
        return Facts(findings=lost)
    labels: dict[int, set[bool]] = {}  # of each prompt
    desirable = np.zeros(len(each.targets), dtype=bool)
    for at, (ids, weights, _) in enumerate(laid_rows(each.rows.prepared)):
        trained = np.flatnonzero(weights)
        desirable[at] = weights[trained[0]] > 0
        labels.setdefault(row_hash(ids[: trained[0]]), set()).add(bool(desirable[at]))
    yes, no = int(desirable.sum()), int((~desirable).sum())
    both = sum(len(found) == 2 for found in labels.values())
    lengths = each.targets[desirable], each.targets[~desirable]
    means = " against ".join(f"{part.mean():,.0f}" if len(part) else "none" for part in lengths)
    lines = (
        ("desirable", percent(yes / (yes + no)), f"of rows: {yes:,}, and {no:,} not; mean {means} tokens"),
        ("prompts with both", percent(both / len(labels)), f"of prompts: {both:,} of {len(labels):,} have both labels"),
    )
    name = each.rows.name
    kinds = zip(("desirable", "other"), lengths, strict=True)
    charts = [Chart(f"Length of {kind} {name} responses", part.tolist()) for kind, part in kinds if len(part)]
    charts.insert(0, Chart(f"Labels of {name} rows", bars=(("desirable", yes), ("not desirable", no))))
    rare = "undesirable_weight" if yes > no else "desirable_weight"
    fix = f"Weigh them up: with `{rare}: {max(yes, no) / max(1, min(yes, no)):.3g}` both count alike."
    told = balance(each, yes, no, ("desirable responses", "responses that are not"), fix)
    return Facts(lines, tuple(charts), (*lost, *told, *_contradicting(each)))


def _contradicting(each: Survey) -> Iterable[Finding]:
    """Rows with the prompt and the response of an earlier one, and the other label."""
    first: dict[tuple[int, bool], int] = {}
    found: list[tuple[int, int]] = []
    for ids, weights, source in laid_rows(each.rows.prepared):
        value, label, number = row_hash(ids), bool(weights.sum() > 0), each.rows.numbers[source]
        first.setdefault((value, label), number)
        if (value, not label) in first:
            found.append((number, first[value, not label]))
    if found:
        a, b = found[0]
        yield Finding(
            grave(len(found), len(each.rows.numbers)),
            "contradicting_labels",
            "Labels contradict each other",
            f"{of(len(found), each)} have the prompt and the response of an earlier row and the other label, for "
            f"example row {a} and row {b}. Together they teach nothing.",
            "Keep the label that more judges gave, or remove both.",
            len(found),
            (a, b),
            each.rows.name,
        )
