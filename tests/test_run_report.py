"""Where values come from, what a run leaves behind, that it is enough to run it again, and the page made from it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from data_fixtures import word_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model, token_rows

from posttrain import SFTConfig, SFTTrainer
from posttrain.cli.main import main
from posttrain.cli.origins import origins, take_switches
from posttrain.cli.parse import parse
from posttrain.cli.schema import stored
from posttrain.data.forest import build_forest
from posttrain.errors import ConfigError
from posttrain.report.run import page
from posttrain.report.runlog import read_run
from posttrain.trainer import meter
from posttrain.trainer.cost import ModelCost
from posttrain.trainer.masking import is_secret, masked, masked_command
from posttrain.trainer.meter import Meter, Speed
from posttrain.types import Row

SECRET = "hf_" + "a1" * 12
OPTIONS = stored("sft")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, rows and a file of fields."""
    folder = tmp_path_factory.mktemp("made")
    tokenizer = word_tokenizer(["a b c d e f g"])
    tiny_model().save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [{"text": " ".join("abcdefg"[(i * k) % 7] for k in range(2, 6 + i % 5))} for i in range(24)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (folder / "run.yaml").write_text(
        f"""model_name_or_path: {folder}/model
dataset_name: {folder}/train.jsonl
env:
  POSTTRAIN_TEST_NUMBER: 07
  POSTTRAIN_TEST_API_KEY: abc
output_dir: {folder}/out
learning_rate: 1e-3
gradient_accumulation_steps: 4
max_steps: 4
logging_steps: 1
save_strategy: "no"
hub_token: {SECRET}
report_to: none
""",
        encoding="utf-8",
    )
    return folder


@pytest.fixture(scope="module")
def trained(made: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("POSTTRAIN_TEST_NUMBER", raising=False)
        line = [
            "--gradient-accumulation-steps",
            "1",
            "--learning_rate=2e-3",
            "--no-bf16",
            "--lr_scheduler_kwargs",
            "{}",
        ]
        assert main(["sft", "--config", str(made / "run.yaml"), *line]) == 0
    return made / "out"


def sft(file: Path, *line: str) -> dict[str, Any]:
    values = parse(["--config", str(file), *line], OPTIONS)
    return {name: value for fields in values.values() for name, value in fields.items()}


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return file


# ---- the command line beats the file ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "name", "value"),
    [
        ("gradient_accumulation_steps: 4", "--gradient_accumulation_steps 1", "gradient_accumulation_steps", 1),  # C69
        ("gradient-accumulation-steps: 4", "--gradient-accumulation-steps=1", "gradient_accumulation_steps", 1),
        ("packing: true", "--no_packing", "packing", False),
        ("packing: true", "--no-packing", "packing", False),
        ("packing: true", "--packing false", "packing", False),
        ("gradient_checkpointing: false", "--activation_checkpointing", "activation_checkpointing", True),
        ("num_processes: 4", "--num-processes=2", "num_processes", 2),
        ("num_processes: 4", "--num_processes 2", "num_processes", 2),
        ("num-processes: 4", "--num-processes none", "num_processes", None),
        ("mixed_precision: fp16", "--bf16", "bf16", True),
        ("bf16: true", "--mixed_precision no", "mixed_precision", "no"),
        ("fp16: true", "--bf16", "bf16", True),
        ("max_steps: 9", "--num_train_epochs 2", "num_train_epochs", 2.0),
        ("lr_scheduler_kwargs: {a: 1, b: {c: 2}}", "--lr_scheduler_kwargs.b.c=3", "lr_scheduler_kwargs",
         {"a": 1, "b": {"c": 3}}),
        ("lr-scheduler-kwargs: {}", "--lr-scheduler-kwargs.x-y 1e-3", "lr_scheduler_kwargs", {"x-y": 0.001}),
        ("lr_scheduler_kwargs: {a: 1}", "--lr_scheduler_kwargs {\"b\":2}", "lr_scheduler_kwargs", {"b": 2}),
    ],
)  # fmt: skip
def test_command_line_beats_file(tmp_path: Path, text: str, line: str, name: str, value: Any):
    found = sft(write(tmp_path, f"{text}\noutput_dir: out"), *line.split(" "))
    assert found[name] == value
    key = text.partition(":")[0].replace("-", "_")
    assert key == name or key not in found or name == "num_train_epochs"


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from("-_"), st.sampled_from("= "), st.sampled_from("-_"))
@settings(max_examples=30, deadline=None)
def test_every_spelling_means_the_same(tmp_path_factory, of_file, of_line, dash, equals, file_dash):
    names = ("gradient_accumulation_steps", "num_processes", "num_machines", "max_length", "save_total_limit")
    file = write(tmp_path_factory.mktemp("s"), "\n".join(f"{n.replace('_', file_dash)}: {of_file}" for n in names))
    line = [part for n in names for part in f"--{n.replace('_', dash)}{equals}{of_line + 1}".split(" ")]
    found = sft(file, *line)
    assert {found[n] for n in names} == {of_line + 1}


