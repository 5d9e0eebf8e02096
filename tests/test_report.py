"""The page machinery: charts with the right numbers, text that is safe to look at, and near-duplicates."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np
import pytest
from data_fixtures import byte_tokenizer, word_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.errors import ConfigError
from posttrain.report.chart import Series, bars, histogram, line_chart, short, ticks
from posttrain.report.duplicates import exact_pairs, near_pairs
from posttrain.report.page import Section, details, document, finding, table, tiles, write_page
from posttrain.report.survey import Laid
from posttrain.report.tokens import TokenTexts
from posttrain.report.visible import one_line, visible

HOSTILE = "</script><b onclick='x'>&\"\x00\x1b]0;t\x07\u202e\ud800"
VOID = {"meta", "line", "rect", "br", "wbr", "polyline"}


class Balanced(HTMLParser):
    """Fails where a tag is closed that is not open."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        assert not [k for k, _ in attrs if k.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


def test_every_part_escapes_what_it_is_given(tmp_path):
    parts = [
        tiles([(HOSTILE, HOSTILE, HOSTILE)]),
        table([HOSTILE], [[HOSTILE]], [0]),
        details(HOSTILE, HOSTILE),
        finding("fault", HOSTILE, HOSTILE, HOSTILE),
        line_chart(HOSTILE, [Series(HOSTILE, [0, 1], [1, 2]), Series(HOSTILE, [0], [3])], HOSTILE, HOSTILE),
        histogram(HOSTILE, [0, 1, 2], [3, 4], HOSTILE, HOSTILE),
        bars(HOSTILE, [(HOSTILE, 1.0, HOSTILE)]),
    ]
    page = document(HOSTILE, HOSTILE, [Section("a", HOSTILE, part, HOSTILE) for part in parts], HOSTILE)
    assert {"script", "b onclick"} & Balanced(page).tags == set()
    assert "<b onclick" not in page
    write_page(tmp_path / "page.html", page, "html")  # a lone surrogate has no UTF-8
    assert (tmp_path / "page.html").read_bytes().startswith(b"<!DOCTYPE html>")
    with pytest.raises(ConfigError, match=r"`html` is .*; give a file in a folder"):
        write_page(tmp_path / "none" / "page.html", page, "html")
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


@given(st.text())
def test_visible_text_has_nothing_unseen(text):
    shown = visible(text)
    shown.encode("utf-8")  # no lone surrogates
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]", shown)
    assert "\n" not in one_line(text) and len(one_line(text, 20)) <= 20


def test_visible_marks():
    assert visible("a\tb\x1b[0m\r\n") == "a→\tb␛[0m␍↵\n"
    assert visible("a b", spaces=True) == "a·b"
    assert one_line("ab\ncd", 4) == "ab↵…"


def test_numbers_on_axes():
    assert [short(v) for v in (0, 12.5, 999, 12345, 1234567, 2e9, 0.00012, -0.5)] == [
        "0", "12.5", "999", "12.3k", "1.23M", "2G", "1.2e-4", "-0.5",
    ]  # fmt: skip
    assert ticks(0, 9.3) == [0, 2, 4, 6, 8]
    assert ticks(3, 3) == [3]


def points(chart: str) -> list[list[tuple[float, float]]]:
    found = re.findall(r'points="([^"]*)"', chart)
    return [[tuple(map(float, pair.split(","))) for pair in line.split()] for line in found]


def test_a_line_stands_where_its_numbers_are():
    [line] = points(line_chart("Loss", [Series("a", [0, 5, 10], [0.0, 1.0, 2.0])], zero=True))
    assert [x for x, _ in line] == [0, 50, 100]
    assert line[0][1] == 100 and line[0][1] - line[1][1] == pytest.approx(line[1][1] - line[2][1], abs=0.02)
    gap = points(line_chart("Loss", [Series("a", range(5), [1.0, 2.0, float("nan"), 1.0, 3.0])]))
    assert [len(part) for part in gap] == [2, 2]
    assert "No values" in line_chart("Loss", [Series("a", [0], [float("inf")])])
    [flat] = points(line_chart("Loss", [Series("a", [0, 1], [3.0, 3.0])]))
    assert {y for _, y in flat} == {50}


