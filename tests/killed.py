"""A process that forks trainings and kills them: at random moments, and at each step of a save.

Run as a program, since a fork of the test's own process would take its threads' locks along:
`python killed.py FOLDER random KILLS`, or `python killed.py FOLDER points STRIDE`. It prints the step of the last
checkpoint, or the number of points. It fails when a checkpoint that was whole is lost, when a damaged one has a name,
and when the end differs from a run that nobody killed.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from laws.runs import sft
from tiny import tiny_model
from transformers import TrainerCallback

from posttrain.trainer import checkpoints
from posttrain.trainer.checkpoints import STAGING, checkpoints_in, find_checkpoint
from posttrain.trainer.manifest import damage, file_hash

SETTINGS: dict[str, Any] = {
    "save_strategy": "steps",
    "save_steps": 1,
    "save_total_limit": 1,
    "optim": "adamw_torch",
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "logging_strategy": "no",
}


def trainer(folder: Path, max_steps: int, **fields: Any) -> Any:
    model = tiny_model("qwen3", attention_dropout=0.2)
    return sft(model, output_dir=str(folder), max_steps=max_steps, **SETTINGS | fields)


class _Tell(TrainerCallback):
    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        os.write(self.pipe, b".")


def fork(work: Callable[[int], None]) -> tuple[int, int]:
    """Start `work` in a child; its number, and the end of a pipe it writes to."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            work(writing)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    return pid, reading


def train(folder: Path, max_steps: int, pipe: int, arm: Callable[[], None] = lambda: None) -> None:
    resume = "last" if checkpoints_in(folder) or list((folder / STAGING).glob("*")) else None
    run = trainer(folder, max_steps, resume_from_checkpoint=_if_any(resume, folder))
    run.add_callback(_Tell(pipe))
    arm()
    run.train()


def _if_any(resume: str | None, folder: Path) -> str | None:
    try:
        return resume and find_checkpoint(resume, str(folder)) and resume
    except ValueError:
        return None


def whole(folder: Path, before: int) -> int:
    """The step of the newest checkpoint, which has every byte it was written with; not older than `before`."""
    for path in checkpoints_in(folder):
        assert not damage(path), (path, damage(path))
    found = _if_any("last", folder)
    step = int(Path((found and find_checkpoint("last", str(folder), hashes=True)) or "-0").name.rpartition("-")[2])
    assert step >= before, f"step {step} is left, and step {before} was whole"
    return step


def at_random(folder: Path, kills: int, seed: int) -> int:
    draw, step = random.Random(seed), 0
    for _ in range(kills):
        pid, pipe = fork(lambda writing: train(folder, 10**6, writing))
        assert select.select([pipe], [], [], 60)[0], "no step was begun in a minute"
        assert os.read(pipe, 1), "the run ended by itself"
        time.sleep(draw.uniform(0.0, 0.5))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(pipe)
        step = whole(folder, step)
    return step


def arm(point: int) -> None:
    """Kill this process at the `point`-th call that changes or syncs a file of a checkpoint."""
    left = [point]

    def before(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return own(*args, **kwargs)

        return call

    for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "mkdir"), (checkpoints.shutil, "rmtree")):
        setattr(owner, name, before(getattr(owner, name)))


def at_each_point(folder: Path, stride: int) -> int:
    """Two steps from the newest checkpoint, the second of which replaces the one before; killed ever later."""
    step, point = 0, 0
    while True:
        pid, pipe = fork(lambda writing, p=point, s=step: train(folder, s + 2, writing, lambda: arm(p)))
        _, status = os.waitpid(pid, 0)
        os.close(pipe)
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0, "the run failed"
            return point
        step, point = whole(folder, step), point + stride


def as_uninterrupted(folder: Path) -> None:
    """A run of as many steps that nobody kills ends with the same weights and the same optimizer, bit for bit."""
    last = Path(str(find_checkpoint("last", str(folder))))
    other, steps = folder / "other", int(last.name.rpartition("-")[2])
    pid, _ = fork(lambda writing: trainer(other, steps, save_steps=steps).train() and None)
    assert os.waitpid(pid, 0)[1] == 0
    for name in ("model.safetensors", "rng_state.pth"):
        assert file_hash(last / name) == file_hash(other / last.name / name), name
    states = [torch.load(path / "optimizer.pt")["state"] for path in (last, other / last.name)]
    for index, slots in states[0].items():
        assert all(torch.equal(value, states[1][index][name]) for name, value in slots.items())


if __name__ == "__main__":
    where, number = Path(sys.argv[1]), int(sys.argv[3])
    print(at_random(where, number, seed=0) if sys.argv[2] == "random" else at_each_point(where, number))
    as_uninterrupted(where)
