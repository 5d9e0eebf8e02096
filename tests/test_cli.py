"""The `posttrain` command: what it imports, what it refuses, and what it hands to the trainer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from data_fixtures import CHATML, byte_tokenizer
from laws.mutants import applied
from tiny import tiny_model

from posttrain import __version__
from posttrain.cli import env, run
from posttrain.cli.commands import COMMANDS
from posttrain.cli.main import main
from posttrain.errors import ConfigError

LIGHT = """
import sys
from posttrain.cli.main import main
code = main({args!r})
heavy = [name for name in ("torch", "transformers", "datasets", "peft", "accelerate", "rich") if name in sys.modules]
assert not heavy, heavy
sys.exit(code)
"""


def light(*args: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a fresh process, and fail if it imported anything heavy."""
    code = LIGHT.format(args=list(args))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "AssertionError" not in done.stderr, done.stderr
    return done


@pytest.fixture
def data(tmp_path: Path) -> str:
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(json.dumps({"text": f"row {i}"}) for i in range(10)), encoding="utf-8")
    return str(file)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A trainer that records what it was given."""
    made: list[Any] = []

    class Recorder:
        def __init__(self, **kwargs: Any) -> None:
            self.kwargs, self.args, self.model = kwargs, kwargs["args"], SimpleNamespace()
            made.append(self)

        def train(self, resume_from_checkpoint: str | None = None) -> None:
            self.resumed = resume_from_checkpoint

        def save_model(self, output_dir: str) -> None:
            self.saved = output_dir

    import posttrain.trainer.sft

    monkeypatch.setattr(posttrain.trainer.sft, "SFTTrainer", Recorder, raising=False)
    return made


def sft(tmp_path: Path, *args: str) -> int:
    return main(["sft", "--model_name_or_path", "m", "--output_dir", str(tmp_path / "out"), *args])


def error(capsys: pytest.CaptureFixture[str]) -> str:
    """The last line of stderr: above it there may be what `datasets` shows while it reads."""
    *before, text = capsys.readouterr().err.splitlines()
    assert text.startswith("posttrain: error: ") and "Traceback" not in "".join(before)
    return text


# Without the heavy imports


def test_help_is_light():
    done = light("sft", "--help")
    assert done.returncode == 0
    assert "--max_length" in done.stdout and "SFTConfig" in done.stdout and "TrainingArguments" in done.stdout
    # The command's own fields come before those it inherits.
    assert done.stdout.index("--packing ") < done.stdout.index("--layout ") < done.stdout.index("--weight_decay ")


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"]])
def test_overview(args: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "sft" in out and "env" in out


def test_version(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"posttrain {__version__}\n"


def test_errors_of_the_command_line_are_light(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("learning_rat: 1", encoding="utf-8")
    for args, message in (
        (["sft", "--learning_rat", "1"], "unknown flag --learning_rat. Did you mean '--learning_rate'?"),
        (["sft", "--config", str(file)], "unknown key 'learning_rat'. Did you mean 'learning_rate'?"),
        (["sft", "--dataset_name", "x"], "`model_name_or_path` is not set"),
    ):
        done = light(*args)
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_help_width(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["sft", "--help"]) == 0
    long = [line for line in capsys.readouterr().out.splitlines() if len(line) > 80 and " " in line.strip()]
    assert not long


# Refused before any work


def test_unknown_command(capsys: pytest.CaptureFixture[str]):
    assert main(["stf"]) == 2
    names = ", ".join([*COMMANDS, "env", "report"])
    assert f"unknown command 'stf'; the commands are {names}. Did you mean 'sft'?" in error(capsys)


def test_traceback_on_request(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("POSTTRAIN_TRACEBACK", "1")
    with pytest.raises(ConfigError):
        main(["stf"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "no data: set `dataset_name`, or `datasets:`"),
        (["--dataset_name", "d", "--datasets", "[{path: a}]"], "`dataset_name` ('d') and `datasets` are both set"),
        (["--datasets", "[{path: a}]", "--dataset_config", "c"], "`dataset_config` belongs to `dataset_name`"),
        (["--dataset_name", "d", "--dataset_streaming"], "set `max_steps`"),
        (["--dataset_name", "d", "--test_split_size", "2"], "`test_split_size` is 2.0"),
        (["--dataset_name", "d", "--lora_r", "8"], "`lora_r` is set but `use_peft` is not"),
        (["--dataset_name", "d", "--load_in_4bit"], "`load_in_4bit` is on, and quantized weights cannot be trained"),
        (["--dataset_name", "d", "--resume_from_checkpoint", "true"], "holds no checkpoint"),
        (["--dataset_name", "d", "--resume_from_checkpoint", "/no/such"], "'/no/such'; no checkpoint is there"),
    ],
)
def test_refused(tmp_path: Path, args: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert sft(tmp_path, *args) == 2
    assert message in error(capsys)


def test_error_of_another_rank_says_which(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("RANK", "3")
    assert main(["stf"]) == 2
    assert error(capsys).startswith("posttrain: error: [rank 3] ")
    run.say("once")
    assert capsys.readouterr().out == ""


# What the trainer is given


def test_sft_hands_over_what_was_asked(
    tmp_path: Path, data: str, trained: list[Any], capsys: pytest.CaptureFixture[str]
):
    args = ["--dataset_name", data, "--dtype", "float32", "--model_revision", "r", "--trust_remote_code"]
    assert sft(tmp_path, *args, "--model_init_kwargs", '{"revision": "mine"}', "--packing") == 0
    (trainer,) = trained
    assert trainer.kwargs["model"] == "m" and trainer.args.packing
    assert trainer.args.model_init_kwargs == {"revision": "mine", "dtype": "float32", "trust_remote_code": True}
    assert len(trainer.kwargs["train_dataset"]) == 10 and trainer.kwargs["eval_dataset"] is None
    assert trainer.kwargs["peft_config"] is None and trainer.kwargs["quantization_config"] is None
    assert trainer.resumed is None and trainer.saved == trainer.args.output_dir
    assert f"saved to {tmp_path / 'out'}" in capsys.readouterr().out


def test_sft_from_a_file_with_a_mixture(tmp_path: Path, data: str, trained: list[Any]):
    file = tmp_path / "run.yaml"
    sources = f"datasets:\n- path: {data}\n- path: {data}\n  fraction: 0.5\n"
    file.write_text(
        f"model_name_or_path: m\noutput_dir: {tmp_path}\nuse_peft: true\nlora_target_modules: [all-linear]\n{sources}"
        "eval_strategy: steps\neval_steps: 1\ntest_split_size: 0.2\n",
        encoding="utf-8",
    )
    assert main(["sft", "--config", str(file), "--lora_r", "4"]) == 0
    (trainer,) = trained
    assert (len(trainer.kwargs["train_dataset"]), len(trainer.kwargs["eval_dataset"])) == (12, 3)
    config = trainer.kwargs["peft_config"]
    assert config.r == 4 and config.target_modules == "all-linear"


def test_evaluation_needs_its_split(tmp_path: Path, data: str, trained: list[Any], capsys: pytest.CaptureFixture[str]):
    assert sft(tmp_path, "--dataset_name", data, "--eval_strategy", "epoch") == 2
    assert "no split 'test'" in error(capsys)
    assert sft(tmp_path, "--dataset_name", data, "--eval_strategy", "epoch", "--dataset_test_split", "train[:3]") == 0
    assert len(trained[0].kwargs["eval_dataset"]) == 3
    assert sft(tmp_path, "--datasets", f"[{{path: {data}}}]", "--eval_strategy", "epoch") == 2
    assert "set `test_split_size`" in error(capsys)


def test_missing_file_is_one_line(tmp_path: Path, trained: list[Any], capsys: pytest.CaptureFixture[str]):
    assert sft(tmp_path, "--dataset_name", str(tmp_path / "none.jsonl")) == 2
    assert "none.jsonl" in error(capsys) and not trained


def test_resume_takes_the_newest_complete_checkpoint(
    tmp_path: Path, data: str, trained: list[Any], capsys: pytest.CaptureFixture[str]
):
    for step in (3, 9, 10, 12):
        (tmp_path / "out" / f"checkpoint-{step}").mkdir(parents=True)
    for step in (3, 9, 10):  # 12 was cut off while it was written
        (tmp_path / "out" / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
        (tmp_path / "out" / f"checkpoint-{step}" / "optimizer.pt").write_text("")
    ten, nine = (str(tmp_path / "out" / f"checkpoint-{step}") for step in (10, 9))
    anew = ["--overwrite_output_dir"]
    for asked, found in (("true", ten), ("last", ten), (nine, nine), ("none", None), ("false", None)):
        more = anew if found is None else []
        assert sft(tmp_path, "--dataset_name", data, "--resume_from_checkpoint", asked, *more) == 0
        assert trained[-1].resumed == found
    assert sft(tmp_path, "--dataset_name", data) == 2
    assert "holds 4 checkpoint(s) of another run" in error(capsys)


def test_resume_from_a_file(tmp_path: Path):
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text("{}")
    (tmp_path / "checkpoint-1" / "optimizer.pt").write_text("")
    file = tmp_path / "run.yaml"
    file.write_text(f"resume_from_checkpoint: true\noutput_dir: {tmp_path}", encoding="utf-8")
    from posttrain.cli.parse import parse
    from posttrain.cli.schema import stored

    values = parse(["--config", str(file)], stored("sft"))
    assert run.resume_folder(values["SFTConfig"]) == str(tmp_path / "checkpoint-1")


def test_bool_buffers_are_left_out_of_ddp():
    import torch

    model = torch.nn.Linear(1, 1)
    model.register_buffer("mask", torch.ones(1, dtype=torch.bool))
    model.register_buffer("scale", torch.ones(1))
    run.ignore_bool_buffers(model)
    assert model._ddp_params_and_buffers_to_ignore == ["mask"]


# posttrain env


def test_env_reports_missing_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(env, "_bf16", lambda: 1 / 0)
    assert main(["env"]) == 0
    lines = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    assert set(lines) >= {"posttrain", "python", "platform", "torch", "device", "native bf16", "transformers", "vllm"}
    assert {"accelerate", "datasets", "peft", "deepspeed", "liger-kernel", "bitsandbytes", "trl"} <= set(lines)
    assert {"cores", "memory"} <= set(lines) and "ZeroDivisionError" in lines["native bf16"]


def test_env_takes_no_arguments(capsys: pytest.CaptureFixture[str]):
    assert main(["env", "x"]) == 2
    assert "takes no arguments" in error(capsys)


# posttrain check


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """A command line over a tiny model and eight rows."""
    tiny_model(eos_token_id=257).save_pretrained(tmp_path / "model")
    byte_tokenizer(template=CHATML).save_pretrained(tmp_path / "model")
    rows = [{"prompt": "What comes after " + "abcdefgh"[i] + "?", "completion": "x" * (i + 2)} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    line = ["check", "--model_name_or_path", str(tmp_path / "model"), "--dataset_name", str(tmp_path / "rows.jsonl")]
    return [*line, "--output_dir", str(tmp_path / "out"), "--bf16", "false", "--per_device_train_batch_size", "2"]


def test_check_says_what_it_proved_and_writes_nothing(small: list[str], tmp_path: Path, capsys: Any):
    assert main(small) == 0
    out = capsys.readouterr().out
    for line in ("pass  accumulation", "pass  gradients", "pass  forest", "0 failed, of 4 self-checks"):
        assert line in out
    assert not (tmp_path / "out").exists()


_PAIRS = [{"prompt": f"After {c}?", "chosen": "x" * i, "rejected": "y"} for i, c in enumerate("abcd", 1)]
_LABELLED = [{"prompt": f"After {c}?", "completion": "x" * i, "label": i > 2} for i, c in enumerate("abcd", 1)]
_STEPS = [{"prompt": f"After {c}?", "completions": ["x", "y"], "labels": [True, c > "b"]} for c in "abcd"]


@pytest.mark.parametrize(
    ("rows", "flags", "said"),
    [
        (_PAIRS, [], ("of 5 self-checks of dpo", "pass  reference", "train: 4 of 4 pairs")),
        (_PAIRS, ["--center_rewards_coefficient", "0.1"], ("of 4 self-checks of reward", "train: 4 of 4 pairs")),
        (_PAIRS, ["--method", "kto"], ("of 5 self-checks of kto", "made of 4 pairs")),
        (_LABELLED, [], ("of 5 self-checks of kto", "pass  reference")),
        (_LABELLED, ["--completion_only_loss"], ("of 4 self-checks of sft", "4 of 4 rows")),
        (_STEPS, [], ("of 4 self-checks of prm", "8 steps, 6 correct")),
    ],
)
def test_check_is_of_the_method_of_the_run(
    small: list[str], tmp_path: Path, capsys: Any, rows: Any, flags: Any, said: Any
):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert main([*small, *flags]) == 0
    printed = capsys.readouterr()
    out = printed.out + printed.err
    assert [text for text in (*said, "pass  accumulation", "pass  gradients", "0 failed") if text not in out] == []
    assert not (tmp_path / "out").exists()


def test_check_fails_with_1(small: list[str], capsys: Any):
    with applied("mean_of_micro_batch_means"), pytest.raises(SystemExit) as stop:
        main([*small, "--skip_self_checks", "forest"])
    assert stop.value.code == 1
    out = capsys.readouterr().out
    assert "fail  accumulation  1 micro-batch of 2 units against 2 of 1: loss" in out and "forest" not in out
