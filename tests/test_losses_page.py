"""docs/losses.md is held to the tables of posttrain/loss: every row, its function, what it reads and needs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import test_docs

from posttrain.loss.kl import KL
from posttrain.loss.nll import TOKEN_LOSSES
from posttrain.loss.policy import POLICY
from posttrain.loss.preference import PREFERENCE
from posttrain.loss.unpaired import UNPAIRED

PAGE = "docs/losses.md"
TABLES: dict[str, dict[str, Any]] = {"PREFERENCE": PREFERENCE, "UNPAIRED": UNPAIRED, "POLICY": POLICY, "KL": KL}


def rows(table: str) -> dict[str, list[str]]:
    """The cells of a table of the page after the first, by the name in the first. e.g. {"sigmoid": ["−(1−ε)…", …]}"""
    (text,) = re.findall(rf"<!-- table: {table} -->\n(.*?)\n\n", test_docs.read(PAGE), re.S)
    cells = [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in text.splitlines()[2:]]
    return {first.strip("`"): rest for first, *rest in cells}


def function_of(row: Any) -> Any:
    return getattr(row, "loss", None) or getattr(row, "term", row)


@pytest.mark.parametrize("table", TABLES)
def test_the_page_has_the_rows_of_the_table(table: str):
    assert list(rows(table)) == list(TABLES[table])


@pytest.mark.parametrize("table", TABLES)
def test_each_row_links_to_its_function(table: str):
    for name, row in TABLES[table].items():
        function = function_of(row)
        path = "../" + function.__module__.replace(".", "/") + ".py"
        linked = [m.groups()[:2] for cell in rows(table)[name] for m in test_docs.CODE_LINK.finditer(cell)]
        assert linked == [(function.__name__, path)], name


@pytest.mark.parametrize("name", PREFERENCE)
def test_a_preference_row_says_what_it_reads_and_needs(name: str):
    row = PREFERENCE[name]
    formula, _, reads, needs, _ = rows("PREFERENCE")[name]
    assert set(re.findall(r"`(\w+)`", reads)) == row.reads
    wanted = [
        word for word, need in (("reference", row.reference), (row.batch, row.batch), ("third", row.third)) if need
    ]
    assert re.findall(r"\w+", needs) == wanted
    if name != "alphapo":  # its formula is said by simpo's
        assert bool(re.search(r"[−+] m\b", formula)) == row.margin


@pytest.mark.parametrize("name", POLICY)
def test_a_policy_row_says_what_its_sum_is_divided_by(name: str):
    row, divided = POLICY[name], rows("POLICY")[name][1]
    assert divided.startswith(row.unit)
    assert ("each its mean" in divided) == row.average


@pytest.mark.parametrize("table", TABLES)
def test_docstrings_name_the_papers_of_the_page(table: str):
    for name, row in TABLES[table].items():
        papers = re.findall(r"\b\d{4}\.\d{5}\b", rows(table)[name][-1])
        document = function_of(row).__doc__
        unsaid = {"dr_grpo", "luspo"}  # they share a function, and differ in what the sum is divided by
        assert name in unsaid or all(paper in document for paper in papers), name


def test_which_loss_when_leaves_none_out():
    """Names of the library that have no trainer yet say so."""
    (text,) = re.findall(r"## Which loss when\n(.*?)\n## ", test_docs.read(PAGE), re.S)
    lines = [line.split("|")[2:4] for line in text.splitlines() if line.startswith("|")]
    named = {name: trainer.strip() for trainer, start in lines for name in re.findall(r"`(\w+)`", start)}
    every = {*PREFERENCE, *UNPAIRED, *POLICY, *TOKEN_LOSSES} - {"chunked_nll"}
    assert every - named.keys() == set()
    assert {named[name] for name in PREFERENCE if name not in ("sft", "tpo")} == {"DPO"}
    assert {named[name] for name in UNPAIRED} == {"KTO"}
    assert {name for name, trainer in named.items() if trainer == "none yet"} == {"tpo", *POLICY}


def test_the_page_is_linked_and_runs():
    test_docs.test_relative_links_resolve(PAGE)
    test_docs.test_links_into_the_code_name_a_definition(PAGE)
    test_docs.test_names_in_backticks_exist(PAGE)
    test_docs.test_generated_parts_are_current(PAGE)
    (code,) = (m[3] for m in test_docs.FENCE.finditer(test_docs.read(PAGE)) if m[1] == "losses")
    exec(compile(code, PAGE, "exec"), {})
