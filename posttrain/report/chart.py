"""Charts as inline SVG. The drawing stretches with the page and the numbers beside it do not, so that both can be read
on a telephone. Lines differ in dashes as well as in colour, and every chart says in words what it shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from posttrain.report.page import joined

COLOURS = 8
_DASHES = ("", "6 3", "2 3", "8 3 2 3", "12 4", "4 2 1 2", "1 3", "10 2 2 2")
_POINTS = 800  # of a line: more are not seen, and make the page heavy


@dataclass(frozen=True)
class Series:
    """A line: x must not fall; points that are not finite leave a gap. `faint` lines have no entry in the legend."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    faint: bool = False
    colour: int | None = None  # 0 …; unset: its place in the list


def short(value: float) -> str:
    """A number in few characters. e.g. 1234567 -> "1.23M", 0.000012 -> "1.2e-5", 12.5 -> "12.5" """
    size = abs(value)
    for bound, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= bound:
            return f"{value / (1e3 if unit == 'k' else bound):.3g}{unit}"
    if 0 < size < 1e-3:
        digits, power = f"{value:.1e}".split("e")
        return f"{digits.removesuffix('.0')}e{int(power)}"
    return f"{value:.4g}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that cover an interval from within. e.g. ticks(0, 9.3) -> [0.0, 2.0, 4.0, 6.0, 8.0]"""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(m for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(
    title: str, series: Sequence[Series], x_label: str = "", unit: str = "", log: bool = False, zero: bool = False
) -> Markup:
    """Lines over a common axis. `log`: logarithmic in y, values that are not positive left out. `zero`: y begins at 0.

    e.g. line_chart("Loss", [Series("run 1", steps, losses)], "step")
    """
    drawn = [_clean(s, log) for s in series]
    points = [point for line in drawn for part in line for point in part]
    if not points:
        return _figure(title, unit, Markup('<p class="soft">No values.</p>'), "", "")
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    x_low, x_high = _spread(min(xs), max(xs))
    y_low, y_high = _spread(0.0 if zero and not log else min(ys), max(ys), room=0.04)

    def across(x: float) -> float:
        return 100 * (x - x_low) / (x_high - x_low)

    def down(y: float) -> float:
        return 100 - 100 * (y - y_low) / (y_high - y_low)

    lines = []
    for at, (s, parts) in enumerate(zip(series, drawn, strict=True)):
        for part in parts:
            path = " ".join(f"{across(x):.2f},{down(y):.2f}" for x, y in (part if len(part) > 1 else part * 2))
            lines.append(
                Markup(
                    '<polyline class="{}" points="{}" style="stroke:var(--c{})" stroke-dasharray="{}" '
                    'stroke-linecap="round"><title>{}</title></polyline>'
                ).format("faint" if s.faint else "", path, _colour(s, at), _dash(s, at), s.name)
            )
    y_marks = [(down(v), short(10**v if log else v)) for v in _y_ticks(y_low, y_high, log)]
    x_marks = [(across(v), short(v)) for v in ticks(x_low, x_high, 4)]
    named = [(at, s) for at, s in enumerate(series) if not s.faint]
    legend = _legend(named) if len(named) > 1 else Markup("")
    said = f"{title}. " + "; ".join(f"{s.name}: {_said(s)}" for _, s in named)
    # The pointer reads values from the drawing, which is linear between these.
    extent = "" if log else f"{x_low!r} {x_high!r} {y_low!r} {y_high!r}"
    return _figure(title, unit, _plot(joined(lines), x_marks, y_marks, said, extent), x_label, legend)


def histogram(title: str, edges: Sequence[float], counts: Sequence[int], x_label: str = "", unit: str = "") -> Markup:
    """`counts[i]` values in [edges[i], edges[i + 1]), side by side at equal widths."""
    top = max(counts, default=0) or 1
    width = 100 / max(1, len(counts))
    bars = joined(
        Markup('<rect x="{}" y="{}" width="{}" height="{}"><title>{} to {}: {}</title></rect>').format(
            f"{at * width + width * 0.06:.3f}", f"{100 - 100 * count / top:.3f}", f"{width * 0.88:.3f}",
            f"{100 * count / top:.3f}", short(edges[at]), short(edges[at + 1]), f"{count:,}",
        )
        for at, count in enumerate(counts)
    )  # fmt: skip
    every = max(1, math.ceil(len(counts) / 5))
    x_marks = [(at * width, short(edges[at])) for at in range(0, len(edges), every)]
    y_marks = [(100 - 100 * v / top, short(v)) for v in ticks(0, top, 4) if v == int(v)]
    full = [f"{short(edges[i])} to {short(edges[i + 1])}: {n}" for i, n in enumerate(counts) if n]
    return _figure(title, unit, _plot(bars, x_marks, y_marks, f"{title}. " + "; ".join(full)), x_label, Markup(""))


def bars(title: str, items: Iterable[tuple[str, float, str]], unit: str = "") -> Markup:
    """Horizontal bars with their numbers. e.g. [("trained", 0.25, "25 %"), ("masked", 0.75, "75 %")]"""
    rows = list(items)
    top = max((value for _, value, _ in rows), default=0) or 1
    row = Markup('<span>{}</span><i style="width:{}%" aria-hidden="true"></i><b>{}</b>')
    body = joined(row.format(name, f"{100 * value / top:.2f}", shown) for name, value, shown in rows)
    return _figure(title, unit, Markup('<div class="bars">{}</div>').format(body), "", Markup(""))


def charts(parts: Iterable[Markup]) -> Markup:
    """Charts side by side where there is room."""
    return Markup('<div class="charts">{}</div>').format(joined(parts))


# ---- parts -----------------------------------------------------------------------------------------------------------


def _figure(title: str, unit: str, body: Markup, x_label: str, legend: Markup | str) -> Markup:
    caption = Markup("{} <span>{}</span>").format(title, unit)
    axis = Markup('<p class="axis">{}</p>').format(x_label) if x_label else ""
    return Markup('<figure class="chart"><figcaption>{}</figcaption>{}{}{}</figure>').format(
        caption, legend, body, axis
    )


def _plot(
    drawing: Markup,
    x_marks: Sequence[tuple[float, str]],
    y_marks: Sequence[tuple[float, str]],
    said: str,
    extent: str = "",
) -> Markup:
    grid = joined(
        Markup('<line class="grid" x1="0" x2="100" y1="{0}" y2="{0}"/>').format(f"{at:.3f}") for at, _ in y_marks
    )
    reach = Markup(' data-range="{}"').format(extent) if extent else ""
    labels = [Markup('<span class="y" style="top:{}%">{}</span>').format(f"{at:.3f}", name) for at, name in y_marks]
    labels += [Markup('<span class="x" style="left:{}%">{}</span>').format(f"{at:.3f}", name) for at, name in x_marks]
    return Markup(
        '<div class="plot"><svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="{}"{}>{}\n{}'
        '</svg><div aria-hidden="true">{}</div></div>'
    ).format(said, reach, grid, drawing, joined(labels))


def _legend(named: Sequence[tuple[int, Series]]) -> Markup:
    item = Markup(
        '<li><svg viewBox="0 0 26 8" aria-hidden="true"><line x1="0" x2="26" y1="4" y2="4" stroke-width="2" '
        'style="stroke:var(--c{})" stroke-dasharray="{}"/></svg>{}</li>'
    )
    return Markup('<ul class="legend">{}</ul>').format(
        joined(item.format(_colour(s, at), _dash(s, at), s.name) for at, s in named)
    )


def _colour(series: Series, at: int) -> int:
    return (at if series.colour is None else series.colour) % COLOURS + 1


def _dash(series: Series, at: int) -> str:
    return "" if series.faint else _DASHES[(at if series.colour is None else series.colour) % COLOURS]


def _clean(series: Series, log: bool) -> list[list[tuple[float, float]]]:
    """The finite points, cut where one is not, and thinned: of each stretch the lowest and the highest are kept."""
    parts: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(series.x, series.y, strict=True):
        if math.isfinite(x) and math.isfinite(y) and not (log and y <= 0):
            parts[-1].append((x, math.log10(y) if log else y))
        elif parts[-1]:
            parts.append([])
    return [_thin(part) for part in parts if part]


def _thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(points) <= _POINTS:
        return points
    size = math.ceil(2 * len(points) / _POINTS)
    kept = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        ends = {min(group, key=lambda p: p[1]), max(group, key=lambda p: p[1])}
        kept += sorted(ends)
    return [points[0], *kept, points[-1]]


def _spread(low: float, high: float, room: float = 0.0) -> tuple[float, float]:
    if high <= low:
        pad = abs(low) * 0.1 or 1.0
        return low - pad, high + pad
    pad = (high - low) * room
    return (low if low == 0 else low - pad), high + pad


def _y_ticks(low: float, high: float, log: bool) -> list[float]:
    if log and high - low >= 2:
        return [float(v) for v in ticks(low, high, 4) if v == int(v)]
    return ticks(low, high, 4)


def _said(series: Series) -> str:
    finite = [(x, y) for x, y in zip(series.x, series.y, strict=True) if math.isfinite(y)]
    return f"from {short(finite[0][1])} to {short(finite[-1][1])} over {len(finite)} points" if finite else "no values"
