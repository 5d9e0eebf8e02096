"""What a run leaves in `output_dir` about itself: `resolved_config.yaml`, `environment.json` and `log.jsonl`.

The first alone starts the run again, the second says on what it ran, the third is its history, a line at a time, and
so outlives a run that is killed. `posttrain report` reads all three.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from posttrain.files import whole_file
from posttrain.parallel.ranks import say, world_size
from posttrain.trainer.masking import is_secret, masked, masked_command

RESOLVED, ENVIRONMENT, LOG = "resolved_config.yaml", "environment.json", "log.jsonl"
_PACKAGES = ("posttrain", "torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "numpy")
_OPTIONAL = ("peft", "deepspeed", "bitsandbytes", "liger-kernel", "flash-attn", "vllm")
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "WORLD_SIZE", "CUBLAS_WORKSPACE_CONFIG")
_PREFIXES = ("HF_", "TRANSFORMERS_", "ACCELERATE_", "NCCL_", "PYTORCH_", "TOKENIZERS_")
_SAMPLE = 256  # rows of each end whose ids are part of the fingerprint


class RunFiles(TrainerCallback):
    """Writes the three files, on the first rank. A file that cannot be written is said once and stops nothing.

    resolved: text of `resolved_config.yaml`, from the command line; unset, the fields of `args` that differ from their
    defaults. command: what was typed.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.resolved: str | None = None
        self.command: list[str] | None = None
        self._told, self._works, self._runs = 0, True, False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._told, self._works = len(state.log_history), state.is_world_process_zero
        self._runs = True
        if not self._works:
            return
        folder = _folder(args)
        config = self.resolved if self.resolved is not None else from_arguments(self.trainer)
        facts = json.dumps(describe(self.trainer, self.command), indent=1, ensure_ascii=False)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if state.global_step:
                _keep_former(folder / RESOLVED, config, state.global_step)
            _write(folder / RESOLVED, config)
            _write(folder / ENVIRONMENT, facts + "\n")
        except OSError as error:
            self._give_up(error)
        self._tell(
            args, {"event": "resumed" if state.global_step else "started", "step": state.global_step,
                   "max_steps": state.max_steps}
        )  # fmt: skip

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._follow(args, state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._follow(args, state)  # events that other parts put in the history between two lines of the log

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._follow(args, state)
        # The base class calls this after a save that failed and was told, too.
        event = "checkpoint_failed" if state.global_step in self.trainer.failed_saves else "checkpoint"
        self._tell(args, {"event": event, "step": state.global_step})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._follow(args, state)
        ended = "finished" if state.global_step >= state.max_steps else "stopped"
        self._tell(args, {"event": ended, "step": state.global_step})
        self._runs = False

    def failed(self, error: Exception) -> None:
        """The run ended with an error: what was logged until then, and the error's first line."""
        if not self._runs:
            return
        args, state = self.trainer.args, self.trainer.state
        text = str(error).strip().partition("\n")[0]
        self._follow(args, state)
        self._tell(args, {"event": "failed", "step": state.global_step, "error": f"{type(error).__name__}: {text}"})
        self._runs = False

    def _follow(self, args: TrainingArguments, state: TrainerState) -> None:
        new, self._told = state.log_history[self._told :], len(state.log_history)
        if new:
            self._tell(args, *new)

    def _tell(self, args: TrainingArguments, *lines: Mapping[str, Any]) -> None:
        """Append, each line whole and flushed: a reader of a running or a killed run sees all there is."""
        if not self._works:
            return
        now = round(time.time(), 3)
        text = "".join(json.dumps({**line, "time": now}, default=str, ensure_ascii=False) + "\n" for line in lines)
        try:
            with open(_folder(args) / LOG, "a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._works = False
        say(f"the record of this run cannot be written to {self.trainer.args.output_dir!r}: {error}; training goes on.")


def write_beside(args: TrainingArguments, name: str, text: str) -> None:
    """A file of `output_dir`, beside the checkpoints; one that cannot be written is said and stops nothing."""
    try:
        _folder(args).mkdir(parents=True, exist_ok=True)
        _write(_folder(args) / name, text)
    except OSError as error:
        say(f"{name} cannot be written to {args.output_dir!r}: {error}; training goes on.")


def _folder(args: TrainingArguments) -> Path:
    return Path(args.output_dir or "trainer_output").expanduser()


def _write(path: Path, text: str) -> None:
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def _keep_former(path: Path, text: str, step: int) -> None:
    """Another configuration goes on with the run: the one it had until this step stays beside it."""
    if path.is_file() and path.read_text(encoding="utf-8") != text:
        path.replace(path.with_name(f"{path.stem}.until-step-{step}{path.suffix}"))


# ---- what is recorded ------------------------------------------------------------------------------------------------


def from_arguments(trainer: Any) -> str:
    """The fields of `args` that differ from their class's defaults, as YAML, for a run that Python code started. The
    model is named where it has a name; rows given as objects cannot be."""
    args = trainer.args
    lines = ["# Started from Python: the rows and the model's objects are the program's, and not in this file."]
    name = getattr(getattr(trainer.model, "config", None), "name_or_path", "")
    if name:
        lines.append(f"model_name_or_path: {json.dumps(name)}")
    for field in dataclasses.fields(args):
        value = _plain(getattr(args, field.name, None))
        if not field.init or field.name.startswith("_") or value == _plain(_default(field)) or value is None:
            continue
        if (value and is_secret(field.name)) or masked(value) != value:
            lines.append(f"# {field.name}: left out, it is a secret")
        else:
            lines.append(f"{field.name}: {json.dumps(value, ensure_ascii=False, default=str)}")
    return "\n".join(lines) + "\n"


def _default(field: Any) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return list(value) if isinstance(value, (tuple, set)) else value


def describe(trainer: Any, command: list[str] | None) -> dict[str, Any]:
    """What `environment.json` holds: nothing in it is a secret."""
    args = trainer.args
    names = [n for n in sorted(os.environ) if n.startswith(_PREFIXES) or n in _VARIABLES]
    typed = ["posttrain", *command] if command is not None else sys.argv
    return {
        "command": masked_command(typed),
        "directory": os.getcwd(),
        "git": _git(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {n: v for n in (*_PACKAGES, *_OPTIONAL) if (v := _version(n)) is not None},
        "hardware": _hardware(),
        "processes": world_size(),
        "strategy": type(trainer.strategy).__name__,
        "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        "layout": trainer.layout,
        "seeds": {"seed": args.seed, "data_seed": args.data_seed},
        "model": {"name": trainer.model.config.name_or_path, "type": trainer.model.config.model_type},
        "data": {**trainer.data_summary, "fingerprint": fingerprint(trainer.train_dataset)},
        "variables": {n: "***" if is_secret(n) else masked(os.environ[n]) for n in names},
    }


def fingerprint(items: Any) -> str | None:
    """A hash of the training items: how many, their lengths, and the ids and weights of the first and the last. None
    for a stream, which has none of these before it ends."""
    lengths = getattr(items, "costs", None)
    if lengths is None:
        return None
    digest = hashlib.sha256(json.dumps([len(items), list(map(int, lengths))]).encode())
    ends = sorted({*range(min(_SAMPLE, len(items))), *range(max(0, len(items) - _SAMPLE), len(items))})
    for at in ends:
        for row, source in items[at]:
            digest.update(repr((list(map(int, row.input_ids)), list(map(float, row.weights)), source)).encode())
    return digest.hexdigest()


def summarize(report: Any, items: Any, capacity: int | None) -> dict[str, Any]:
    """What was counted while a set was prepared, and how its bins are filled; a stream counts while it flows.

    report: counts as the fields of a dataclass. capacity: tokens of a bin, None without packing.
    """
    found = {f.name: getattr(report, f.name) for f in dataclasses.fields(report)}
    found = {name: value for name, value in found.items() if isinstance(value, int) and not isinstance(value, bool)}
    costs = getattr(items, "costs", None)
    if costs is None:
        return {"streamed": True}
    found |= {"longest": max(items.row_lengths, default=0)}
    if capacity and items.bins is not None:
        found |= {"bins": len(items), "capacity": capacity, "filled": sum(costs) / max(1, capacity * len(items))}
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _hardware() -> dict[str, Any]:
    found: dict[str, Any] = {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "machine": platform.machine()}
    if torch.cuda.is_available():
        found["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found["cuda"] = torch.version.cuda
    return found


def _git() -> dict[str, Any] | None:
    """The commit of the directory the run was started in, and whether it had changes; None outside a repository."""

    def ask(*words: str) -> str:
        done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip()

    try:
        return {"commit": ask("rev-parse", "HEAD"), "changed": bool(ask("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None
