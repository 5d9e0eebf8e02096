"""What a run shows while it trains."""

from __future__ import annotations

import atexit
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

# Logged about an evaluation, and nothing about the model.
_TIMINGS = ("_runtime", "_per_second", "_compilation_time")


class RichProgressCallback(TrainerCallback):
    """A progress bar with loss, speed and time left; where output is no terminal, one plain line per log."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._bar: Progress | None = None
        self._training: TaskID | None = None
        self._evaluating: TaskID | None = None
        self._began, self._first_step = time.monotonic(), 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._stop()
        # A resumed run begins in the middle: its speed is that of the steps done since.
        self._began, self._first_step = time.monotonic(), state.global_step
        if not state.is_world_process_zero or args.disable_tqdm or not self.console.is_terminal:
            return
        bar = self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._training = bar.add_task("train", total=state.max_steps, completed=state.global_step, numbers="")
        bar.start()
        # A run that raises never reaches on_train_end, and a live bar hides the cursor.
        atexit.register(self._stop)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._bar is not None and self._training is not None:
            self._bar.update(self._training, completed=state.global_step)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._bar is None:
            return
        if self._evaluating is None:
            self._evaluating = self._bar.add_task("eval", total=_length(kwargs.get("eval_dataloader")), numbers="")
        self._bar.advance(self._evaluating)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._end_evaluation()

    def on_predict(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float],
        **kwargs: Any,
    ) -> None:
        self._end_evaluation()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if any(key.startswith("eval_") for key in logs):
            self._print(f"eval at step {state.global_step}  {_evaluation(logs)}")
        elif "train_runtime" in logs:
            loss = f"  loss {_number(logs['train_loss'])}" if "train_loss" in logs else ""
            self._print(f"done: {state.global_step} steps in {_duration(logs['train_runtime'])}{loss}")
        elif self._bar is not None and self._training is not None:
            self._bar.update(self._training, numbers=_numbers(logs))
        else:
            left = self._time_left(state)
            self._print(f"step {state.global_step}/{state.max_steps}  {_numbers(logs)}{left}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._stop()

    def _end_evaluation(self) -> None:
        if self._bar is not None and self._evaluating is not None:
            self._bar.remove_task(self._evaluating)
        self._evaluating = None

    def _time_left(self, state: TrainerState) -> str:
        done = state.global_step - self._first_step
        if done < 1 or state.max_steps < 1:
            return ""
        seconds = (time.monotonic() - self._began) / done * (state.max_steps - state.global_step)
        return f"  ETA {_duration(seconds)}"

    def _print(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._training = self._evaluating = None
        atexit.unregister(self._stop)


def _numbers(logs: Mapping[str, Any]) -> str:
    """e.g. {"loss": 1.25, "tokens_per_second": 5120.0} -> "loss 1.25  5,120 tokens/s" """
    parts = [f"loss {_number(logs['loss'])}"] if "loss" in logs else []
    if "mean_token_accuracy" in logs:
        parts.append(f"accuracy {_number(logs['mean_token_accuracy'])}")
    if "tokens_per_second" in logs:
        parts.append(f"{logs['tokens_per_second']:,.0f} tokens/s")
    return "  ".join(parts)


def _evaluation(logs: Mapping[str, Any]) -> str:
    """e.g. {"eval_loss": 1.25, "eval_runtime": 3.0} -> "loss 1.25" """
    shown = {k.removeprefix("eval_"): v for k, v in logs.items() if k.startswith("eval_") and not k.endswith(_TIMINGS)}
    return "  ".join(f"{name} {_number(value)}" for name, value in shown.items())


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _duration(seconds: float) -> str:
    """e.g. 3725.0 -> "1h02m", 65.0 -> "1m05s", 4.0 -> "4s" """
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
