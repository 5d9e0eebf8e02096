"""The style sheet of every page: light and dark, wide and narrow, screen and paper."""

CSS = """
:root {
  color-scheme: light dark;
  --paper: #fbfaf8; --card: #ffffff; --ink: #1d1f23; --soft: #5b616b; --line: #e3e1dc; --sunk: #f3f1ed;
  --accent: #0b63a5; --c1: #0b63a5; --c2: #b4530a; --c3: #18794e; --c4: #9b2c77; --c5: #6b5b00; --c6: #5746af;
  --c7: #0e7490; --c8: #a3213a;
  --fault: #b3261e; --fault-bg: #fdeeec; --warn: #8a5300; --warn-bg: #fdf4e3; --note: #0b63a5; --note-bg: #ebf4fb;
  --good: #18794e; --good-bg: #e9f6ef; --trained-bg: #d7efdf; --trained-line: #18794e; --special: #5746af;
  --mono: ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14161a; --card: #1b1e24; --ink: #e7e8ea; --soft: #a2a8b3; --line: #30343d; --sunk: #22262d;
    --accent: #7cb8ee; --c1: #7cb8ee; --c2: #f0a35e; --c3: #6cc799; --c4: #e08bc4; --c5: #d6c25a; --c6: #a99cf0;
    --c7: #5cc5dc; --c8: #f08a9b;
    --fault: #ff9b92; --fault-bg: #3a1f1d; --warn: #f0bd6b; --warn-bg: #352813; --note: #7cb8ee; --note-bg: #16293a;
    --good: #6cc799; --good-bg: #16301f; --trained-bg: #1c4430; --trained-line: #6cc799; --special: #b9adf6;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth; }
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto; } }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.5; overflow-wrap: anywhere;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif; }
main, header.top, footer, nav.parts { max-width: 1080px; margin: 0 auto; padding: 0 24px; }
header.top { padding-top: 40px; padding-bottom: 8px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 8px; letter-spacing: -0.015em; }
h2 { font-size: 20px; margin: 0 0 4px; letter-spacing: -0.01em; scroll-margin-top: 56px; }
h3 { font-size: 15px; margin: 20px 0 6px; }
p { margin: 0 0 12px; max-width: 84ch; text-wrap: pretty; }
a { color: var(--accent); }
a:focus-visible, summary:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; border-radius: 4px; }
.lead, .soft { color: var(--soft); }
.lead { font-size: 15px; }
code, pre, .mono { font-family: var(--mono); font-size: 0.875em; }
code { background: var(--sunk); padding: 1px 4px; border-radius: 4px; }
pre { background: var(--sunk); padding: 12px; border-radius: 8px; white-space: pre-wrap; margin: 8px 0; }
nav.parts { position: sticky; top: 0; z-index: 2; background: var(--paper); padding-top: 8px; padding-bottom: 8px;
  border-bottom: 1px solid var(--line); display: flex; gap: 4px 18px; overflow-x: auto; font-size: 14px; }
nav.parts a { color: var(--soft); text-decoration: none; white-space: nowrap; padding: 4px 0; }
nav.parts a:hover { color: var(--ink); text-decoration: underline; text-underline-offset: 4px; }
section { padding: 28px 0 4px; }
section > p.lead { margin-bottom: 16px; }
footer { color: var(--soft); font-size: 13px; padding-top: 32px; padding-bottom: 40px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 16px 0; }
.tile, .card, .chart, details.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; }
.tile { padding: 14px 16px; }
.tile b { display: block; font-size: 24px; line-height: 1.2; font-weight: 600; letter-spacing: -0.02em;
  font-variant-numeric: tabular-nums; }
.tile span { display: block; color: var(--soft); font-size: 13px; }
.tile .name { margin-bottom: 4px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 16px;
  margin: 16px 0; }
.chart { margin: 0; padding: 14px 16px 12px; min-width: 0; }
.chart figcaption { font-weight: 600; font-size: 14px; }
.chart figcaption span { font-weight: 400; color: var(--soft); }
.plot { position: relative; margin: 14px 12px 26px 52px; height: 180px; font-size: 12px; color: var(--soft);
  font-variant-numeric: tabular-nums; }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.plot .y { position: absolute; right: calc(100% + 8px); transform: translateY(-50%); white-space: nowrap; }
.plot .x { position: absolute; top: calc(100% + 6px); transform: translateX(-50%); white-space: nowrap; }
.chart .axis { text-align: center; color: var(--soft); font-size: 12px; margin: 0; max-width: none; }
.plot line.grid { stroke: var(--line); stroke-width: 1; vector-effect: non-scaling-stroke; }
.plot line.mark { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 3 3; vector-effect: non-scaling-stroke; }
.plot polyline { fill: none; stroke-width: 1.75; stroke-linejoin: round; vector-effect: non-scaling-stroke; }
.plot polyline.faint { stroke-width: 1; opacity: 0.35; }
.plot rect { fill: var(--c1); }
.plot rect:hover { fill: var(--c2); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 4px 0 0; padding: 0; list-style: none;
  font-size: 13px; color: var(--soft); }
.legend svg { width: 26px; height: 8px; margin-right: 6px; vertical-align: middle; }
.bars { display: grid; grid-template-columns: minmax(0, max-content) 1fr max-content; gap: 6px 12px;
  align-items: center; font-size: 14px; margin: 10px 0 2px; }
.bars i { display: block; height: 10px; border-radius: 5px; background: var(--c1); min-width: 2px; }
.bars b { font-weight: 500; font-variant-numeric: tabular-nums; color: var(--soft); }
.scroll { overflow-x: auto; margin: 12px 0; }
table { border-collapse: collapse; font-size: 14px; width: 100%; }
th, td { text-align: left; padding: 7px 14px 7px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 500; font-size: 13px; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
details > summary { cursor: pointer; }
details.card { margin: 10px 0; }
details.card > summary { padding: 11px 16px; font-size: 14px; }
details.card > .inside { padding: 4px 16px 14px; border-top: 1px solid var(--line); }
.badge { display: inline-block; font-size: 12px; font-weight: 600; padding: 1px 8px; border-radius: 999px;
  background: var(--sunk); color: var(--soft); white-space: nowrap; }
.fault { --tone: var(--fault); --tone-bg: var(--fault-bg); }
.warning { --tone: var(--warn); --tone-bg: var(--warn-bg); }
.note { --tone: var(--note); --tone-bg: var(--note-bg); }
.good { --tone: var(--good); --tone-bg: var(--good-bg); }
.badge.fault, .badge.warning, .badge.note, .badge.good { background: var(--tone-bg); color: var(--tone); }
.finding { background: var(--card); border: 1px solid var(--line); border-left: 5px solid var(--tone);
  border-radius: 10px; padding: 14px 18px; margin: 12px 0; }
.finding h3 { margin: 0 0 4px; font-size: 16px; }
.finding .badge { margin-right: 8px; vertical-align: 2px; }
.finding p { margin: 4px 0; }
.finding .fix b { color: var(--tone); }
@media (max-width: 640px) {
  main, header.top, footer, nav.parts { padding-left: 16px; padding-right: 16px; }
  header.top { padding-top: 24px; }
  h1 { font-size: 23px; }
  .tiles { grid-template-columns: 1fr 1fr; gap: 8px; }
  .tile { padding: 10px 12px; }
  .tile b { font-size: 20px; }
  .finding { padding: 12px 14px; }
}
@media print {
  nav.parts { display: none; }
  .chart, .finding, .tile, details.card { break-inside: avoid; }
}
"""
