"""Runs as one page: their curves over each other, what they were made of, and what happened to them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from markupsafe import Markup

from posttrain.report.chart import Series, charts, line_chart, short
from posttrain.report.page import Section, details, document, joined, paragraph, preformatted, table, tiles
from posttrain.report.runlog import Run

# Title, unit, the metric, that of the evaluation, and whether the axis begins at 0.
_CURVES = (
    ("Loss", "per unit", "loss", "eval_loss", False),
    ("Accuracy", "share of target tokens", "mean_token_accuracy", "eval_mean_token_accuracy", False),
    ("Entropy", "nats a token", "entropy", "eval_entropy", False),
    ("Gradient norm", "before clipping", "grad_norm", "", True),
    ("Learning rate", "", "learning_rate", "", True),
    ("Throughput", "tokens a second, all processes", "tokens_per_second", "", True),
    ("Model FLOP/s utilization", "share of the device's peak", "mfu", "", True),
    ("Memory", "MiB, highest of the processes", "peak_memory_mib", "", True),
)
_KNOWN = {name for curve in _CURVES for name in curve[2:4]}
_NO_CURVE = {"step", "epoch", "time", "num_tokens", "tflops", "total_flos", "train_loss"}
_CSS = """
.plot .tip { position: absolute; z-index: 1; pointer-events: none; background: var(--card); color: var(--ink);
  border: 1px solid var(--line); border-radius: 8px; padding: 6px 10px; font-size: 12px; white-space: nowrap;
  box-shadow: 0 2px 8px rgb(0 0 0 / 0.15); }
