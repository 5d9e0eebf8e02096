"""A stream is read as far as it is needed, and goes on where it was: for any source, packed, shuffled, over ranks."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from data_fixtures import byte_tokenizer
from datasets import Dataset, IterableDataset, concatenate_datasets, interleave_datasets, load_dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from laws.mutants import applied
from laws.runs import Run, bit_equal, run, scratch, sft
from peft import LoraConfig
from pool import POOL
from tiny import token_rows

from posttrain.data.config import DatasetConfig, DatasetMixtureConfig
from posttrain.data.mixture import get_dataset
from posttrain.data.origin import fingerprint
from posttrain.data.stream import RowReader, StreamItems, must_count
from posttrain.errors import ConfigError, EmptyDataError
from posttrain.trainer.resuming import _packed, _unpacked

ROWS = [{"input_ids": [i] * (3 + i % 5), "weights": [1.0] * (3 + i % 5), "source": i} for i in range(60)]


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for part in range(3):
        rows = ROWS[part * 20 : part * 20 + 20]
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        Dataset.from_list(rows).to_parquet(folder / f"{part}.parquet")
    return folder


def made() -> Iterator[dict[str, Any]]:
    yield from ROWS


def from_files(folder: Path, kind: str = "json", ending: str = "jsonl") -> IterableDataset:
    return load_dataset(kind, data_files=sorted(map(str, folder.glob(f"*.{ending}"))), split="train", streaming=True)


def renumber(batch: dict[str, Any], index: list[int]) -> dict[str, Any]:
    return {**batch, "source": index}


SOURCES: dict[str, Callable[[Path], IterableDataset]] = {
    "memory": lambda folder: Dataset.from_list(ROWS).to_iterable_dataset(num_shards=3),
    "jsonl": from_files,
    "parquet": lambda folder: from_files(folder, "parquet", "parquet"),
    "generator": lambda folder: IterableDataset.from_generator(made),
    "interleaved": lambda folder: interleave_datasets(
        [from_files(folder), IterableDataset.from_generator(made)], probabilities=[0.3, 0.7], seed=1
    ),
    "concatenated": lambda folder: concatenate_datasets([from_files(folder), IterableDataset.from_generator(made)]),
    "shuffled by datasets": lambda folder: from_files(folder).shuffle(seed=3, buffer_size=16),
    "mapped, filtered, cut": lambda folder: (
        from_files(folder)
        .map(renumber, batched=True, batch_size=8, with_indices=True)
        .filter(lambda row: row["source"] % 3)
        .skip(2)
        .take(30)
    ),
}


def sources(batches: Iterator[Any], count: int) -> list[list[int]]:
    return [[source for item in next(batches) for _, source in item] for _ in range(count)]


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("capacity", [None, 12])
@pytest.mark.parametrize("name", SOURCES)
def test_any_source_goes_on_where_it_was(name, capacity, window, files):
    """Within a pass, at its end and in later passes; and again from a run that was resumed itself."""

    def build() -> StreamItems:
        return StreamItems(SOURCES[name](files), 2, 1, 0, capacity, buffer=10, shuffle_window=window, seed=5)

    whole = sources(iter(build()), 50)
    for stop in (1, 5, 14, 15, 29, 30, 31):
        items = build()
        next(iter(items.rows))  # as preparing and comparing look at the first row
        reading = iter(items)
        sources(reading, stop)
        cursor = _unpacked(_packed(items.state_dict()))
        sources(reading, 2)  # reading on does not move a cursor that was taken
        items = build()
        items.load_state_dict(cursor, stop)
        reading = iter(items)
        assert sources(reading, stop) == [[]] * stop  # for the base class to skip
        assert sources(reading, 3) == whole[stop : stop + 3]
        again = build()
        again.load_state_dict(items.state_dict(), 0)
        assert sources(iter(again), 10) == whole[stop + 3 : stop + 13], stop


def test_only_a_shuffle_of_datasets_is_read_again(files):
    assert {name for name, make in SOURCES.items() if must_count(make(files))} == {"shuffled by datasets"}


def test_a_resumed_stream_does_not_read_again(files):
    """Rows of files that were used are not even parsed."""
    parsed: list[int] = []

    def note(row: dict[str, Any]) -> dict[str, Any]:
        parsed.append(row["source"])
        return row

    items = StreamItems(from_files(files).map(note), 1, 1, 0)
    sources(iter(items), 41)
    cursor = items.state_dict()
    parsed.clear()
    items = StreamItems(from_files(files).map(note), 1, 1, 0)
    items.load_state_dict(cursor, 0)
    assert sources(iter(items), 2) == [[41], [42]]
    assert min(parsed) >= 40
    assert len(parsed) < 20


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_a_window_loses_and_repeats_no_row_and_looks_no_further(count, window, seed):
    stream = Dataset.from_list(ROWS[:count]).to_iterable_dataset()
    reader = RowReader(stream, lambda row: (row, row["source"]), window, seed)
    found = []
    for _, source in reader:
        found.append(source)
        assert reader.read - len(found) < window
        assert source < len(found) + window  # drawn from the rows read so far
    assert sorted(found) == list(range(count))
    reader.start(1)
    again = [source for _, source in reader]
    assert sorted(again) == list(range(count))
    if count > 8 and window > 4:
        assert found != again != list(range(count))


# ---- in training -----------------------------------------------------------------------------------------------------

FIELDS: dict[str, Any] = {
    "max_steps": 6,
    "gradient_accumulation_steps": 2,
    "optim": "adamw_torch",
    "learning_rate": 1e-2,
    "save_strategy": "steps",
    "save_steps": 1,
}


def streamed(resume: str | None = None, mutant: str | None = None, dropout: float = 0.3, **fields: Any) -> Run:
    """12 rows as a stream, 4 a step unpacked, so that the second pass begins in step 4."""
    config = LoraConfig(r=4, lora_dropout=dropout, target_modules=["q_proj", "down_proj"])
    rows = token_rows().to_iterable_dataset(num_shards=2)
    with applied(mutant):
        return run(sft(rows=rows, peft_config=config, shuffle_buffer_size=5, **FIELDS | fields), resume=resume)


@pytest.mark.parametrize("stop", [1, 3, 4])
@pytest.mark.parametrize("packing", [False, True])
def test_a_stream_trains_on_to_the_same_bits(packing, stop):
    """Shuffled in a window, packed or not, with accumulation and dropout; within a pass, at its end, in the second."""
    folder = scratch()
    fields = {"packing": packing, "shuffle_dataset": True, "per_device_train_batch_size": 1 if packing else 2}
    whole = streamed(output_dir=folder, **fields)
    rest = streamed(f"{folder}/checkpoint-{stop}", output_dir=scratch(), **fields)
    bit_equal(whole, rest)


def test_a_stream_without_its_cursor_is_read_again(capsys):
    """As checkpoints of other programs have it."""
    folder = scratch()
    whole = streamed(output_dir=folder)
    checkpoint = Path(folder) / "checkpoint-3"
    for name in ("stream.pt", "manifest.json"):
        (checkpoint / name).unlink()
    bit_equal(whole, streamed(str(checkpoint), output_dir=scratch()))
    assert "has no cursor: the stream is read again up to step 3" in capsys.readouterr().err


def test_two_ranks_go_on_alike_and_one_takes_their_rows():
    """Two resumed by two: the same bits, dropout on. By one, without dropout: the same windows, so the same losses."""
    folder = scratch()
    fields = {"per_device_train_batch_size": 1, "shuffle_dataset": True}
    for dropout in (0.3, 0.0):
        where = f"{folder}/{dropout}"
        whole, other = POOL.run(streamed, output_dir=where, dropout=dropout, **fields)
        bit_equal(whole, other)
        rest, _ = POOL.run(streamed, resume=f"{where}/checkpoint-4", output_dir=scratch(), dropout=dropout, **fields)
        bit_equal(whole, rest)
    one = streamed(
        f"{folder}/0.0/checkpoint-4",
        output_dir=scratch(),
        dropout=0.0,
        **fields | {"per_device_train_batch_size": 2},
    )
    assert one.losses == pytest.approx(whole.losses, rel=1e-5)


def test_ranks_split_the_rows_of_a_stream():
    """None lost, none read twice; and together they are what one rank reads."""
    stream = Dataset.from_list(ROWS).to_iterable_dataset
    one = sources(iter(StreamItems(stream(), 4, 1, 0)), 15)
    first, second = (sources(iter(StreamItems(stream(), 2, 2, rank)), 15) for rank in (0, 1))
    assert [a + b for a, b in zip(first, second, strict=True)] == one
    assert sorted(itertools.chain.from_iterable(one)) == list(range(60))


@pytest.mark.parametrize("shuffle", [0, 50])
@pytest.mark.parametrize("packing", [False, True])
def test_c24_rows_are_pulled_as_they_are_needed(packing, shuffle):
    """C24, counted: what 3 steps use, and at most a batch of preparation, the window, and a buffer to pack."""
    pulled = []

    def make() -> Iterator[dict[str, Any]]:
        for index in range(5000):
            pulled.append(index)
            yield {"input_ids": [3 + index % 200] * 8, "extra": f"row {index}"}

    rows = IterableDataset.from_generator(make)
    fields: dict[str, Any] = {"shuffle_dataset": shuffle > 0, "shuffle_buffer_size": shuffle or 1}
    run(sft(rows=rows, packing=packing, max_steps=3, **fields))
    used = 1024 if packing else 6
    assert len(pulled) <= used + shuffle + 2 * 128 + 2


def test_what_a_window_holds_is_saved_as_it_is():
    stream = Dataset.from_list(ROWS).to_iterable_dataset()
    items = StreamItems(stream, 1, 1, 0, shuffle_window=9)
    sources(iter(items), 4)
    cursor = items.state_dict()
    assert len(cursor["place"]["held"]) == 8
    file = Path(scratch()) / "cursor.pt"
    torch.save(_packed(cursor), file)
    assert _unpacked(torch.load(file, weights_only=True)) == cursor


@pytest.mark.parametrize("forgotten", ["held", "draw", "used", "stream"])
def test_mutants_whose_cursor_forgets_something_are_caught(forgotten, files, monkeypatch):
    own, fresh = (
        StreamItems.state_dict,
        StreamItems(from_files(files), 1, 1, 0, 12, buffer=10, shuffle_window=7, seed=5),
    )
    sources(iter(fresh), 1)
    begun = fresh.state_dict()

    def state_dict(self: StreamItems) -> dict[str, Any]:
        state = own(self)
        if forgotten == "used":
            return {**state, "used": 0}
        first = [] if forgotten == "held" else begun["place"][forgotten]
        return {**state, "place": {**state["place"], forgotten: first}}

    monkeypatch.setattr(StreamItems, "state_dict", state_dict)
    with pytest.raises(AssertionError):
        test_any_source_goes_on_where_it_was("jsonl", 12, 7, files)


# ---- a stream that changed since


TEXTS = [f"{'long ' * (i % 3)}row {i} of a set" for i in range(90)]


def mixed(folder: Path, **changes: Any) -> Any:
    """Two local files, interleaved by weight. changes: fields of the mixture, `weights`, or `texts` of the second."""
    for name, texts in (("a", TEXTS), ("b", changes.pop("texts", TEXTS[::-1]))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pair = zip("ab", changes.pop("weights", (1.0, 2.0)), strict=True)
    parts = [DatasetConfig(path=str(folder / f"{name}.jsonl"), weight=weight) for name, weight in pair]
    return get_dataset(DatasetMixtureConfig(parts, streaming=True, mixing="interleave", **changes))["train"]


def of_texts(rows: Any, resume: str | None = None, template: str | None = None, **fields: Any) -> Run:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    fields = FIELDS | {"max_length": 24} | fields
    return run(sft(rows=rows, tokenizer=tokenizer, **fields), resume=resume)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"mixing_seed": 1}, "mixing_seed: 0 there, 1 here"),
        ({"weights": (2.0, 1.0)}, "source 1, weight: 1.0 there, 2.0 here"),
        ({"stopping_strategy": "all_exhausted"}, "stopping_strategy: 'first_exhausted' there, 'all_exhausted' here"),
        ({"texts": [*TEXTS[::-1][:-1], "another text"]}, "source 2, files: "),
        ({"fields": {"max_length": 20}}, "max_length: 24 there, 20 here"),
        ({"fields": {"overflow": "drop"}}, "overflow: 'truncate' there, 'drop' here"),
        ({"fields": {"truncation_mode": "keep_end"}}, "truncation_mode: 'keep_start' there, 'keep_end' here"),
        ({"fields": {"template": "{{ messages }}"}}, "chat template: "),
    ],
    ids=lambda value: next(iter(value.get("fields", value))) if isinstance(value, dict) else "",
)
def test_going_on_with_another_stream_is_refused(changed, named, tmp_path):
    folder = scratch()
    of_texts(mixed(tmp_path), output_dir=folder)
    fields = changed.pop("fields", {})
    with pytest.raises(ConfigError, match=re.escape(named)):
        of_texts(mixed(tmp_path, **changed), f"{folder}/checkpoint-1", output_dir=scratch(), **fields)


def test_files_that_moved_are_the_same_stream(tmp_path):
    folder = scratch()
    (tmp_path / "new").mkdir()
    whole = of_texts(mixed(tmp_path), output_dir=folder)
    bit_equal(whole, of_texts(mixed(tmp_path / "new"), f"{folder}/checkpoint-1", output_dir=scratch()))


def test_a_large_file_is_hashed_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("posttrain.data.origin._WHOLE", 40)
    monkeypatch.setattr("posttrain.data.origin._PART", 10)
    file = tmp_path / "rows.jsonl"
    file.write_bytes(bytes(200))
    first = fingerprint([file])
    for place, seen in ((0, True), (199, True), (65, True), (50, False)):
        data = bytearray(200)
        data[place] = 1
        file.write_bytes(data)
        assert (fingerprint([file]) != first) == seen, place
    file.write_bytes(bytes(201))
    assert fingerprint([file]) != first


def test_c75_a_row_that_is_dropped_moves_the_cursor_on():
    """Row 2 has nothing to train. Saved after row 9 was taken, the run goes on at row 10."""
    rows = [{"input_ids": [i + 1] * 4, "labels": [-100 if i == 2 else i + 1] * 4} for i in range(24)]
    used: dict[str, list[list[int]]] = {"whole": [], "rest": []}

    def build(name: str, folder: str, **fields: Any) -> Run:
        trainer = sft(
            rows=Dataset.from_list(rows).to_iterable_dataset(), output_dir=folder, skip_self_checks=["all"],
            per_device_train_batch_size=3, **{**FIELDS, "gradient_accumulation_steps": 1} | fields,
        )  # fmt: skip
        make = trainer.experience
        trainer.experience = lambda window: used[name].extend(list(b.source) for b in window) or make(window)
        return run(trainer, resume=fields.get("resume_from_checkpoint"))

    folder = scratch()
    whole = build("whole", folder)
    assert used["whole"][:4] == [[0, 1, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]
    rest = build("rest", scratch(), resume_from_checkpoint=f"{folder}/checkpoint-3")
    assert [each for each in used["rest"] if each] == used["whole"][3:]
    bit_equal(whole, rest)


def test_a_part_that_begins_after_the_end_of_a_stream(files):
    with pytest.raises(EmptyDataError, match="the stream ends before row 1000"):
        get_dataset(DatasetMixtureConfig([DatasetConfig(str(files / "0.jsonl"), split="train[1000:]")], streaming=True))


def test_a_window_without_a_stream_is_said(capsys):
    sft(shuffle_buffer_size=7)
    assert "`shuffle_buffer_size` 7 is not used" in capsys.readouterr().err
