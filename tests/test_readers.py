"""Text files of rows: read as they are written, and a broken row names its file and line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.data import readers
from posttrain.data.readers import read_rows
from posttrain.data.tables import read_table
from posttrain.errors import DataError, EmptyDataError, MissingExtraError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# What other readers change in silence


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        # Dates stay text, and a byte order mark and empty lines are no rows.
        ("a.jsonl", '\ufeff{"t": "2024-01-01"}\n\n  \n{"t": "b"}\n', [(1, {"t": "2024-01-01"}), (4, {"t": "b"})]),
        ("a.jsonl", '{"t": "a\\u0000b"}', [(1, {"t": "a\0b"})]),
        # The words NA and null, numbers with zeros, empty cells.
        ("a.csv", "text,n\r\nNA,007\r\nnull,\r\n", [(2, {"text": "NA", "n": "007"}), (3, {"text": "null", "n": ""})]),
        ("a.csv", 'text\n"a,\n""b"""\nc\n', [(2, {"text": 'a,\n"b"'}), (4, {"text": "c"})]),
        ("a.tsv", "a\tb\nx,y\t1\n", [(2, {"a": "x,y", "b": "1"})]),
        ("a.csv", "prompt,completion,label\na,[1],true\n", [(2, {"prompt": "a", "completion": "[1]", "label": True})]),
        (
            "a.csv",
            'messages,tools\n"[{""role"": ""user"", ""content"": ""Hi""}]",\n',
            [(2, {"messages": [{"role": "user", "content": "Hi"}], "tools": None})],
        ),
        (
            "a.csv",
            'prompt\n"[{""role"": ""user"", ""content"": ""Hi""}]"\n[{ no json\n',
            [(2, {"prompt": [{"role": "user", "content": "Hi"}]}), (3, {"prompt": "[{ no json"})],
        ),
        # Only line ends part lines.
        ("a.txt", "a\n\nb \x0c\u2028c\r\nd", [(1, {"text": "a"}), (2, {"text": ""}), (3, {"text": "b \x0c\u2028c"}),
                                              (4, {"text": "d"})]),
        ("a.json", '[{"t": 1}, {"t": 2}]', [(1, {"t": 1}), (2, {"t": 2})]),
        ("a.json", '{"data": [{"t": 1}, {"t": 2}]}', [(1, {"t": 1}), (2, {"t": 2})]),
        ("a.json", '{"messages": [{"role": "user"}]}', [(1, {"messages": [{"role": "user"}]})]),
        ("a.json", '{"t": 1}\n{"t": 2}\n', [(1, {"t": 1}), (2, {"t": 2})]),
        ("a.json", '{\n "t": 1\n}', [(1, {"t": 1})]),
    ],
)  # fmt: skip
def test_rows_are_read_as_they_are_written(tmp_path, name, content, rows):
    assert list(read_rows(write(tmp_path / name, content))) == rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"t": "a"}\n{"t": "b', r"line 2: not valid JSON .*the file ends in the middle of this row"),
        ("a.jsonl", '{"t": "a"}\n{"t": "b\n{"t": "c"}\n', r"line 2: not valid JSON .*, column 7"),
        ("a.jsonl", '{"t": "a"} {"t": "b"}\n', r"line 1: .*one object a line"),
        ("a.jsonl", '{\n "t": "a"\n}\n', r"line 1: .*name the file \.json"),
        ("a.jsonl", '{"t": "a"}\n[1]\n', r"line 2: a list; each row must be a JSON object"),
        ("a.jsonl", '{"t": "a"}\nnull\n', r"line 2: a null"),
        ("a.jsonl", '{"t": "a", "t": "b"}\n', r"line 1: the key 't' comes twice"),
        ("a.jsonl", '{"n": 123456789012345678901}\n', r"line 1: the number 12345.* does not fit in 64 bits"),
        ("a.jsonl", '{"t": NaN}\n', r"line 1: holds NaN, which is no JSON; write null"),
        ("a.csv", "prompt;completion\na;b\n", r"line 1: one column, .* seem to be parted by ';'"),
        ("a.jsonl", '{"t": "\\ud800"}\n', r"line 1: .*surrogate"),
        ("a.jsonl", "[" * 100_000, r"line 1: nested too deeply"),
        ("a.jsonl", b'{"t": "ok"}\n{"t": "caf\xe9"}\n', r"line 2: byte 11 \(0xe9, after .*caf'\) is not UTF-8.*LATIN1"),
        ("a.jsonl", '{"t": "a"}\n'.encode("utf-16"), r"line 1: written in UTF-16"),
        ("a.txt", b"ok\n\xff\n", r"line 2: byte 1 .*not UTF-8"),
        ("a.csv", "a,b\n1,2\n1,2,3\n", r"line 3: 3 values and 2 columns \(a, b\); put quotes"),
        ("a.csv", "a,b\n1\n", r"line 2: 1 values and 2 columns"),
        ("a.csv", 'a,b\n1,2\n"x,3\n4,5\n', r"line 3: not valid csv .*quote"),
        ("a.csv", "a,a\n1,2\n", r"line 1: the column 'a' comes twice"),
        ("a.csv", "a,\n1,2\n", r"line 1: a column without a name"),
        ("a.csv", "label\nmaybe\n", r"line 2: column 'label' is 'maybe'; write true or false"),
        ("a.csv", "messages\n[{\n", r"line 2: not valid JSON"),
        ("a.json", '[{"t": 1}, {"t":', r"line 1: not valid JSON .*it was cut"),
        ("a.json", '[\n{"t": 1},\n{"t" 2}]', r"line 3: not valid JSON .*column 6"),
        ("a.json", '[{"t": 1}, "b"]', r"row 2: a text; each row must be"),
        ("a.jsonl.gz", b"no gzip", r"line 1: the compressed data is broken"),
        ("a.jsonl.gz", gzip.compress(b'{"t": 1}\n' * 9999)[:-20], r"line \d+: the compressed data is broken.*was cut"),
        ("a.jsonl.bz2", bz2.compress(b'{"t": 1}\n' * 9999)[:-4], r"line \d+: the compressed data is broken"),
        ("a.jsonl.xz", lzma.compress(b'{"t": 1}\n' * 9999)[:-4], r"line \d+: the compressed data is broken"),
    ],
)  # fmt: skip
def test_a_broken_row_names_its_file_and_line(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    with pytest.raises(DataError, match=rf"File '.*{name}', {message}") as caught:
        list(read_rows(path))
    assert len(str(caught.value).replace(str(path), "")) < 400


@pytest.mark.parametrize(("ending", "compress"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)])
def test_compressed_files(tmp_path, ending, compress):
    path = write(tmp_path / f"a.jsonl.{ending}", compress(b'{"t": 1}\n') + compress(b'{"t": 2}\n'))
    assert [row for _, row in read_rows(path)] == [{"t": 1}, {"t": 2}]