.plot .tip i { display: inline-block; width: 8px; height: 8px; border-radius: 50%; margin-right: 6px; }
.plot .hair { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--soft); pointer-events: none; }
.sample pre { margin: 4px 0 10px; }
"""
# Reads the points that are drawn; a page without it lacks only the values under the pointer.
_SCRIPT = """
const short = v => Math.abs(v) >= 1e4 || (v && Math.abs(v) < 1e-3) ? v.toExponential(2) : String(+v.toPrecision(4));
for (const plot of document.querySelectorAll('.plot')) {
  const svg = plot.querySelector('svg[data-range]');
  if (!svg) continue;
  const [x0, x1, y0, y1] = svg.dataset.range.split(' ').map(Number);
  const lines = [...svg.querySelectorAll('polyline')].map(p => ({ name: p.textContent, colour: p.style.stroke,
    points: p.getAttribute('points').split(' ').map(t => t.split(',').map(Number)) }));
  const tip = document.createElement('div'), hair = document.createElement('div');
  tip.className = 'tip'; hair.className = 'hair'; tip.hidden = hair.hidden = true;
  plot.append(hair, tip);
  plot.addEventListener('pointermove', event => {
    const box = plot.getBoundingClientRect();
    const at = 100 * (event.clientX - box.left) / box.width;
    const closer = (a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a;
    const near = lines.map(l => ({ ...l, p: l.points.reduce(closer) }))
      .filter(l => Math.abs(l.p[0] - at) < 12);
    if (!near.length) return;
    const x = near.reduce((a, b) => Math.abs(b.p[0] - at) < Math.abs(a.p[0] - at) ? b : a).p[0];
    tip.replaceChildren('step ' + short(x0 + (x1 - x0) * x / 100), ...near.map(l => {
      const row = document.createElement('div'), dot = document.createElement('i');
      dot.style.background = l.colour;
      const other = Math.abs(l.p[0] - x) < 0.05 ? '' : '  (step ' + short(x0 + (x1 - x0) * l.p[0] / 100) + ')';
      row.append(dot, l.name + '  ' + short(y1 - (y1 - y0) * l.p[1] / 100) + other);
      return row;
    }));
    tip.hidden = hair.hidden = false;
    hair.style.left = x + '%';
    const left = x > 55;
    tip.style.left = left ? '' : 'calc(' + x + '% + 10px)';
    tip.style.right = left ? 'calc(' + (100 - x) + '% + 10px)' : '';
    tip.style.top = '4px';
  });
  plot.addEventListener('pointerleave', () => { tip.hidden = hair.hidden = true; });
}
"""


def page(runs: Sequence[Run]) -> str:
    """The page of one run, or of several over each other."""
    _distinct(runs)
    sections = [
        Section("overview", "Overview", joined(map(_overview, runs))),
        Section("curves", "Curves", charts(_curves(runs)), "Over optimizer steps. Dashed and coloured alike everywhere."
                if len(runs) > 1 else "Over optimizer steps."),
    ]  # fmt: skip
    if len(runs) > 1:
        sections.append(Section("differences", "What differs", _differences(runs)))
    if any(run.samples for run in runs):
        lead = "What the model wrote at the first and at the last step that was sampled."
        sections.append(Section("samples", "Samples", joined(map(_samples, runs)), lead))
    sections += [
        Section("events", "Events", joined(map(_events, runs))),
        Section("data", "Data", joined(map(_data, runs))),
        Section("config", "Configuration", joined(map(_configuration, runs))),
        Section("machine", "Where it ran", joined(map(_machine, runs))),
    ]
    title = f"Run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs"
    lead = f"{runs[0].state}, in {runs[0].folder}" if len(runs) == 1 else ", ".join(r.name for r in runs)
    return document(title, lead, sections, "Written by posttrain report.", _CSS, _SCRIPT)


def _distinct(runs: Sequence[Run]) -> None:
    """Names to tell the runs by: of folders of the same name, the whole path."""
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = str(run.folder)


def _heading(run: Run, runs_title: str = "") -> Markup:
    return Markup("<h3>{}</h3>").format(run.name + runs_title)


def _overview(run: Run) -> Markup:
    data = run.environment.get("data", {}).get("train", {})
    items = [("state", run.state, f"{_steps(run)} steps")]
    for name, key, unit in (
        ("loss", "loss", "last line"),
        ("evaluation loss", "eval_loss", "last"),
        ("tokens a second", "tokens_per_second", "last line"),
        ("memory", "peak_memory_mib", "MiB"),
    ):
        value = run.last(key)
        if value is not None:
            items.append((name, short(value), unit))
    tokens = run.last("num_tokens")
    if tokens is not None:
        rows = f"{data['rows_kept']:,} rows a pass" if "rows_kept" in data else ""
        items.append(("tokens seen", short(tokens), rows))
    note = paragraph(f"{run.unread} lines of log.jsonl could not be read.", "soft") if run.unread else Markup("")
    return joined([_heading(run), tiles(items), note])


def _steps(run: Run) -> str:
    done = max((int(line.get("step", 0)) for line in [*run.lines, *run.events]), default=0)
    planned = next((e["max_steps"] for e in reversed(run.events) if "max_steps" in e), None)
    return f"{done:,} of {planned:,}" if planned else f"{done:,}"


def _curves(runs: Sequence[Run]) -> list[Markup]:
    found = []
    for title, unit, key, evaluated, zero in _CURVES:
        chart = _chart(runs, title, unit, [key, *([evaluated] if evaluated else [])], zero)
        found += [chart] if chart else []
    others = {k for run in runs for line in run.lines for k, v in line.items() if isinstance(v, (int, float))}
    timings = ("_runtime", "_per_second", "_compilation_time")
    rest = sorted(k for k in others - _KNOWN - _NO_CURVE if not k.endswith(timings) and not k.startswith("train_"))
    pairs = [k for k in rest if not (k.startswith("eval_") and k.removeprefix("eval_") in rest)]
    for key in pairs:
        chart = _chart(runs, key.replace("_", " ").capitalize(), "", [key, f"eval_{key}"], False)
        found += [chart] if chart else []
    return found


def _chart(runs: Sequence[Run], title: str, unit: str, keys: Sequence[str], zero: bool) -> Markup | None:
    """The training line and that of evaluation, of every run: a colour and a dash each."""
    if not any(any(run.series(key)[1]) for run in runs for key in keys):
        return None  # all zero: nothing was shared, or padded
    lines: list[Series] = []
    several = len(runs) > 1
    for at, run in enumerate(runs):
        for of, key in enumerate(keys):
            x, y = run.series(key)
            if not x:
                continue
            kind = "evaluation" if of else "training"
            name = (f"{run.name}, {kind}" if len(keys) > 1 else run.name) if several else kind
            lines.append(Series(name, x, y, colour=2 * at + of if several else of))
    return line_chart(title, lines, "step", unit, zero=zero) if lines else None


def _differences(runs: Sequence[Run]) -> Markup:
    """The fields whose values are not the same in all; `output_dir` never is."""
    names = sorted({name for run in runs for name in run.config} - {"output_dir"})
    rows = []
    for name in names:
        values = [run.config[name][0] if name in run.config else "default" for run in runs]
        if len(set(values)) > 1:
            rows.append([name, *values])
    if not rows:
        return paragraph("Their configurations are the same.")
    return table(["field", *(run.name for run in runs)], rows)


def _samples(run: Run) -> Markup:
    """The same prompts, before and after."""
    steps = sorted({row.get("step", 0) for row in run.samples})
    if not steps:
        return Markup("")
    parts = [_heading(run)]
    by_step = {step: [row for row in run.samples if row.get("step", 0) == step] for step in (steps[0], steps[-1])}
    for at, row in enumerate(by_step[steps[-1]][:8]):
        before = by_step[steps[0]][at : at + 1]
        shown = [("prompt", row.get("prompt", ""))]
        if len(steps) > 1 and before and before[0].get("prompt") == row.get("prompt"):
            shown.append((f"step {steps[0]}", before[0].get("completion", "")))
        shown.append((f"step {steps[-1]}", row.get("completion", "")))
        body = joined(joined([paragraph(name, "soft"), preformatted(str(text))]) for name, text in shown)
        parts.append(details(str(row.get("prompt", ""))[:100] or "(empty prompt)", body, is_open=at == 0))
    return joined(parts)


def _events(run: Run) -> Markup:
    rows = []
    for event in run.events:
        rest = {k: v for k, v in event.items() if k not in ("event", "step", "time")}
        said = ", ".join(f"{name} {value}" for name, value in rest.items())
        rows.append([_when(event.get("time")), f"{event.get('step', '')}", str(event["event"]).replace("_", " "), said])
    body = table(["time (UTC)", "step", "event", ""], rows, [1]) if rows else paragraph("None were recorded.")
    return joined([_heading(run), body])


def _when(seconds: Any) -> str:
    if not isinstance(seconds, (int, float)):
        return ""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def _data(run: Run) -> Markup:
    data = run.environment.get("data", {})
    sets = {name: found for name, found in data.items() if isinstance(found, dict)}
    if not sets:
        return joined([_heading(run), paragraph("Nothing was recorded.")])
    keys = list(dict.fromkeys(key for found in sets.values() for key in found))
    rows = [[key.replace("_", " "), *(_cell(found.get(key)) for found in sets.values())] for key in keys]
    body = table(["", *sets], rows, range(1, len(sets) + 1))
    mark = data.get("fingerprint")
    return joined([_heading(run), body, paragraph(f"Fingerprint of the training rows: {mark}", "soft") if mark else ""])


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return (
        f"{100 * value:.1f} %" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    )


def _configuration(run: Run) -> Markup:
    if not run.config:
        return joined([_heading(run), paragraph("There is no resolved_config.yaml.")])
    return joined([_heading(run), table(["field", "value", "from"], [[n, *v] for n, v in run.config.items()])])


def _machine(run: Run) -> Markup:
    facts = {k: v for k, v in run.environment.items() if k != "data"}
    rows = []
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items())
        elif isinstance(value, list):
            value = " ".join(map(str, value))
        rows.append([name, str(value)])
    return joined([_heading(run), table(["", ""], rows) if rows else paragraph("There is no environment.json.")])
