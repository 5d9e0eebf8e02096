"""One page that stands alone: its parts as functions from values to safe HTML.

Every function takes plain text and escapes it; what is HTML already is a `Markup`. A page's own policy forbids the
browser to load anything, and to run any script but the one its maker gave. Charts are in `posttrain.report.chart`.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from markupsafe import Markup, escape

from posttrain.errors import ConfigError
from posttrain.report.style import CSS

Gravity = Literal["fault", "warning", "note", "good"]
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_WORDS = {"fault": "Fault", "warning": "Warning", "note": "Note", "good": "Good"}


@dataclass(frozen=True)
class Section:
    """A part of a page. `id` is its address on the page, `lead` one sentence under the heading."""

    id: str
    title: str
    body: Markup
    lead: str = ""


def document(
    title: str, lead: str, sections: Sequence[Section], footer: str = "", css: str = "", script: str = ""
) -> str:
    """The whole page. `css` is added to the style sheet and `script` is the one script the page's policy lets run; both
    are the caller's own text, never data."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = _POLICY + (f"; script-src 'sha256-{digest}'" if script else "")
    code = Markup("<script>{}</script>\n").format(Markup(script)) if script else ""
    links = joined(Markup('<a href="#{}">{}</a>').format(s.id, s.title) for s in sections)
    parts = joined(map(_section, sections))
    return Markup(
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n<title>{title}</title>\n<style>{css}</style>\n</head>\n<body>\n'
        '<header class="top"><h1>{title}</h1><p class="lead">{lead}</p></header>\n'
        '<nav class="parts" aria-label="Parts of the page">{links}</nav>\n<main>\n{parts}</main>\n'
        "<footer>{footer}</footer>\n{code}</body>\n</html>\n"
    ).format(
        policy=policy, code=code, title=title, css=Markup(CSS + css), lead=lead, links=links, parts=parts, footer=footer
    )


def write_page(path: str | Path, page: str, field: str) -> None:
    """Write a page, whole or not at all. Raises `ConfigError` naming the field for a place that cannot be written."""
    target = Path(path).expanduser()
    partial = target.with_name(f".{target.name}.partial")
    try:
        partial.write_text(page, encoding="utf-8", errors="backslashreplace")
        partial.replace(target)
    except OSError as error:
        raise ConfigError(
            f"`{field}` is {str(path)!r}, which cannot be written: {error.strerror or error}; give a file in a folder "
            "that exists."
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def joined(parts: Iterable[str]) -> Markup:
    """Parts one after another; plain text among them is escaped."""
    return Markup("\n").join(parts)


def _section(section: Section) -> Markup:
    lead = Markup('<p class="lead">{}</p>\n').format(section.lead) if section.lead else ""
    return Markup('<section aria-labelledby="{id}"><h2 id="{id}">{title}</h2>\n{lead}{body}</section>').format(
        id=section.id, title=section.title, lead=lead, body=section.body
    )


def tiles(items: Iterable[tuple[str, str, str]]) -> Markup:
    """Numbers to see first. e.g. [("rows kept", "97 of 100", "3 without targets")]"""
    tile = Markup('<div class="tile"><span class="name">{}</span><b>{}</b><span>{}</span></div>')
    return Markup('<div class="tiles">{}</div>').format(joined(tile.format(*item) for item in items))


def paragraph(text: str, css_class: str = "") -> Markup:
    return Markup('<p class="{}">{}</p>').format(css_class, text)


def badge(text: str, gravity: Gravity | str = "") -> Markup:
    """A word in a pill."""
    return Markup('<span class="badge {}">{}</span>').format(gravity, text)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> Markup:
    """A table; the columns in `numbers` are set to the right. It scrolls alone where the page is too narrow."""
    right = set(numbers)

    def line(cells: Sequence[str], tag: str) -> Markup:
        kinds = [Markup(' class="n"') if at in right else "" for at in range(len(cells))]
        cell = Markup(f"<{tag}{{}}>{{}}</{tag}>")
        return Markup("<tr>{}</tr>").format(
            Markup("").join(cell.format(kind, text) for kind, text in zip(kinds, cells, strict=True))
        )

    return Markup(
        '<div class="scroll" tabindex="0" role="region" aria-label="Table"><table><thead>{}</thead>'
        "<tbody>{}</tbody></table></div>"
    ).format(line(header, "th"), joined(line(row, "td") for row in rows))


def details(summary: str, body: str, is_open: bool = False) -> Markup:
    """Something to unfold."""
    return Markup('<details class="card"{}><summary>{}</summary><div class="inside">{}</div></details>').format(
        Markup(" open") if is_open else "", summary, body
    )


def finding(gravity: Gravity, title: str, text: str, fix: str = "", extra: str = "") -> Markup:
    """Something the reader must know, with what to do about it."""
    repair = Markup('<p class="fix"><b>Fix:</b> {}</p>').format(fix) if fix else ""
    return Markup('<article class="finding {g}"><h3>{badge}{title}</h3><p>{text}</p>{repair}{extra}</article>').format(
        g=gravity, badge=badge(_WORDS[gravity], gravity), title=title, text=text, extra=extra, repair=repair
    )


def preformatted(text: str) -> Markup:
    return Markup("<pre>{}</pre>").format(text)


def text(value: object) -> Markup:
    """A value as safe HTML."""
    return escape(value)