def test_zstd_asks_for_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(MissingExtraError, match="pip install zstandard"):
        list(read_rows(write(tmp_path / "a.jsonl.zst", b"x")))


def test_zstd(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    lines = b"".join(b'{"t": %d}\n' % number for number in range(50_000))
    frames = zstandard.compress(lines[:7]) + zstandard.compress(lines[7:])
    rows = [row for _, row in read_rows(write(tmp_path / "a.jsonl.zst", frames))]
    assert rows == [{"t": number} for number in range(50_000)]
    with pytest.raises(DataError, match="compressed data is broken"):
        list(read_rows(write(tmp_path / "b.jsonl.zst", frames[:-9])))


def test_huge_rows(tmp_path, monkeypatch):
    """A row of megabytes is a row; a line without end is none."""
    path = write(tmp_path / "a.jsonl", json.dumps({"t": "x" * 5_000_000}) + '\n{"t": "y"}\n')
    assert [len(row["t"]) for _, row in read_rows(path)] == [5_000_000, 1]
    table = write(tmp_path / "a.csv", "t\n" + "x" * 5_000_000 + "\n")
    assert [len(row["t"]) for _, row in read_rows(table)] == [5_000_000]
    monkeypatch.setattr(readers, "MAX_LINE", 1 << 20)
    with pytest.raises(DataError, match="line 1: longer than 1 MiB"):
        list(read_rows(path))
    with pytest.raises(DataError, match="line 2: longer than 1 MiB"):
        list(read_rows(table))


# Rows as a table

NAMES = st.text("abc", min_size=1, max_size=2)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=8)
    | st.integers(-9999999, 9999999).map(lambda number: number / 1000),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
ROWS = st.lists(st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3), min_size=1, max_size=6)


def plain(value):
    """As a table gives it back: keys that other rows have are None."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items() if item is not None}
    return [plain(item) for item in value] if isinstance(value, list) else value


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ROWS)
def test_a_table_holds_what_the_file_says(tmp_path, rows):
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    if not any(rows):
        with pytest.raises(DataError, match="rows without a column"):
            read_table([path], check=False)
        return
    table = list(read_table([path], check=False))
    assert [plain(row) for row in table] == [plain(row) for row in rows]


def test_values_without_one_type_come_back_as_they_were(tmp_path):
    call = {"function": {"name": "f", "arguments": {"x": 0.3, "n": None}}}
    rows = [
        {"messages": [{"role": "assistant", "content": "12", "tool_calls": [call]}], "answer": "7"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "answer": 7},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"y": "1"}}}]}]},
    ]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    table = list(read_table([path]))
    first = table[0]["messages"][0]
    assert first["content"] == "12" and first["tool_calls"] == [call]
    assert table[1]["messages"][0]["content"] == [{"type": "text", "text": "a"}]
    assert table[2]["messages"][0]["tool_calls"][0]["function"]["arguments"] == {"y": "1"}
    assert [row["answer"] for row in table] == ["7", 7, None]


def test_a_table_is_written_once_and_again_when_the_file_changes(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"t": "a"}\n')
    assert read_table([path])[0] == {"t": "a"}
    (before,) = (tmp_path / "cache" / "posttrain").glob("*.arrow")
    stamp = before.stat().st_mtime_ns
    assert read_table([path])[0] == {"t": "a"} and before.stat().st_mtime_ns == stamp
    assert read_table([write(path, '{"t": "bb"}\n')])[0] == {"t": "bb"}
    assert not list((tmp_path / "cache" / "posttrain").glob("*.partial"))


def test_files_without_rows_are_named(tmp_path):
    for name, content in (("a.jsonl", "\n\n"), ("a.json", "[]"), ("a.csv", "a,b\n"), ("b.json", " ")):
        with pytest.raises(EmptyDataError, match=rf"{name}' holds no row"):
            read_table([write(tmp_path / name, content)])


@pytest.mark.parametrize(
    "rows",
    [
        [{"n": 2**53 + 1}, {"n": 0.5}],
        [{"deep": eval("{'a': " * 90 + "1" + "}" * 90)}],
        [{"m": {}}, {"m": {"a": 1}}, {"m": None}],
        [{"n": -(2**63)}, {"n": 2**63 - 1}],
    ],
)
def test_values_that_columns_of_arrow_cannot_hold(tmp_path, rows):
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert list(read_table([path])) == rows
