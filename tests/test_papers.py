"""docs/papers.md is the index of the papers that the code cites."""

from __future__ import annotations

import re
from pathlib import Path

import test_docs

PAGE = "docs/papers.md"
ID = re.compile(r"\b\d{4}\.\d{5}\b")


def cited() -> dict[str, set[Path]]:
    """arXiv id → files of the library that name it."""
    found: dict[str, set[Path]] = {}
    for file in sorted((test_docs.ROOT / "posttrain").rglob("*.py")):
        for paper in ID.findall(file.read_text(encoding="utf-8")):
            found.setdefault(paper, set()).add(file)
    return found


def rows() -> list[list[str]]:
    """Cells of every paper's row."""
    lines = [line for line in test_docs.read(PAGE).splitlines() if line.startswith("| [")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_the_page_has_every_paper_once():
    papers = [match[0] for arxiv, *_ in rows() if (match := ID.search(arxiv))]
    assert sorted(papers) == sorted(cited())


def test_each_row_links_to_its_paper_and_to_a_file_that_cites_it():
    files = cited()
    for arxiv, _, _, gave, function in rows():
        (paper,) = set(ID.findall(arxiv))
        assert arxiv == f"[{paper}](https://arxiv.org/abs/{paper})" and gave
        link = test_docs.CODE_LINK.fullmatch(function)
        assert link is not None, paper
        assert (test_docs.ROOT / "docs" / link[2]).resolve() in files[paper], paper
