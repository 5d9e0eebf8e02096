"""The generated parts of docs/templates.md: the table of tested templates and the example of a report.

PYTHONPATH=tests python tests/templates_page.py
"""

from __future__ import annotations

import re
from pathlib import Path

from data_fixtures import byte_tokenizer
from own_templates import EVERY, OWN, REAL, tokenizer_for

from posttrain.data.audit import audit_template

PAGE = Path(__file__).parent.parent / "docs" / "templates.md"
COLUMNS = ("stop_token", "reasoning", "history", "tools", "system", "default_system", "order", "content")
TABLE = re.compile(r"(?<=<!-- templates -->\n).*?(?=<!-- /templates -->)", re.S)
REPORT = re.compile(r"(?<=<!-- report -->\n).*?(?=<!-- /report -->)", re.S)


def row(name: str) -> str:
    audit = audit_template(tokenizer_for(name))
    cells = [name.removeprefix("real:") if name.startswith("real:") else f"*{name}*"]
    for check in COLUMNS:
        finding = audit[check].finding
        cells.append(f"`{finding}`" if finding.startswith("<") and ", " not in finding else finding.replace("<", "\\<"))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def table(old: str) -> str:
    """The table; rows of templates that are not at hand stay as they are."""
    head = f"| template | {' | '.join(name.replace('_', ' ') for name in COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}\n"
    kept = [line + "\n" for line in old.splitlines()[2:] if not line.startswith("| *")]
    return (
        head
        + "".join(row(name) for name in OWN)
        + "".join([row(name) for name in EVERY if name.startswith("real:")] if REAL else kept)
    )


def report() -> str:
    tokenizer = byte_tokenizer(template=OWN["opens_thinking"].template, eos="<eos>")
    return f"```\n{audit_template(tokenizer).text()}\n```\n"


def page() -> str:
    text = PAGE.read_text(encoding="utf-8")
    text = TABLE.sub(lambda match: table(match.group()), text)
    return REPORT.sub(lambda _: report(), text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