def test_a_long_line_keeps_its_peaks():
    y = np.zeros(100_000)
    y[54_321] = 9.0
    [line] = points(line_chart("Loss", [Series("a", range(100_000), y.tolist())], zero=True))
    assert len(line) < 2000 and min(y for _, y in line) < 5


def test_lines_differ_in_more_than_colour():
    chart = line_chart("Loss", [Series(f"run {i}", [0, 1], [i, i + 1]) for i in range(8)])
    assert len(set(re.findall(r'polyline[^>]*stroke-dasharray="([^"]*)"', chart))) == 8
    assert "run 3: from 3 to 4 over 2 points" in chart


def test_histogram_heights():
    heights = re.findall(r'<rect[^>]*height="([^"]*)"', histogram("L", [0, 10, 20, 30], [1, 4, 2]))
    assert [float(h) for h in heights] == [25, 100, 50]


# ---- tokens ----------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(blacklist_categories=("Cs",)), max_size=40))
def test_tokens_shown_are_the_text(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    runs = TokenTexts(tokenizer).runs(Laid(ids, [1.0] * len(ids)))
    assert "".join(token.text for run in runs for token in run.tokens) == text
    assert [i for run in runs for token in run.tokens for i in token.ids] == ids


def test_runs_spaces_and_gaps():
    tokenizer = word_tokenizer(["the cat sat on the mat"] * 9)
    ids = tokenizer(" the cat", add_special_tokens=False)["input_ids"]
    runs = TokenTexts(tokenizer).runs(Laid(ids, [0.0] * (len(ids) - 1) + [0.5]))
    assert [run.weight for run in runs] == [0.0, 0.5]
    assert "".join(t.text for run in runs for t in run.tokens) == " the cat"
    long = TokenTexts(tokenizer).runs(Laid(ids * 500, [1.0] * len(ids) * 500))
    assert sum(run.left_out for run in long) == len(ids) * 500 - 700
    unknown = TokenTexts(tokenizer).runs(Laid([10**6], [1.0]))
    assert unknown[0].tokens[0].ids == (10**6,)


# ---- duplicates ------------------------------------------------------------------------------------------------------


def test_exact_pairs():
    assert exact_pairs([5, 7, 5, 5]) == [(2, 0, 1.0), (3, 0, 1.0)]


def test_near_pairs_are_measured():
    draw = np.random.default_rng(0)
    rows = [draw.integers(0, 50_000, 100) for _ in range(200)]
    changed = rows[7].copy()
    changed[50] += 1  # 5 of 96 shingles differ: 91 shared of 101
    moved = rows[9].copy()
    moved[::4] += 1  # every shingle differs
    pairs, short_rows = near_pairs([*rows, changed, moved, np.arange(6)])
    assert [(p.later, p.earlier) for p in pairs] == [(200, 7)]
    assert pairs[0].similarity == pytest.approx(91 / 101)
    assert short_rows == 1


def test_a_common_prompt_makes_no_duplicates_and_a_reference_is_not_compared_with_itself():
    draw = np.random.default_rng(1)
    prompt = draw.integers(0, 50_000, 300)
    rows = [np.concatenate([prompt, draw.integers(0, 50_000, 40)]) for _ in range(50)]
    assert near_pairs(rows)[0] == []
    again = rows[3].copy()
    again[-1] += 1
    train = [*rows, rows[5].copy()]
    pairs, _ = near_pairs([*train, again], reference=len(train))
    assert [(p.later, p.earlier) for p in pairs] == [(len(train), 3)]


def test_many_equal_rows_cost_no_more_than_their_number():
    row = np.random.default_rng(2).integers(0, 50_000, 60)
    others = [np.random.default_rng(i).integers(0, 50_000, 60) for i in range(10, 2010)]
    pairs, _ = near_pairs([*others, *[row] * 300])
    assert len(pairs) == 299
