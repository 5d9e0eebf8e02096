"""What a run shows while it trains, and averages of the weights it trains."""

from __future__ import annotations

import atexit
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from posttrain.errors import ConfigError
from posttrain.model.reference import Bema, mix_into
from posttrain.parallel.ranks import say

_BEMA_FILE = "bema.pt"
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
            TextColumn("ETA"),
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
    """e.g. {"loss": 1.25, "tokens_per_second": 5120.0, "mfu": 0.4, "peak_memory_mib": 2048.0} ->
    "loss 1.25  5,120 tokens/s  MFU 40.0 %  2.0 GiB" """
    parts = [f"loss {_number(logs['loss'])}"] if "loss" in logs else []
    if "mean_token_accuracy" in logs:
        parts.append(f"accuracy {_number(logs['mean_token_accuracy'])}")
    if "tokens_per_second" in logs:
        parts.append(f"{logs['tokens_per_second']:,.0f} tokens/s")
    if "mfu" in logs:
        parts.append(f"MFU {100 * logs['mfu']:.1f} %")
    if "peak_memory_mib" in logs:
        parts.append(f"{logs['peak_memory_mib'] / 1024:.1f} GiB")
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


class SyncRefModelCallback(TrainerCallback):
    """Move a reference model towards the trained one: every `ref_model_sync_steps` steps of the config,
    reference ← (1 − α) reference + α model, with α = `ref_model_mixup_alpha` (arXiv 2404.09656).

    Raises `ModelError` when the two do not have the same weights, as with an adapter.
    """

    def __init__(self, ref_model: Any, accelerator: Any = None) -> None:
        self.ref_model, self.accelerator = ref_model, accelerator

    @staticmethod
    def sync_target_model(model: Any, target_model: Any, alpha: float) -> None:
        """target ← (1 − alpha) target + alpha model"""
        mix_into(target_model, model, alpha)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.ref_model is None or state.global_step % args.ref_model_sync_steps:
            return
        model = kwargs["model"]
        model = model if self.accelerator is None else self.accelerator.unwrap_model(model)
        self.sync_target_model(model, self.ref_model, args.ref_model_mixup_alpha)


class BEMACallback(TrainerCallback):
    """Keep a bias-corrected moving average of the trained weights (arXiv 2508.00180), and write the model that has it
    to `output_dir/bema` when training ends. The formula is in `posttrain.model.reference.Bema`.

    update_freq: steps between updates (φ); update_after: steps before the first snapshot (τ); ema_power: κ;
    bias_power: η; lag: ρ; multiplier: γ; min_ema_multiplier: least β; device: where the three copies are kept, float32.
    Its state is saved with each checkpoint, and goes on from there. Sharded weights (FSDP2, ZeRO-3) are a `ModelError`.
    """

    def __init__(
        self,
        update_freq: int = 400,
        ema_power: float = 0.5,
        bias_power: float = 0.2,
        lag: int = 10,
        update_after: int = 0,
        multiplier: float = 1.0,
        min_ema_multiplier: float = 0.0,
        device: str = "cpu",
    ) -> None:
        if update_freq < 1 or update_after < 0:
            raise ConfigError(
                f"`update_freq` is {update_freq} and `update_after` {update_after}; set at least 1 and at least 0."
            )
        self.update_freq, self.update_after = update_freq, update_after
        self.bema = Bema(ema_power, bias_power, lag, multiplier, min_ema_multiplier, device)
        self._checkpoint: Path | None = None  # that a run goes on from

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.bema.start(kwargs["model"])
        if self._checkpoint is None:
            return
        file, self._checkpoint = self._checkpoint / _BEMA_FILE, None
        if file.is_file():
            self.bema.load(torch.load(file, map_location=self.bema.device, weights_only=True))
        else:
            say(f"BEMA starts again at step {state.global_step}: there is no {file}")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        since = state.global_step - self.update_after
        if since == 0:
            self.bema.start(kwargs["model"])
        elif since > 0 and since % self.update_freq == 0:
            self.bema.update(kwargs["model"], state.global_step)

    def read_state(self, folder: Path) -> None:
        """Called with the checkpoint a run goes on from, before training begins."""
        self._checkpoint = folder

    def write_state(self, folder: Path) -> None:
        """Called while a checkpoint is written, so that the averages are as whole as the rest of it."""
        torch.save(self.bema.tensors(), folder / _BEMA_FILE)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        folder = str(Path(args.output_dir or ".") / "bema")
        kwargs["model"].save_pretrained(folder, state_dict=self.bema.state_of(kwargs["model"]))
        if kwargs.get("processing_class") is not None:
            kwargs["processing_class"].save_pretrained(folder)
        say(f"BEMA: saved to {folder}")


class StreamCount(TrainerCallback):
    """Says at the end of training what became of the rows of a stream that were read. report: their counts."""

    def __init__(self, report: Any) -> None:
        self._report = report

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        say(f"as far as the stream was read: {self._report.summary()}")
