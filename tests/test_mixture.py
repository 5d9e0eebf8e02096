"""Sources: files, folders, saved sets, and what is said when one cannot be read."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from posttrain.data.config import DatasetConfig, DatasetMixtureConfig
from posttrain.data.mixture import get_dataset
from posttrain.data.sources import load_source
from posttrain.errors import ConfigError, DataError, EmptyDataError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def test_files_of_every_kind(tmp_path):
    write(tmp_path / "a.jsonl", ["x", "y"])
    (tmp_path / "a.json").write_text(json.dumps([{"text": "x"}, {"text": "y"}]))
    (tmp_path / "a.csv").write_text("text\nx\ny\n")
    (tmp_path / "a.tsv").write_text("text\tn\nx\t1\ny\t2\n")
    (tmp_path / "a.txt").write_text("x\ny\n")
    Dataset.from_dict({"text": ["x", "y"]}).to_parquet(tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.json", "a.csv", "a.tsv", "a.txt", "a.parquet"):
        assert list(load_source(str(tmp_path / name), split="train")["text"]) == ["x", "y"], name


def test_folder_takes_splits_from_names(tmp_path):
    write(tmp_path / "rows-train-0.jsonl", ["a"])
    write(tmp_path / "rows-train-1.jsonl", ["b"])
    write(tmp_path / "rows_test.jsonl", ["c"])
    write(tmp_path / "val" / "x.jsonl", ["d"])
    splits = load_source(str(tmp_path))
    assert {name: list(part["text"]) for name, part in splits.items()} == {
        "train": ["a", "b"],
        "test": ["c"],
        "validation": ["d"],
    }


def test_saved_sets_and_data_files(tmp_path):
    DatasetDict({"train": Dataset.from_dict({"text": ["a"]})}).save_to_disk(tmp_path / "dict")
    Dataset.from_dict({"text": ["b"]}).save_to_disk(tmp_path / "one")
    assert load_source(str(tmp_path / "dict"), split="train")["text"][0] == "a"
    assert load_source(str(tmp_path / "one"), split="train")["text"][0] == "b"
    assert isinstance(load_source(str(tmp_path / "one"), split="train", streaming=True), IterableDataset)
    write(tmp_path / "files" / "deep" / "x.jsonl", ["c"])
    rows = load_source(str(tmp_path / "files"), split="dev", data_files={"dev": "x.jsonl"}, data_dir="deep")
    assert rows["text"][0] == "c"


def test_streaming(tmp_path):
    rows = load_source(write(tmp_path / "a.jsonl", "xy"), split="train", streaming=True)
    assert isinstance(rows, IterableDataset)
    assert [row["text"] for row in rows] == ["x", "y"]


def test_slices(tmp_path):
    path = write(tmp_path / "a.jsonl", "abcdefghij")
    assert list(load_source(path, split="train[:2]")["text"]) == ["a", "b"]
    assert list(load_source(path, split="train[80%:]")["text"]) == ["i", "j"]
    with pytest.raises(DataError, match=r"train\[x\]"):
        load_source(path, split="train[x]")


@pytest.mark.parametrize("path", ["/no/such.jsonl", "./gone", "data.jsonl", "a/b/c"])
def test_missing_path_is_named(path):
    with pytest.raises(DataError, match=f"No file or folder '{path}'"):
        load_source(path)


def test_hub_name_that_cannot_be_loaded_is_named():
    with pytest.raises(DataError, match=r"'nobody/nothing' .*hub"):
        load_source("nobody/nothing")


def test_unknown_endings_list_the_known(tmp_path):
    (tmp_path / "a.pdf").write_text("x")
    with pytest.raises(DataError, match=r"a\.pdf.*\.jsonl.*\.parquet"):
        load_source(str(tmp_path / "a.pdf"))
    with pytest.raises(DataError, match="holds no file that can be read"):
        load_source(str(tmp_path))


def test_missing_split_names_those_there_are(tmp_path):
    with pytest.raises(DataError, match=r"no split 'tran'; it has \['train'\]. Did you mean 'train'"):
        load_source(write(tmp_path / "a.jsonl", "x"), split="tran")


def test_broken_and_empty_files_are_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(DataError, match=r"a\.jsonl', line 2: not valid JSON"):
        load_source(str(path))
    path.write_text("")
    with pytest.raises(EmptyDataError, match=r"a\.jsonl' is empty"):
        load_source(str(path))


# Mixtures


def mix(*sources, **options):
    return get_dataset(DatasetMixtureConfig([DatasetConfig(**source) for source in sources], **options))


def test_sources_are_laid_one_after_another(tmp_path):
    a, b = write(tmp_path / "a.jsonl", "abcd"), write(tmp_path / "b.jsonl", "xy")
    mixed = mix({"path": a, "fraction": 0.5}, {"path": b})
    assert list(mixed["train"]["text"]) == ["a", "b", "x", "y"]
    assert [row["text"] for row in mix({"path": b}, {"path": a}, streaming=True)["train"]] == list("xyabcd")


def test_fractions_of_all_sources_are_shares_of_the_mixture(tmp_path):
    a, b = write(tmp_path / "a.jsonl", "abcdefgh"), write(tmp_path / "b.jsonl", "stuvwxyz")
    mixed = mix({"path": a, "fraction": 0.8}, {"path": b, "fraction": 0.2})
    assert list(mixed["train"]["text"]) == list("abcdefgh" + "st")  # 8 rows are four fifths of 10
    half = mix({"path": a, "fraction": 0.5}, {"path": b, "fraction": 0.5})
    assert len(half["train"]) == 16
    stream = mix({"path": a, "fraction": 0.8}, {"path": b, "fraction": 0.2}, streaming=True)
    assert [row["text"] for row in stream["train"]] == list("abcdefgh" + "st")


def test_columns_and_a_held_out_share(tmp_path):
    (tmp_path / "a.csv").write_text("text,n\n" + "".join(f"t{i},{i}\n" for i in range(10)))
    mixed = mix({"path": str(tmp_path / "a.csv"), "columns": ["text"]}, test_split_size=0.3)
    assert (len(mixed["train"]), len(mixed["test"])) == (7, 3)
    assert mixed["train"].column_names == ["text"]
    assert sorted([*mixed["train"]["text"], *mixed["test"]["text"]]) == [f"t{i}" for i in range(10)]


def test_columns_that_do_not_match_are_named(tmp_path):
    a = write(tmp_path / "a.jsonl", "a")
    (tmp_path / "b.csv").write_text("text,n\nx,1\n")
    with pytest.raises(DataError, match=r"\['n'\] are not in both"):
        mix({"path": a}, {"path": str(tmp_path / "b.csv")})
    with pytest.raises(DataError, match=r"no column 'txt', which `columns` names; it has \['text'\]"):
        mix({"path": a, "columns": ["txt"]})


def test_fields_out_of_range(tmp_path):
    a = write(tmp_path / "a.jsonl", "ab")
    with pytest.raises(ConfigError, match="`datasets` is empty"):
        mix()
    with pytest.raises(ConfigError, match="`fraction` is 30"):
        mix({"path": a, "fraction": 30})
    with pytest.raises(ConfigError, match="`test_split_size` is 1"):
        mix({"path": a}, test_split_size=1)
    with pytest.raises(ConfigError, match="streaming"):
        mix({"path": a}, test_split_size=0.5, streaming=True)
