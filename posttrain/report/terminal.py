"""An inspection as text: coloured in a terminal, plain in a pipe."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from posttrain.report.finding import Facts, Finding, percent
from posttrain.report.findings import Inspection
from posttrain.report.survey import Laid, RowView, Survey
from posttrain.report.tokens import TokenTexts, shown_text, weight_mark
from posttrain.report.visible import visible

_STYLES = {"fault": "bold red", "warning": "bold yellow", "note": "bold blue", "good": "bold green"}
_BLOCKS = " ▁▂▃▄▅▆▇█"
WIDTH = 100  # of a pipe


def console() -> Console:
    """Where inspections are printed."""
    probe = Console(highlight=False, soft_wrap=False)
    return probe if probe.is_terminal else Console(highlight=False, width=WIDTH)


def show(found: Inspection, tokenizer: Any, views: Sequence[tuple[str, RowView]], out: Console) -> None:
    """Print the findings first, then the counts, then the rows."""
    with out.capture() as printed:
        _show(found, tokenizer, views, out)
    # rich fills lines with spaces to their width, which helps nobody who reads a file.
    out.file.write("\n".join(line.rstrip() for line in printed.get().split("\n")))
    out.file.flush()


def _show(found: Inspection, tokenizer: Any, views: Sequence[tuple[str, RowView]], out: Console) -> None:
    out.print(Text(visible(f"{found.source}  ·  {found.model}  ·  {found.method}"), style="bold"))
    out.print()
    for finding in found.findings:
        _finding(finding, out)
    out.print(_counts(found))
    if found.audit is not None:
        passed = sum(check.verdict == "pass" for check in found.audit.checks)
        out.print(Text(f"template audit {found.audit.hash}: {passed} of {len(found.audit.checks)} checks passed"))
    texts = TokenTexts(tokenizer)
    if views:
        marked, negative = found.sets[0].rows.marks
        plain = "" if out.is_terminal else f", {marked} between ⟦ and ⟧" + (f", {negative} with ✗" if negative else "")
        out.print(Text(f"\nRows as the model sees them{plain}", style="bold"))
    for name, view in views:
        out.print(Text(f"\n{name} row {view.row}: {visible(view.fate)}", style="bold"))
        for laid in (*([] if view.shared is None else [view.shared]), *view.sequences):
            out.print(Padding(_sequence(laid, texts, out.is_terminal), (0, 0, 0, 2), expand=False))


def _finding(finding: Finding, out: Console) -> None:
    title = Text(finding.gravity.upper(), style=_STYLES[finding.gravity])
    out.print(title.append(f"  {visible(finding.title)}", style="bold"))
    out.print(Padding(Text(visible(finding.text)), (0, 0, 0, 2), expand=False))
    if finding.rows:
        numbers = ", ".join(map(str, finding.rows)) + (", …" if finding.count > len(finding.rows) else "")
        out.print(Padding(Text(f"{finding.where} rows: {numbers}"), (0, 0, 0, 2), expand=False))
    if finding.fix:
        out.print(Padding(Text.assemble(("Fix: ", "bold"), visible(finding.fix)), (0, 0, 0, 2), expand=False))
    out.print()


def _counts(found: Inspection) -> Table:
    table = Table(box=None, show_header=len(found.sets) > 1, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for each in found.sets:
        table.add_column(each.rows.name)
    columns = [_set_counts(each, facts) for each, facts in zip(found.sets, found.facts, strict=True)]
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(Text(name, style="dim"), *(Text(column.get(name, "")) for column in columns))
    packing = found.packing
    if packing is not None and packing.bins:
        state = "" if packing.is_on else " (packing is off)"
        fill = f"{packing.bins:,} bins of {packing.capacity:,}, {percent(packing.fill)} full{state}"
        table.add_row(Text("packing", style="dim"), Text(fill))
    if packing is not None and packing.batches:
        table.add_row(Text("prefixes shared", style="dim"), Text(f"{percent(packing.saved)} of tokens saved"))
    return table


def _set_counts(each: Survey, facts: Facts) -> dict[str, str]:
    lengths, report = each.lengths, each.rows.report
    targets = int(each.targets.sum())
    quantiles = [int(q) for q in np.quantile(lengths, [0, 0.5, 0.95, 1])] if len(lengths) else [0] * 4
    values = {
        "rows": f"{report.rows_kept:,} of {len(each.rows.numbers):,} kept ({each.rows.kind})",
        "tokens": f"{each.tokens:,}, {targets:,} {each.rows.weighted} ({percent(targets / max(1, each.tokens))})",
        "length": "shortest {:,}, median {:,}, 95 % {:,}, longest {:,}".format(*quantiles),
        "lengths": sparkline(lengths),
    }
    if {*map(abs, each.weight_values)} - {0.0, 1.0}:
        values["weights"] = ", ".join(f"{value:g} × {count:,}" for value, count in each.weight_values.items())
    return values | {name: f"{value} {note}".rstrip() for name, value, note in facts.lines}


def sparkline(lengths: np.ndarray, width: int = 24) -> str:
    """A histogram on one line."""
    if not len(lengths):
        return "–"
    counts, edges = np.histogram(lengths, bins=width)
    top = counts.max()
    marks = "".join(_BLOCKS[-(-int(n) * (len(_BLOCKS) - 1) // int(top))] for n in counts)
    return f"{edges[0]:.0f} {marks} {edges[-1]:.0f}"


def _spaced(text: str) -> str:
    """Spaces between words as spaces, so that lines break there; others stay marked. e.g. "·a·b··c" -> "·a b··c" """
    return re.sub(r"(?<=[^\s·])·(?=[^\s·])", " ", text)


def _sequence(laid: Laid, texts: TokenTexts, coloured: bool) -> Text:
    line = Text.assemble((f"{visible(laid.label)}: " if laid.label else "", "dim"))
    for run in texts.runs(laid, head=120, tail=120):
        if run.left_out:
            line.append(f" … {run.left_out:,} tokens … ", style="italic")
            continue
        text = _spaced("".join(map(shown_text, run.tokens)))
        mark = weight_mark(run.weight)
        if run.weight and not coloured:
            line.append(f"⟦{mark}{text}⟧")
        else:
            style = "red underline" if run.weight < 0 else "green underline" if run.weight else "default"
            line.append(mark + text, style=style)
    return line
