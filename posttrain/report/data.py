"""An inspection as one page: what is wrong first, then the counts, then the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from markupsafe import Markup

from posttrain.report.chart import bars, charts, histogram
from posttrain.report.finding import Chart, Facts, Finding, percent
from posttrain.report.findings import Inspection
from posttrain.report.page import (
    Section,
    badge,
    details,
    document,
    finding,
    joined,
    paragraph,
    preformatted,
    table,
    tiles,
)
from posttrain.report.survey import Laid, Packing, RowView, Survey
from posttrain.report.tokens import Run, Shown, TokenTexts, shown_text, weight_mark
from posttrain.report.visible import visible

CSS = """
.row { font: 13px/1.75 var(--mono); white-space: pre-wrap; overflow-wrap: anywhere; color: var(--soft);
  background: var(--sunk); border-radius: 8px; padding: 10px 12px; margin: 6px 0; max-height: 420px; overflow-y: auto; }
.row mark { color: var(--ink); background: var(--trained-bg); border-bottom: 2px solid var(--trained-line);
  border-radius: 2px; padding: 1px 0; -webkit-box-decoration-break: clone; box-decoration-break: clone; }
.row mark.no { background: var(--fault-bg); border-bottom-color: var(--fault); }
.row mark.no .w { color: var(--fault); }
.sides { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px), 1fr)); gap: 0 14px; }
.sides > div { min-width: 0; }
.row .k { box-shadow: -1px 0 0 -0.5px color-mix(in srgb, currentColor 28%, transparent); }
.row .k:hover { outline: 1px solid var(--accent); }
.row .s { color: var(--special); font-weight: 600; border-radius: 4px; padding: 0 2px;
  border: 1px solid color-mix(in srgb, var(--special) 45%, transparent); }
