"""docs/data.md and the code say the same: types, examples, conversions. POSTTRAIN_UPDATE_DOCS=1 writes the table."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from posttrain.cli.schema import stored
from posttrain.data.conversions import CONVERSIONS
from posttrain.data.convert import PAIRED
from posttrain.data.formats import TYPES, validate_row
from posttrain.data.joining import STOPPING_RULES
from posttrain.data.mixture import MIXING
from posttrain.data.sources import COMPRESSED, READERS

PAGE = Path(__file__).parent.parent / "docs" / "data.md"
TABLE = re.compile(r"(?<=<!-- conversions -->\n).*?(?=<!-- /conversions -->)", re.S)


def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def conversions() -> str:
    lines = ["| from | to | |", "|---|---|---|"]
    for (source, to), function in CONVERSIONS.items():
        text = str(function.__doc__).split("\n\n")[0]
        lines.append(f"| `{source}` | `{to}` | {' '.join(text.split()).removesuffix('.')} |")
    for source, to in sorted(PAIRED, reverse=True):
        how = "Answers to one prompt with label true and false are paired, in the order in which they come"
        lines.append(f"| `{source}` | `{to}` | {how} |")
    return "\n".join(lines) + "\n"


def test_the_table_of_conversions_is_current():
    if os.environ.get("POSTTRAIN_UPDATE_DOCS", "0") not in ("", "0"):
        PAGE.write_text(TABLE.sub(lambda _: conversions(), page()), encoding="utf-8")
    assert TABLE.findall(page()) == [conversions()], "run POSTTRAIN_UPDATE_DOCS=1 pytest tests/test_data_page.py"


def test_the_table_of_types_is_the_table_of_the_code():
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", page().split("## Dataset types")[1].split("###")[0], re.M)
    assert [name for name, _ in rows] == list(TYPES)
    for name, text in rows:
        assert tuple(re.findall(r"`(\w+)`", text))[: len(TYPES[name])] == TYPES[name]


@pytest.mark.parametrize(("at", "conversational"), [(0, False), (1, True), (2, True)])
def test_examples_are_of_the_types_they_stand_for(at, conversational):
    blocks = re.findall(r"<!-- formats -->\n```json\n(.*?)```", page(), re.S)
    found = [validate_row(json.loads(line)) for line in blocks[at].splitlines()]
    assert all(each.conversational is conversational for each in found)
    if at < 2:
        assert [each.type for each in found] == [name for name in TYPES if not (conversational and name == "tokenized")]


def test_words_of_the_fields():
    for word in (*READERS, *COMPRESSED, *STOPPING_RULES, *MIXING):
        assert f"`{word}`" in page() or f" {word}`" in page(), word
    choices = {option.name: option.choices for option in stored("sft")["DatasetMixtureConfig"]}
    assert choices["mixing"] == MIXING and choices["stopping_strategy"] == STOPPING_RULES
