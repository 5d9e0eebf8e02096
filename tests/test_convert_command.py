"""`posttrain convert`: counts, atomic writes, and what it refuses."""

from __future__ import annotations

import gzip
import json
import os
import re

import pytest
from datasets import load_dataset

from posttrain.cli import convert as command
from posttrain.cli.main import main

PAIRS = [
    {"prompt": "2+2=", "chosen": "4", "rejected": "5", "id": 1, "score": 0.3},
    {"prompt": "3+3=", "chosen": "6", "rejected": "7", "id": "x", "score": 0.12345678901234566},
]


@pytest.fixture(autouse=True)
def here(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    return tmp_path


def run(output="out.jsonl", to="unpaired_preference", name="pairs.jsonl", *more):
    return main(["convert", "--dataset_name", name, "--to", to, "--output", str(output), *more])


def rows_in(text):
    return [json.loads(line) for line in text.splitlines()]


def test_rows_and_counts(here, capsys):
    assert run() == 0
    assert "2 rows in (standard preference), 4 rows out" in capsys.readouterr().out
    rows = rows_in((here / "out.jsonl").read_text())
    assert rows[1] == {"prompt": "2+2=", "completion": "5", "label": False, "id": 1, "score": 0.3}
    assert (here / "out.jsonl").stat().st_mode & 0o777 == 0o666 & ~command._umask()
    # And back, with what cannot be paired counted.
    (here / "out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    assert run("back.jsonl", "preference", "out.jsonl") == 0
    assert "3 rows in (standard unpaired_preference), 1 row out; 1 row dropped: no answer" in capsys.readouterr().out
    assert rows_in((here / "back.jsonl").read_text()) == PAIRS[:1]


def test_every_kind_of_output(here):
    for name in ("a.jsonl", "a.jsonl.gz", "a.json", "a.parquet"):
        assert run(name, "prompt_completion", "pairs.jsonl", "--conversational") == 0
    rows = rows_in((here / "a.jsonl").read_text())
    assert rows[0]["prompt"] == [{"role": "user", "content": "2+2="}]
    assert rows_in(gzip.decompress((here / "a.jsonl.gz").read_bytes()).decode()) == rows
    assert json.loads((here / "a.json").read_text()) == rows
    assert list(load_dataset("parquet", data_files="a.parquet", split="train")) == rows
    before = (here / "a.jsonl.gz").read_bytes()
    assert run("a.jsonl.gz", "prompt_completion", "pairs.jsonl", "--conversational", "--overwrite") == 0
    assert (here / "a.jsonl.gz").read_bytes() == before
    # What was written is read again.
    for name in ("a.jsonl.gz", "a.json", "a.parquet"):
        assert run("b.jsonl", "prompt_completion", name, "--overwrite") == 0
        assert rows_in((here / "b.jsonl").read_text()) == rows


def test_part_of_a_split_and_steps(here):
    row = {"prompt": "a", "completions": ["b", "c"], "labels": [True, True]}
    (here / "steps.jsonl").write_text(f"{json.dumps(row)}\n" * 5)
    line = ("--dataset_split", "train[:2]", "--step_separator", " | ")
    assert run("out.jsonl", "prompt_completion", "steps.jsonl", *line) == 0
    assert rows_in((here / "out.jsonl").read_text()) == [{"prompt": "a", "completion": "b | c"}] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("out.jsonl", "preferenc"), "`to` is 'preferenc'; expected .*Did you mean 'preference'"),
        (("out.jsonl", "prompt_completion", ""), "`dataset_name` is not set"),
        (("", "prompt_completion"), "`output` is not set"),
        (("out.txt",), "`output` is 'out.txt'; its name must end in one of .jsonl"),
        (("pairs.jsonl",), "`output` is 'pairs.jsonl', which exists; give another name, or --overwrite"),
        (("folder.jsonl",), "which is a folder"),
        (("/proc/none/out.jsonl",), "cannot be written"),
        (("out.jsonl", "stepwise_supervision"), "the rows are preference, which can become preference, unpaired"),
        (("out.jsonl", "preference", "none.jsonl"), "No file or folder 'none.jsonl'"),
        (("out.jsonl", "preference", "broken.jsonl"), "broken.jsonl', line 2: not valid JSON .*was cut"),
        (("out.jsonl", "preference", "mixed.jsonl"), "mixed.jsonl', line 2 is .* line 1 is standard preference"),
        (("out.jsonl", "prompt_completion", "bad.jsonl"), "No row is left, and 'out.jsonl' was not written: 1 row in"),
    ],
)  # fmt: skip
def test_refusals_leave_nothing_behind(here, arguments, message, capsys):
    (here / "folder.jsonl").mkdir()
    (here / "broken.jsonl").write_text(json.dumps(PAIRS[0]) + '\n{"prompt": "a')
    (here / "mixed.jsonl").write_text(json.dumps(PAIRS[0]) + '\n{"text": "a"}\n')
    (here / "bad.jsonl").write_text('{"prompt": "a", "completion": "b", "label": false}\n')
    before = sorted(os.listdir(here))
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert sorted(os.listdir(here)) == before
    assert rows_in((here / "pairs.jsonl").read_text()) == PAIRS


def test_an_old_file_stays_whole_when_the_new_one_fails(here, capsys):
    (here / "out.jsonl").write_text("old")
    (here / "broken.jsonl").write_text(json.dumps(PAIRS[0]) + "\n{")
    assert run("out.jsonl", "prompt_only", "broken.jsonl", "--overwrite") == 2
    assert (here / "out.jsonl").read_text() == "old"
    assert run("out.jsonl", "prompt_only", "pairs.jsonl", "--overwrite") == 0
    assert len(rows_in((here / "out.jsonl").read_text())) == 2


def test_a_file_that_appears_meanwhile_is_kept(here, monkeypatch, capsys):
    write = command._jsonl

    def slow(file, rows):
        write(file, rows)
        (here / "out.jsonl").write_text("another's")

    monkeypatch.setattr(command, "_jsonl", slow)
    assert run() == 2
    assert "exists by now" in capsys.readouterr().err
    assert (here / "out.jsonl").read_text() == "another's" and not list(here.glob(".out*"))


def test_a_full_disk_is_one_error(here, monkeypatch, capsys):
    def full(file, rows):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command, "_jsonl", full)
    assert run() == 2
    assert "'out.jsonl' cannot be written" in capsys.readouterr().err and not list(here.glob(".out*"))
