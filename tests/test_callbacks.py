"""What a run shows: a bar on a terminal, plain lines elsewhere, nothing on other ranks."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from transformers import TrainerControl, TrainerState

from posttrain.trainer import callbacks
from posttrain.trainer.callbacks import RichProgressCallback

LOGS = {"loss": 1.23456, "grad_norm": 2.0, "learning_rate": 1e-5, "tokens_per_second": 5120.4, "num_tokens": 99}


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


class Run:
    """Drives the callback as a trainer would."""

    def __init__(self, terminal: bool, zero: bool = True, disable_tqdm: bool = False, start: int = 0) -> None:
        self.out = io.StringIO()
        console = Console(file=self.out, force_terminal=terminal, width=100, color_system=None)
        self.callback: Any = RichProgressCallback(console)
        self.state = TrainerState(is_world_process_zero=zero, max_steps=10, global_step=start)
        self.args: Any = SimpleNamespace(disable_tqdm=disable_tqdm)
        self.call("on_train_begin")

    def call(self, event: str, *args: Any, **kwargs: Any) -> None:
        getattr(self.callback, event)(self.args, self.state, TrainerControl(), *args, **kwargs)

    def step(self, to: int, **logs: Any) -> None:
        self.state.global_step = to
        self.call("on_step_end")
        self.call("on_log", logs=logs)

    @property
    def lines(self) -> list[str]:
        return self.out.getvalue().splitlines()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(callbacks, "time", clock)
    return clock


def test_plain_line_per_log(clock: Clock):
    run = Run(terminal=False)
    clock.now += 20
    run.step(2, **LOGS)
    assert run.lines == ["step 2/10  loss 1.235  5,120 tokens/s  ETA 1m20s"]


def test_time_left_of_a_resumed_run_counts_its_own_steps(clock: Clock):
    run = Run(terminal=False, start=6)
    clock.now += 10
    run.step(8, **LOGS, mean_token_accuracy=0.5)
    assert run.lines == ["step 8/10  loss 1.235  accuracy 0.5  5,120 tokens/s  ETA 10s"]


def test_evaluation_and_end_lines():
    run = Run(terminal=False)
    run.state.global_step = 4
    run.call("on_log", logs={"eval_loss": 1.5, "eval_runtime": 1.0, "eval_samples_per_second": 3.0, "epoch": 1.0})
    run.call("on_log", logs={"eval_a_loss": 2.0, "eval_b_loss": 3.0})
    run.call("on_log", logs={"train_runtime": 3725.0, "train_loss": 1.25, "epoch": 1.0})
    run.call("on_train_end")
    assert run.lines == [
        "eval at step 4  loss 1.5",
        "eval at step 4  a_loss 2  b_loss 3",
        "done: 4 steps in 1h02m  loss 1.25",
    ]


def test_no_line_is_cut_at_the_width_of_the_console():
    run = Run(terminal=False)
    run.call("on_log", logs={f"eval_{'x' * 40}_{i}": float(i) for i in range(5)})
    assert len(run.lines) == 1


@pytest.mark.parametrize("terminal", [True, False])
def test_other_ranks_are_silent(terminal: bool):
    run = Run(terminal, zero=False)
    run.step(1, **LOGS)
    run.call("on_prediction_step", eval_dataloader=[1])
    run.call("on_evaluate", metrics={})
    run.call("on_train_end")
    assert run.out.getvalue() == ""


def test_bar_on_a_terminal():
    run = Run(terminal=True)
    run.step(3, **LOGS)
    run.call("on_prediction_step", eval_dataloader=[1, 2])
    run.call("on_prediction_step", eval_dataloader=iter([1, 2]))
    run.call("on_log", logs={"eval_loss": 1.5})
    run.call("on_evaluate", metrics={})
    run.step(10, **LOGS)
    run.call("on_log", logs={"train_runtime": 65.0})
    run.call("on_train_end")
    text = run.out.getvalue()
    assert "10/10" in text and "loss 1.235" in text and "5,120 tokens/s" in text
    assert "eval at step 3  loss 1.5" in text and "done: 10 steps in 1m05s" in text
    assert run.callback._bar is None


def test_disabled_bar_prints_lines():
    run = Run(terminal=True, disable_tqdm=True)
    run.step(1, **LOGS)
    assert len(run.lines) == 1 and run.lines[0].startswith("step 1/10")


def test_evaluation_alone():
    run = Run(terminal=True)
    run.call("on_train_end")
    fresh = RichProgressCallback(Console(file=io.StringIO(), force_terminal=True))
    fresh.on_prediction_step(run.args, run.state, TrainerControl(), eval_dataloader=[1])
    fresh.on_predict(run.args, run.state, TrainerControl(), metrics={})
    fresh.on_train_end(run.args, run.state, TrainerControl())