.row .w { font-size: 11px; color: var(--trained-line); vertical-align: super; }
.row .gap { font-style: italic; display: block; padding: 6px 0; }
.vh { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
.key { font-size: 13px; color: var(--soft); }
.key .row { display: inline; padding: 1px 6px; margin: 0 2px; border-radius: 4px; }
.finding details { margin: 8px 0 2px; font-size: 14px; }
.finding details > summary { color: var(--soft); }
"""
_FATES = {
    "equal": "dropped: chosen and rejected the same",
    "empty_response": "dropped: a response without a token",
    "steps_cut": "steps beyond the limit",
    "no_step": "dropped: no step left",
}
_KEPT_OPEN = 1  # examples that are unfolded from the start


def page(
    found: Inspection, tokenizer: Any, shown: Sequence[tuple[str, RowView]], examples: Mapping[tuple[str, int], RowView]
) -> str:
    """The page of an inspection. `shown` are rows to look at, each with its set; `examples` those findings name."""
    texts = TokenTexts(tokenizer)
    train = found.sets[0]
    sections = [
        Section("findings", "Findings", _findings(found.findings, texts, examples), _verdict(found)),
        Section("overview", "Overview", joined(map(partial(_overview, found), found.sets, found.facts))),
        Section("rows", "Rows as the model sees them", _rows(texts, shown, train.rows.marks), _ROWS_LEAD),
        Section("lengths", "Lengths and tokens", charts(_charts(found))),
    ]
    if found.packing is not None:
        sections.append(Section("packing", "Packing and sharing", _packing(found.packing), _PACKING_LEAD))
    if found.audit is not None:
        sections.append(Section("template", "Chat template", _audit(found), f"Audit {found.audit.hash}"))
    lead = f"{found.source}, as {found.model} will be trained on it ({found.method})"
    footer = f"Made by posttrain inspect. {_reading(train)}"
    return document("Data inspection", visible(lead), sections, footer, CSS)


_ROWS_LEAD = "Encoded by the code that trains: every token, what is special about it, and whether it is a target."
_PACKING_LEAD = "Planned by the code that trains. Rows in a bin never see each other."


def _verdict(found: Inspection) -> str:
    faults = sum(f.gravity == "fault" for f in found.findings)
    warnings = sum(f.gravity == "warning" for f in found.findings)
    if not faults and not warnings:
        return "Nothing stands in the way of training."
    said = [f"{n} {word}{'' if n == 1 else 's'}" for n, word in ((faults, "fault"), (warnings, "warning")) if n]
    return f"{' and '.join(said)}, the gravest first."


def _findings(found: Sequence[Finding], texts: TokenTexts, examples: Mapping[tuple[str, int], RowView]) -> Markup:
    parts, opened = [], 0
    for each in found:
        views = [examples[key] for row in each.rows if (key := (each.where, row)) in examples]
        is_open = bool(views) and each.gravity == "fault" and opened < _KEPT_OPEN
        opened += is_open
        extra = joined(_example(each.where, view, texts, is_open and at == 0) for at, view in enumerate(views))
        parts.append(
            finding(each.gravity, visible(each.title), _text(each.text), _text(each.fix) if each.fix else "", extra)
        )
    return joined(parts)


def _text(text: str) -> Markup:
    """Prose in which `this` is code."""
    parts = visible(text).split("`")
    return Markup("").join(Markup("<code>{}</code>").format(p) if at % 2 else p for at, p in enumerate(parts))


def _example(name: str, view: RowView, texts: TokenTexts, is_open: bool) -> Markup:
    return Markup("<details{}><summary>{} row {} ({})</summary>{}</details>").format(
        Markup(" open") if is_open else "", name, view.row, visible(view.fate), _sequences(view, texts)
    )


def _overview(found: Inspection, each: Survey, facts: Facts) -> Markup:
    report = each.rows.report
    targets = int(each.targets.sum())
    lost = len(each.rows.numbers) - report.rows_kept
    items = [
        (
            f"{each.rows.name} rows",
            f"{report.rows_kept:,}",
            f"of {len(each.rows.numbers):,} read; {lost:,} dropped" if lost else f"all of {report.rows_kept:,} read",
        ),
        ("tokens", f"{each.tokens:,}", f"{report.tokens_cut:,} more cut away" if report.tokens_cut else "none cut"),
        (f"tokens {each.rows.weighted}", percent(targets / max(1, each.tokens)), f"{targets:,} of them"),
        *facts.lines,
    ]
    packing = found.packing
    if packing is not None and each is found.sets[0]:
        if packing.bins:
            note = f"{packing.bins:,} of {packing.capacity:,} tokens"
            items.append(("bins full", percent(packing.fill), note if packing.is_on else f"{note}; packing is off"))
        if packing.batches:
            items.append(("saved by sharing", percent(packing.saved), "of tokens, by common prefixes"))
    return tiles(items)


def _rows(texts: TokenTexts, shown: Sequence[tuple[str, RowView]], marks: tuple[str, str]) -> Markup:
    negative = Markup('<span class="row"><mark class="no">{}</mark></span> ').format(marks[1]) if marks[1] else ""
    key = Markup(
        '<p class="key">Key: <span class="row"><mark>{}</mark></span> {}<span class="row">context only</span> '
        '<span class="row"><span class="s">special token</span></span> · is a space, ↵ a new line, → a tab.</p>'
    ).format(marks[0], negative)
    parts = [
        details(
            Markup("{} row {} {}").format(name, view.row, badge(visible(view.fate), _tone(view.fate))),
            _sequences(view, texts),
            is_open=at < 2,
        )
        for at, (name, view) in enumerate(shown)
    ]
    return joined([key, *parts]) if parts else paragraph("No row to show.", "soft")


def _tone(fate: str) -> str:
    return "fault" if fate.startswith("dropped") else "warning" if fate.startswith(("cut", "split")) else "good"


def _sequences(view: RowView, texts: TokenTexts) -> Markup:
    parts = joined(_sequence(laid, texts) for laid in view.sequences)
    if view.shared is None:
        return parts
    if not view.sequences:
        return _sequence(view.shared, texts)
    return joined([_sequence(view.shared, texts), Markup('<div class="sides">{}</div>').format(parts)])


def _sequence(laid: Laid, texts: TokenTexts) -> Markup:
    label = Markup("<b>{}</b> ").format(visible(laid.label)) if laid.label else Markup("")
    trained = sum(1 for weight in laid.weights if weight)
    begins = f", from token {laid.start:,} on" if laid.start else ""
    about = paragraph(label + f"{len(laid.ids):,} tokens{begins}, {trained:,} marked", "key")
    runs = Markup("").join(_run(run) for run in texts.runs(laid))
    return Markup(
        '<div>{}<div class="row" tabindex="0" role="region" aria-label="Tokens of the row">{}</div></div>'
    ).format(about, runs)


def _run(run: Run) -> Markup:
    if run.left_out:
        return Markup('<span class="gap">… {} tokens left out …</span>').format(f"{run.left_out:,}")
    inside = Markup("").join(map(_token, run.tokens))
    if not run.weight:
        return inside
    mark = weight_mark(run.weight).strip()
    weight = Markup('<span class="w">{}</span>').format(mark) if mark else ""
    return Markup(
        '<mark title="weight {:g}"{}><span class="vh">[marked: </span>{}{}<span class="vh">]</span></mark>'
    ).format(run.weight, Markup(' class="no"') if run.weight < 0 else "", weight, inside)


def _token(token: Shown) -> Markup:
    kind = "k s" if token.special else "k"
    numbers = " ".join(map(str, token.ids))
    # A line may break after a mark for a space, as it does after the space.
    text = Markup("·<wbr>").join(shown_text(token).split("·"))
    return Markup('<span class="{}" title="id {} at {}">{}</span>').format(kind, numbers, token.at, text)


def _charts(found: Inspection) -> list[Markup]:
    out = []
    for each, facts in zip(found.sets, found.facts, strict=True):
        name = each.rows.name
        if len(each.lengths):
            what = "rows" if each.rows.per_row == 1 else "sequences"
            out.append(_histogram(f"Length of {name} {what}", each.lengths))
            out.append(_histogram(f"Tokens {each.rows.weighted}, {name} {what}", each.targets))
        weights = [
            ("masked" if not value else f"weight {value:g}", float(count), f"{count:,}")
            for value, count in each.weight_values.items()
        ]
        if not each.rows.marks[1]:  # else the sign of a weight is a label
            out.append(bars(f"Loss weights of {name} tokens", weights))
        out.append(bars(f"What became of {name} rows", _fates(each)))
        out += map(_chart, facts.charts)
    return out


def _chart(chart: Chart) -> Markup:
    if chart.bars:
        return bars(chart.title, [(name, float(count), f"{count:,}") for name, count in chart.bars])
    return _histogram(chart.title, np.asarray(chart.values), chart.unit)


def _fates(each: Survey) -> list[tuple[str, float, str]]:
    r = each.rows.report
    fates = {
        "kept whole": r.rows_kept - r.rows_cut - r.rows_split,
        "cut": r.rows_cut,
        "split": r.rows_split,
        "dropped: all masked": r.rows_without_targets - r.rows_filled,
        "dropped: answer cut away": r.rows_filled,
        "dropped: too long": r.rows_too_long,
        **{name: len(each.flagged.get(key, ())) for key, name in _FATES.items()},
        "cannot be encoded": len(each.rows.broken),
    }
    return [(name, float(count), f"{count:,}") for name, count in fates.items() if count or name == "kept whole"]


def _histogram(title: str, values: np.ndarray, unit: str = "tokens") -> Markup:
    low, high = int(values.min()), int(values.max())
    # Edges on whole tokens, so that no bar holds more lengths than its neighbours.
    step = max(1, -(-(high - low + 1) // 40))
    edges = np.arange(low, high + step + 1, step)
    counts, _ = np.histogram(values, bins=edges)
    median = f"median {int(np.median(values)):,}, longest {high:,}"
    return histogram(title, edges.tolist(), counts.tolist(), unit, median)


def _packing(packing: Packing) -> Markup:
    rows = []
    if packing.bins:
        rows += [
            ("Packing", "on" if packing.is_on else "off; with it, this is what it would do"),
            ("Bins", f"{packing.bins:,} of {packing.capacity:,} tokens"),
            ("Full", percent(packing.fill)),
            ("Of the bound", f"{100 * packing.of_bound:.2f} %: the fewest bins that could hold the tokens ÷ bins"),
        ]
    if packing.batches:
        looked = f"{packing.batches:,} micro-batch{'' if packing.batches == 1 else 'es'} looked at"
        rows.append(("Saved by sharing prefixes", f"{percent(packing.saved)} of tokens ({looked})"))
    return table(["", ""], rows) if rows else paragraph("Nothing to pack.", "soft")


def _audit(found: Inspection) -> Markup:
    assert found.audit is not None
    words = {"pass": ("passed", "good"), "warn": ("look", "warning"), "fail": ("failed", "fault")}
    order = {"fail": 0, "warn": 1, "pass": 2}
    rows = [
        (badge(*words[check.verdict]), check.name.replace("_", " "), visible(check.finding), visible(check.evidence))
        for check in sorted(found.audit.checks, key=lambda c: order[c.verdict])
    ]
    return joined(
        [table(["", "check", "found", "evidence"], rows), details("As text", preformatted(visible(found.audit.text())))]
    )


def _reading(each: Survey) -> str:
    total = each.rows.total
    read = len(each.rows.numbers)
    if total is None:
        return f"The first {read:,} rows of a stream were read."
    return (
        f"All {total:,} rows were read." if read == total else f"{read:,} of {total:,} rows were read, evenly spread."
    )
