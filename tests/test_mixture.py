"""Sources: files, folders, saved sets, and what is said when one cannot be read."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from posttrain.cli.run import load_data
from posttrain.data.config import DatasetConfig, DatasetMixtureConfig, ScriptArguments
from posttrain.data.mixture import get_dataset
from posttrain.data.sources import load_source
from posttrain.errors import ConfigError, DataError, EmptyDataError


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


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


# One format in a source


CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]}
PAIR = {"prompt": "a", "completion": "b"}


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path, streaming, **options):
    return list(load_source(path, split="train", streaming=streaming, **options))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((CHAT, CHAT, PAIR), r"line 3 is standard prompt_completion .* line 1 is conversational language_modeling"),
        ((PAIR, {"prompt": "a"}), r"line 2 is standard prompt_only .* line 1 is standard prompt_completion"),
        ((PAIR, {"prompt": "a", "completion": None}), r"line 2 is standard prompt_only"),
        ((PAIR, {"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]}), r"line 2 is conversational"),
        ((CHAT, {"messages": []}), r"line 2: column 'messages' is an empty list"),
        ((CHAT, {"messages": "Hi"}), r"line 2: column 'messages' is 'Hi'"),
        ((CHAT, {"messages": None}), r"line 2 is of no known type \(columns \[\]\)"),
        (({"text": "a"}, {"text": 5}), r"line 2: column 'text' is 5; write text"),
        ((CHAT, {"messages": [{"role": "asistant", "content": "x"}]}), r"line 2: .*message 0 .*mean 'assistant'"),
        ((CHAT, {"messages": [{"role": "user", "content": None}]}), r"line 2: .*message 0 \(user\) has no content"),
        ((CHAT, {**CHAT, "tools": "{"}), r"line 2: column 'tools' is '{', not valid JSON"),
    ],
)  # fmt: skip
def test_rows_that_mix_formats_or_are_not_whole_are_named(tmp_path, rows, message, streaming):
    with pytest.raises(DataError, match=rf"a\.jsonl', {message}"):
        read(lines(tmp_path / "a.jsonl", *rows), streaming)


def test_a_format_holds_over_all_files_of_a_split(tmp_path):
    lines(tmp_path / "a.jsonl", CHAT)
    lines(tmp_path / "b.jsonl", PAIR)
    for streaming in (False, True):
        with pytest.raises(DataError, match=r"b\.jsonl', line 1 is .*a\.jsonl', line 1 is"):
            read(str(tmp_path), streaming)


def test_the_check_can_be_turned_off(tmp_path):
    path = lines(tmp_path / "a.jsonl", {"prompt": [{"speaker": "me"}]}, {"prompt": 5, "completion": "b"})
    for streaming in (False, True):
        assert read(path, streaming, check=False)[1] == {"prompt": 5, "completion": "b"}
        assert len(list(mix({"path": path}, streaming=streaming, check_formats=False)["train"])) == 2


def test_rows_of_ones_own_columns_pass(tmp_path):
    path = lines(tmp_path / "a.jsonl", {"question": "a", "role": "x"}, {"question": 5})
    assert [row["question"] for row in read(path, False)] == ["a", 5]


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_tables_that_mix_formats_are_named(tmp_path, kind):
    rows = Dataset.from_dict({"prompt": ["a", "b"], "completion": ["x", None]})
    path = tmp_path / "a.parquet" if kind == "parquet" else tmp_path / "a"
    rows.to_parquet(path) if kind == "parquet" else rows.save_to_disk(path)
    with pytest.raises(DataError, match=r"row 1 is standard prompt_only and row 0 is standard prompt_completion"):
        load_source(str(path), split="train")


# Files that are not what they are called


def test_broken_tables_are_named(tmp_path):
    rows = Dataset.from_dict({"text": ["x", "y"]})
    rows.to_parquet(tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    (tmp_path / "c.arrow").write_bytes(b"no arrow")
    for name in ("b.parquet", "c.arrow"):
        with pytest.raises(DataError, match=rf"{name}' is no whole (parquet|arrow) file"):
            load_source(str(tmp_path / name), split="train")
    rows.save_to_disk(tmp_path / "saved")
    next((tmp_path / "saved").glob("*.arrow")).unlink()
    with pytest.raises(DataError, match="saved', written by save_to_disk, cannot be read"):
        load_source(str(tmp_path / "saved"), split="train")


def test_tables_of_different_columns_are_named(tmp_path):
    Dataset.from_dict({"text": ["x"]}).to_parquet(tmp_path / "a.parquet")
    Dataset.from_dict({"txt": ["x"]}).to_parquet(tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet' has the columns \['txt'\] .*a\.parquet"):
        load_source(str(tmp_path), split="train")


def test_tables_without_rows_are_named(tmp_path):
    Dataset.from_dict({"text": []}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(EmptyDataError, match=r"a\.parquet' holds no row"):
        load_source(str(tmp_path / "a.parquet"), split="train")


def test_arrow_files(tmp_path):
    Dataset.from_dict({"text": ["x", "y"]}).save_to_disk(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.arrow")
    for streaming in (False, True):
        assert [row["text"] for row in read(str(file), streaming)] == ["x", "y"]


def test_a_split_nobody_asked_for_is_not_read(tmp_path):
    write(tmp_path / "train.jsonl", "ab")
    (tmp_path / "test.jsonl").write_text("{")
    assert len(load_source(str(tmp_path), split="train")) == 2
    with pytest.raises(DataError, match=r"test\.jsonl', line 1"):
        load_source(str(tmp_path), split="test")


# Splits


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
@pytest.mark.parametrize("streaming", [False, True])
def test_parts_of_splits(tmp_path, kind, streaming):
    path = write(tmp_path / "a.jsonl", "abcdefghij")
    if kind != "jsonl":
        rows = load_source(path, split="train")
        path = str(tmp_path / "b.parquet") if kind == "parquet" else str(tmp_path / "b")
        rows.to_parquet(path) if kind == "parquet" else rows.save_to_disk(path)
    wanted = {
        "[:2]": "ab",
        "[2:4]": "cd",
        "[80%:]": "ij",
        "[-1:]": "j",
        "[:10%]": "a",
        "[5:99]": "fghij",
        "[:-8]": "ab",
    }
    for part, text in wanted.items():
        rows = load_source(path, split=f"train{part}", streaming=streaming)
        assert "".join(row["text"] for row in rows) == text, part
    with pytest.raises(EmptyDataError, match="holds no row"):
        load_source(path, split="train[4:4]", streaming=streaming)
    for part in ("[x:]", "[3]", "[:2", "[1:2]["):
        with pytest.raises(DataError, match="cannot be read; write it as"):
            load_source(path, split=f"train{part}", streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_splits_are_joined(tmp_path, streaming):
    write(tmp_path / "train.jsonl", "abc")
    write(tmp_path / "valid.jsonl", "xyz")
    rows = load_source(str(tmp_path), split="train[:2]+validation", streaming=streaming)
    assert "".join(row["text"] for row in rows) == "abxyz"
    half = mix({"path": str(tmp_path), "split": "train[:2] + validation", "fraction": 0.4}, streaming=streaming)
    assert "".join(row["text"] for row in half["train"]) == "ab"


# Columns


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_are_chosen_and_renamed(tmp_path, streaming):
    path = lines(tmp_path / "a.jsonl", {"q": "a", "a": "b", "n": 1}, {"q": "c", "a": "d", "n": 2})
    source = {"path": path, "rename_columns": {"q": "prompt", "a": "completion"}}
    rows = list(mix(source, streaming=streaming)["train"])
    assert rows[0] == {"prompt": "a", "completion": "b", "n": 1}
    rows = list(mix({**source, "columns": ["q", "a"]}, streaming=streaming)["train"])
    assert rows[1] == {"prompt": "c", "completion": "d"}
    with pytest.raises(DataError, match=r"no column 'qu', which `rename_columns` names"):
        mix({"path": path, "rename_columns": {"qu": "prompt"}}, streaming=streaming)
    with pytest.raises(ConfigError, match="makes two columns 'n'"):
        mix({"path": path, "rename_columns": {"q": "n"}}, streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_that_come_later_in_a_stream_are_kept(tmp_path, streaming):
    a = lines(tmp_path / "a.jsonl", *[{"text": "x"}] * 1500, {"text": "y", "late": {"k": [1]}})
    b = lines(tmp_path / "b.jsonl", {"text": "z", "late": {"k": [2]}})
    rows = list(mix({"path": a}, {"path": b}, streaming=streaming)["train"])
    assert [row["late"] for row in rows[-2:]] == [{"k": [1]}, {"k": [2]}]


def test_sources_are_brought_to_the_same_types(tmp_path):
    call = [{"function": {"name": "f", "arguments": {"x": 0.3}}}]
    a = lines(tmp_path / "a.jsonl", {**CHAT, "n": 1})
    b = lines(tmp_path / "b.jsonl", {"messages": [{"role": "assistant", "tool_calls": call}], "n": 0.5, "tools": "[]"})
    rows = list(mix({"path": a}, {"path": b})["train"])
    assert rows[1]["messages"][0]["tool_calls"] == call and [row["n"] for row in rows] == [1.0, 0.5]
    assert rows[0]["messages"][1]["content"] == "Yo" and [row["tools"] for row in rows] == [None, "[]"]
    c = lines(tmp_path / "c.jsonl", {**CHAT, "n": "many"})
    with pytest.raises(DataError, match=r"Column 'n' is string in .*c\.jsonl' and int64 in .*a\.jsonl"):
        mix({"path": a}, {"path": c})


@pytest.mark.parametrize("streaming", [False, True])
def test_sources_of_different_types_are_named(tmp_path, streaming):
    a = lines(tmp_path / "a.jsonl", PAIR)
    b = lines(tmp_path / "b.jsonl", {"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]})
    with pytest.raises(DataError, match=r"b\.jsonl'.*(conversational).*a\.jsonl' is standard prompt_completion"):
        mix({"path": a}, {"path": b}, streaming=streaming)


# Interleaving


def letters(tmp_path):
    a = write(tmp_path / "a.jsonl", [f"a{number}" for number in range(300)])
    return a, write(tmp_path / "b.jsonl", [f"b{number}" for number in range(30)])


@pytest.mark.parametrize("rule", ["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"])
def test_interleaving_follows_weights_rule_and_seed(tmp_path, rule, capsys):
    a, b = letters(tmp_path)
    sources = {"path": a, "weight": 3}, {"path": b, "weight": 1}
    options = {"mixing": "interleave", "stopping_strategy": rule}
    texts = list(mix(*sources, **options)["train"]["text"])
    said = capsys.readouterr().err
    assert [row["text"] for row in mix(*sources, **options, streaming=True)["train"]] == texts
    assert list(mix(*sources, **options)["train"]["text"]) == texts
    assert list(mix(*sources, **options, mixing_seed=1)["train"]["text"]) != texts
    of_a, of_b = ([text for text in texts if text[0] == letter] for letter in "ab")
    # Each source in its own order, and again from its start when it runs out.
    assert all(text == f"a{at % 300}" for at, text in enumerate(of_a))
    assert all(text == f"b{at % 30}" for at, text in enumerate(of_b))
    start = texts[:80]
    assert 45 <= sum(text[0] == "a" for text in start) <= 75  # 60 are expected, four standard deviations
    if rule == "first_exhausted":
        assert len(of_b) == 30 and len(of_a) < 300
        assert f"a.jsonl {len(of_a)} of 300 rows" in said and "b.jsonl 30 of 30 rows" in said
    elif rule == "all_exhausted":
        assert len(of_a) == 300 and len(of_b) > 30
        assert f"b.jsonl {len(of_b)} of 30 rows, {len(of_b) - 30} of them again" in said
    else:
        assert (len(of_a), len(of_b)) == (300, 30)


def test_a_mixed_stream_goes_on_from_its_state(tmp_path):
    a, b = letters(tmp_path)
    sources = {"path": a, "rename_columns": {"text": "t"}}, {"path": b, "rename_columns": {"text": "t"}}
    for options in ({}, {"mixing": "interleave"}):
        whole = [row["t"] for row in mix(*sources, **options, streaming=True)["train"]]
        stream = mix(*sources, **options, streaming=True)["train"]
        rows = iter(stream)
        begun = [next(rows)["t"] for _ in range(20)]
        state = json.loads(json.dumps(stream.state_dict()))
        again = mix(*sources, **options, streaming=True)["train"]
        again.load_state_dict(state)
        assert begun + [row["t"] for row in again] == whole


def test_fields_of_mixing(tmp_path):
    a, b = write(tmp_path / "a.jsonl", "ab"), write(tmp_path / "b.jsonl", "cd")
    with pytest.raises(ConfigError, match=r"`mixing` is 'interleaf'.*Did you mean 'interleave'"):
        mix({"path": a}, mixing="interleaf")
    with pytest.raises(ConfigError, match="`stopping_strategy` is 'never'"):
        mix({"path": a}, stopping_strategy="never")
    with pytest.raises(ConfigError, match=r"`weight` .* is -1"):
        mix({"path": a, "weight": -1}, mixing="interleave")
    with pytest.raises(ConfigError, match=r"`weight` .*`mixing` is concatenate"):
        mix({"path": a, "weight": 2}, {"path": b, "weight": 1})
    with pytest.raises(ConfigError, match=r"`weight` is set on some sources and not on .*b\.jsonl"):
        mix({"path": a, "weight": 2}, {"path": b}, mixing="interleave")
    with pytest.raises(ConfigError, match="repeats rows"):
        mix({"path": a}, {"path": b}, mixing="interleave", stopping_strategy="all_exhausted", test_split_size=0.5)


@pytest.mark.parametrize("streaming", [False, True])
def test_the_command_line_hands_on_every_field(tmp_path, streaming):
    a, b = letters(tmp_path)
    sources = [DatasetConfig(a, weight=1.0), DatasetConfig(b, weight=1.0)]
    mixture = DatasetMixtureConfig(sources, streaming=streaming, mixing="interleave", mixing_seed=3)
    train, _ = load_data(ScriptArguments(), mixture, wants_eval=False)
    assert [row["text"] for row in train] == [row["text"] for row in get_dataset(mixture)["train"]]


def test_files_that_are_no_data(tmp_path):
    write(tmp_path / "a.jsonl", "a")
    (tmp_path / ".b.jsonl").write_text("{")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "c.jsonl").write_text("{")
    assert len(load_source(str(tmp_path), split="train")) == 1
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 3\n"
    for name in ("d.parquet", "e.jsonl"):
        (tmp_path / name).write_text(pointer)
        with pytest.raises(DataError, match=rf"{name}' is a pointer of Git LFS"):
            load_source(str(tmp_path / name), split="train")


def test_data_files_of_any_place(tmp_path):
    path = write(tmp_path / "a.jsonl", "ab")
    (tmp_path / "empty").mkdir()
    assert len(load_source(str(tmp_path / "empty"), split="train", data_files=path)) == 2
    with pytest.raises(DataError, match=r"`data_files` is 'b.jsonl' and .* is one file"):
        load_source(path, split="train", data_files="b.jsonl")