def test_refused(tmp_path: Path):
    for text, line, message in (
        ("max-length: 4\nmax_length: 5", [], "'max_length' comes twice"),
        ("dry_run: true", [], "belongs on the command line: write --dry_run"),
        ("max_length: 4", ["--max_length.a", "1"], "is no mapping"),
        ("max_length: 4", ["--lr_scheduler_kwargs..a=1"], "a key is empty"),
        ("max_lenght: 4", [], "Did you mean 'max_length'?"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            sft(write(tmp_path, text), *line)


# ---- origins ---------------------------------------------------------------------------------------------------------


def test_origins(tmp_path: Path):
    preset = tmp_path / "two.yaml"
    preset.write_text("distributed_type: MULTI_CPU\nnum_processes: 4\nnum_machines: 1\n", encoding="utf-8")
    text = f"output_dir: out\n\nmax_steps: 9\nlr_scheduler_kwargs:\n  a: 1\naccelerate_config: {preset}\n"
    file = write(tmp_path, text)
    args = ["--config", str(file), "--num_train_epochs", "2", "--lr_scheduler_kwargs.b=1", "--num_processes=2"]
    found = {each.name: each for each in origins(args, OPTIONS, parse(args, OPTIONS))}
    assert found["output_dir"].origin == f"{file}:1"
    assert found["num_train_epochs"].origin == "command line"
    assert (
        found["max_steps"].origin == (f"default; {file}:3 gives way to --num_train_epochs of the command line")
        and found["max_steps"].value == -1
    )
    assert found["lr_scheduler_kwargs"].origin == f"{file}:4, and command line (b)"
    assert found["num_machines"].origin == "accelerate configuration two.yaml"
    assert found["num_processes"].value == 2 and found["num_processes"].origin == "command line"
    assert found["weight_decay"].origin == "default"


def test_show_config_as_data_hides_secrets(made: Path, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    assert main(["sft", "--config", str(made / "run.yaml"), "--show-config=json", "--packing"]) == 0
    out = capsys.readouterr().out
    assert SECRET not in out and "abc" not in json.loads(out)["environment"][1]["value"]
    found = json.loads(out)
    fields = {each["name"]: each for each in found["fields"]}
    assert fields["packing"] == {"name": "packing", "value": True, "origin": "command line", "class": "SFTConfig"}
    assert fields["hub_token"]["value"] == "***"
    assert found["environment"][0]["value"] == "07"
    assert main(["sft", "--config", str(made / "run.yaml"), "--show_config"]) == 0
    assert f"{made}/run.yaml:8" in capsys.readouterr().out


def test_switches():
    assert take_switches(["--a", "1", "--dry-run", "--show_config", "all"])[1].show == "all"
    assert take_switches(["--a", "1", "--dry_run"]) == (["--a", "1"], take_switches(["--dry_run=true"])[1])
    assert not take_switches(["--dry_run", "--no-dry-run"])[1].dry_run
    with pytest.raises(ConfigError, match="--show_config is 'x'"):
        take_switches(["--show_config", "x"])


def test_secrets():
    assert all(map(is_secret, ("hub_token", "HF_TOKEN", "WANDB_API_KEY", "token", "AWS_SECRET_ACCESS_KEY")))
    assert not any(map(is_secret, ("pad_token", "eos_token", "max_tokens_per_forward", "TOKENIZERS_PARALLELISM")))
    assert masked({"token": "x", "a": [SECRET, "https://me:pw@host/x"]}) == {
        "token": "***", "a": ["***", "https://me:***@host/x"]
    }  # fmt: skip
    assert masked_command(["--hub_token", "x", "--hub-token=y", "--a", "1"]) == [
        "--hub_token", "***", "--hub-token=***", "--a", "1"
    ]  # fmt: skip


# ---- a dry run -------------------------------------------------------------------------------------------------------


def test_dry_run_writes_nothing(made: Path, capsys):
    there = sorted(made.rglob("*"))
    line = ["sft", "--config", str(made / "run.yaml"), "--output_dir", str(made / "dry"), "--dry_run"]
    assert main([*line, "--num_processes", "2"]) == 0
    assert "4 steps, from the start" in capsys.readouterr().out
    assert sorted(made.rglob("*")) == there
    for extra in (
        ["--dataset_name", f"{made}/none"],
        ["--model_name_or_path", f"{made}/none"],
        ["--num_processes", "0"],
    ):
        assert main([*line, *extra]) == 2


# ---- the record ------------------------------------------------------------------------------------------------------


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_record_alone_reproduces_the_run(made: Path, trained: Path, monkeypatch):
    again = made / "again"
    text = (trained / "resolved_config.yaml").read_text(encoding="utf-8")
    assert "learning_rate: 0.002  # command line" in text and f"{made}/run.yaml:11" in text
    assert main(["sft", "--config", str(trained / "resolved_config.yaml"), "--output_dir", str(again)]) == 0
    assert weights(again) == weights(trained) != weights(made / "model")
    log = [list(map(json.loads, (f / "log.jsonl").read_text("utf-8").splitlines())) for f in (trained, again)]
    losses = [[line["loss"] for line in lines if "loss" in line] for lines in log]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    marks = [json.loads((f / "environment.json").read_text())["data"]["fingerprint"] for f in (trained, again)]
    assert marks[0] == marks[1]


def test_record_has_no_secrets(trained: Path):
    for file in trained.iterdir():
        if file.suffix in (".yaml", ".json", ".jsonl"):
            assert SECRET not in file.read_text(encoding="utf-8"), file
    config = (trained / "resolved_config.yaml").read_text(encoding="utf-8")
    assert 'POSTTRAIN_TEST_NUMBER: "07"' in config and "abc" not in config
    facts = json.loads((trained / "environment.json").read_text(encoding="utf-8"))
    assert facts["versions"]["torch"] and facts["seeds"]["seed"] == 42 and facts["data"]["train"]["rows_in"] == 24


def test_python_runs_are_recorded_too(tmp_path: Path):
    args = SFTConfig(str(tmp_path), max_steps=2, logging_steps=1, learning_rate=1e-3, hub_token=SECRET,
                     report_to="none", bf16=False, save_strategy="no", disable_tqdm=True)  # fmt: skip
    trainer = SFTTrainer(tiny_model(), args, train_dataset=token_rows(), processing_class=word_tokenizer(["a"]))
    trainer.train()
    text = (tmp_path / "resolved_config.yaml").read_text(encoding="utf-8")
    assert "learning_rate: 0.001" in text and SECRET not in text and "hub_token: left out" in text
    run = read_run(tmp_path)
    assert run.state == "finished" and len(run.series("loss")[0]) == 2 and run.series("peak_memory_mib")[1][0] > 0


def test_a_record_that_cannot_be_written_stops_nothing(tmp_path: Path, capsys):
    (tmp_path / "log.jsonl").mkdir()
    args = SFTConfig(str(tmp_path), max_steps=1, report_to="none", bf16=False, save_strategy="no", disable_tqdm=True)
    trainer = SFTTrainer(tiny_model(), args, train_dataset=token_rows(), processing_class=word_tokenizer(["a"]))
    trainer.train()
    assert capsys.readouterr().err.count("training goes on") == 1


# ---- what a step costs -----------------------------------------------------------------------------------------------


def test_operations_by_hand():
    model = tiny_model(tie_word_embeddings=False)
    looked_up = model.get_input_embeddings().weight.numel()
    weights = sum(p.numel() for p in model.parameters()) - looked_up
    batch = build_forest([Row([5, 6, 7], [0.0, 1.0, 1.0])])
    # 2 layers, 4 heads of 8; token 1 sees 1, token 2 two, token 3 three.
    assert ModelCost(model).of([batch]) == 6 * weights * 3 + 12 * 4 * 8 * 2 * (1 + 2 + 3)
    model.requires_grad_(False)
    assert ModelCost(model).of([batch]) == 4 * weights * 3 + 12 * 4 * 8 * 2 * 6


def test_a_sliding_window_bounds_what_a_token_sees():
    cost = ModelCost(tiny_model("gemma3"))  # one layer slides, over 8
    batch = build_forest([Row(list(range(3, 13)), [1.0] * 10)])
    assert (cost.full, cost.sliding) == (1, 1)
    attention = cost.of([batch]) - cost.per_token * 10
    assert attention == 12 * 4 * 8 * (sum(range(1, 11)) + sum(range(1, 9)) + 2 * 8)


def test_speed(monkeypatch):
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(meter, "time", clock)
    speed = Speed(peak=100e12)
    speed.run(0)
    speed.run(1000, 20e12)
    clock.now = 2.0
    assert speed.drain() == {"tokens_per_second": 500.0, "tflops": 10.0, "mfu": 0.1}
    clock.now = 9.0  # stands still: an evaluation
    speed.run(10, 0.0)
    clock.now = 10.0
    assert speed.drain()["tokens_per_second"] == 10.0
    assert "mfu" not in Speed().drain()


def test_peaks_are_the_largest_of_all_ranks(monkeypatch):
    monkeypatch.setattr(meter, "gather_objects", lambda value: [value, ({}, {"m": 5.0}), ({}, {"m": 1.0})])
    assert Meter().drain({"m": 3.0}) == {"m": 5.0}


# ---- the page --------------------------------------------------------------------------------------------------------


def log(folder: Path, *lines: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    return folder


def test_a_resumed_log_takes_back_what_came_after(tmp_path: Path):
    folder = log(
        tmp_path, {"event": "started", "step": 0}, {"loss": 9.0, "step": 1}, {"event": "started", "step": 0},
        {"loss": 3.0, "step": 1}, {"loss": 2.0, "step": 2}, {"event": "resumed", "step": 1}, {"loss": 1.0, "step": 2},
    )  # fmt: skip
    with open(folder / "log.jsonl", "a", encoding="utf-8") as file:
        file.write('{"loss": 0.')
    run = read_run(folder)
    assert run.series("loss") == ([1.0, 2.0], [3.0, 1.0]) and run.unread == 1 and run.state == "unfinished"
    assert [event["event"] for event in run.events] == ["started", "resumed"]


def test_reads_a_folder_of_transformers(tmp_path: Path):
    for step in (9, 10):
        state = {"log_history": [{"loss": float(step), "step": step}, {"event": "out_of_memory", "step": 3}]}
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")
    assert read_run(tmp_path).series("loss") == ([10.0], [10.0])
    assert read_run(tmp_path / "checkpoint-9").events[0]["event"] == "out_of_memory"
    with pytest.raises(ConfigError, match=r"holds no log\.jsonl"):
        (tmp_path / "empty").mkdir()
        read_run(tmp_path / "empty")


def test_report_of_two_runs(made: Path, trained: Path, tmp_path: Path, capsys):
    other = log(tmp_path / "</script><b>", {"event": "started", "step": 0, "max_steps": 4},
                {"loss": 4.0, "step": 1}, {"loss": float("nan"), "step": 2},
                {"event": "out_of_memory", "step": 2})  # fmt: skip
    (other / "resolved_config.yaml").write_text("learning_rate: 0.5  # x\n", encoding="utf-8")
    (other / "completions.jsonl").write_text(
        "\n".join(json.dumps({"step": s, "prompt": "p", "completion": f"<i>{s}"}) for s in (1, 2)), encoding="utf-8"
    )
    out = tmp_path / "page.html"
    assert main(["report", str(trained), str(other), "--html", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", text, re.S)
    assert script and text.count("<script") == 1
    mark = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src &#39;sha256-{mark}&#39;" in text  # else the browser would not run it
    assert "out of memory" in text and "&lt;i&gt;1" in text and ">0.5<" in text and "unfinished" in text
    assert not re.search(r'(src|href)="(?!#)', text)
    assert main(["report", str(tmp_path / "no")]) == 2
    assert main(["report", str(trained), "--htm", "x"]) == 2
    assert "unknown flag --htm" in capsys.readouterr().err


def test_one_run_without_evaluation(trained: Path):
    text = page([read_run(trained)])
    assert "Samples" not in text and "What differs" not in text and "Learning rate" in text


def test_trackers_get_the_metrics(tmp_path: Path):
    from transformers import TrainerCallback
    from transformers.integrations import integration_utils

    seen: list[dict[str, Any]] = []

    class Tracker(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            seen.append(dict(logs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tensorboard", Tracker)
        args = SFTConfig(str(tmp_path), max_steps=1, logging_steps=1, report_to="tensorboard", bf16=False,
                         save_strategy="no", disable_tqdm=True)  # fmt: skip
        SFTTrainer(tiny_model(), args, train_dataset=token_rows(), processing_class=word_tokenizer(["a"])).train()
    assert {"loss", "tokens_per_second", "tflops", "peak_memory_mib"} <= set(seen[0])
    assert torch.tensor(seen[0]["tflops"]) > 0
