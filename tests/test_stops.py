"""How runs end: signals, failed ranks, hangs, and steps that are not finite."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from laws.runs import bit_equal, run, scratch, sft
from pool import POOL, PoolError
from tiny import tiny_model
from transformers import TrainerCallback

from posttrain.errors import ConfigError, NonFiniteError
from posttrain.parallel.ranks import gather_objects, on_every_rank, rank
from posttrain.report.runlog import read_run
from posttrain.trainer import stops
from posttrain.trainer.failed import load_failed, replay_failed


class At(TrainerCallback):
    """Does something at one point of one step."""

    def __init__(self, step: int, action: Any, point: str = "on_step_begin") -> None:
        def act(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step:
                action()

        setattr(self, point, act)


def ended(trainer: Any) -> int | str:
    """The exit code a process would have."""
    try:
        trainer.train()
    except SystemExit as stop:
        return int(str(stop.code))
    except KeyboardInterrupt:
        return 130
    return 0


def send(number: int) -> Any:
    return lambda: os.kill(os.getpid(), number)


# ---- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 138)])
def test_a_signal_saves_and_ends_the_run(number: int, code: int, tmp_path: Path):
    before = signal.getsignal(number)
    trainer = sft(output_dir=str(tmp_path), max_steps=4, save_strategy="epoch")
    trainer.add_callback(At(1, send(number)))
    assert ended(trainer) == code
    assert [path.name for path in sorted(tmp_path.glob("checkpoint-*"))] == ["checkpoint-2"]
    assert trainer.state.global_step == 2
    assert signal.getsignal(number) == before and signal.set_wakeup_fd(-1) == -1
    again = sft(output_dir=str(tmp_path), max_steps=4)
    resumed = run(again, resume=str(tmp_path / "checkpoint-2"))
    resumed.losses = [line["loss"] for line in again.state.log_history if "loss" in line]
    bit_equal(resumed, run(sft(max_steps=4)))


def test_signals_may_be_left_alone():
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        trainer = sft()  # somebody else's handler stays
        trainer.add_callback(At(1, send(signal.SIGUSR1)))
        assert ended(trainer) == 0 and seen == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)
    trainer = sft(handle_signals=False)
    trainer.add_callback(At(1, send(signal.SIGINT)))
    assert ended(trainer) == 130 and trainer.state.global_step == 1


def test_a_second_signal_ends_at_once(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    watch = stops.Watch(sft().stops, sft().args)
    now = [100.0]
    monkeypatch.setattr(stops.time, "monotonic", lambda: now[0])
    for after, numbers in ((0.0, [15]), (0.5, [15])):  # a launcher and a scheduler sent the same one
        now[0] += after
        watch._count(bytes(numbers))
    assert not codes
    now[0] += 5.0
    watch._count(bytes([15]))
    assert codes == [143] and "second signal (SIGTERM)" in capfd.readouterr().err
    other = stops.Watch(sft().stops, sft().args)
    other._count(bytes([15, 2]))
    assert codes == [143, 130]


def stop_two(on: int, step: int, number: int, folder: str) -> tuple[Any, int]:
    trainer = sft(max_steps=6, output_dir=folder)
    if rank() == on:
        trainer.add_callback(At(step, send(number), "on_step_end"))
    return ended(trainer), trainer.state.global_step


def test_a_signal_on_one_rank_stops_both_at_the_same_step():
    folder = scratch()
    one, two = POOL.run(stop_two, on=1, step=2, number=int(signal.SIGTERM), folder=folder)
    assert one == two == (143, 3)
    assert [path.name for path in Path(folder).glob("checkpoint-*")] == ["checkpoint-3"]


# ---- a rank that fails, a rank that hangs ----------------------------------------------------------------------------


def fail_alone() -> None:
    trainer = sft()
    if rank() == 1:
        trainer.add_callback(At(1, lambda: 1 / 0))
    try:
        trainer.train()
    except ZeroDivisionError:
        time.sleep(20)  # as a rank that tidies up, with its connections open


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_other():
    with pytest.raises(PoolError, match=r"ranks \[0\] died"):  # not: no answer
        POOL.run(fail_alone)


class NoWayBack(Exception):
    """Pickles, and cannot be read back."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} of {two}")


def look_before(error: Exception | None) -> str:
    def look() -> int:
        if rank() == 1 and error is not None:
            raise error
        if rank() == 1 and error is None:
            raise NoWayBack(1, 2)
        return rank()

    try:
        on_every_rank(look)
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return "nothing"


def test_an_error_of_one_rank_is_raised_on_both():
    assert POOL.run(look_before, error=OSError(5, "bad disk")) == ["OSError: [Errno 5] bad disk"] * 2
    assert POOL.run(look_before, error=None) == ["RuntimeError: rank 1: NoWayBack: 1 of 2"] * 2
    with pytest.raises(NoWayBack):  # one process: as it was raised
        on_every_rank(lambda: (_ for _ in ()).throw(NoWayBack(1, 2)))


def hang() -> None:
    trainer = sft(ddp_timeout=3)
    if rank() == 1:
        trainer.add_callback(At(1, lambda: time.sleep(50)))
    trainer.train()


@pytest.mark.slow
def test_a_hang_ends_after_the_time_out():
    with pytest.raises(PoolError, match="died"):
        POOL.run(hang)


def say_where() -> list[str]:
    """What the watch of each rank says of the others when time is over."""
    said: list[str] = []
    trainer = sft()

    def look() -> None:
        trainer.stops.at("forward and backward" if rank() else "evaluation")
        watch = stops.Watch(trainer.stops, trainer.args)
        watch._end = lambda text, code: said.append(f"{code} {text}")
        watch._ask()
        gather_objects(None)
        watch._limit = -1.0
        watch._time()

    trainer.add_callback(At(1, look))
    trainer.train()
    return said


def not_ended() -> list[str]:
    """What the watch says of ranks that may take their time."""
    said: list[str] = []
    trainer = sft()
    cases = [("data", "data", False), ("end", "data", True), ("forward and backward", "forward and backward", False)]

    def look() -> None:
        for case, (one, two, over) in enumerate(cases):
            trainer.stops.at(two if rank() else one)
            trainer.stops.over = over
            watch = stops.Watch(trainer.stops, trainer.args)
            watch._end = lambda text, code, case=case: said.append(f"{case}: {text[:12]}")
            watch._ask()
            gather_objects(None)
            watch._limit = -1.0
            watch._time()
            gather_objects(None)
        trainer.stops.over = False

    trainer.add_callback(At(1, look))
    trainer.train()
    assert trainer.stops.over
    return said


def test_ranks_at_one_place_and_an_upload_may_take_their_time():
    assert POOL.run(not_ended) == [["2: nothing has "], ["2: nothing has "]]


def test_a_rank_that_moves_keeps_the_others(monkeypatch: pytest.MonkeyPatch):
    class Store:
        moves = 1

        def add(self, key: str, by: int) -> int:
            return self.moves

    watch = stops.Watch(sft().stops, sft().args)
    watch._store, watch._limit, now = Store(), 10.0, [0.0]
    monkeypatch.setattr(stops.time, "monotonic", lambda: now[0])
    for now[0], moves, still in ((0.0, 1, False), (9.0, 1, False), (11.0, 1, True), (12.0, 2, False), (21.0, 2, False)):
        Store.moves = moves
        assert watch._still() == still


def test_a_time_out_names_every_rank():
    (one,), (two,) = POOL.run(say_where)
    assert one.startswith("1 nothing has moved for") and "rank 1: step 2, forward and backward" in one
    assert "rank 0: step 2, evaluation" in two


# ---- steps that are not finite ---------------------------------------------------------------------------------------


def poisoned(**fields: Any) -> Any:
    """Four rows a step in two micro-batches; row 6, in the second step, holds a token whose embedding is NaN."""
    model = tiny_model("qwen3")
    with torch.no_grad():
        model.model.embed_tokens.weight[299] = float("nan")
    rows = [{"input_ids": [5 + i, 6, 7, 8]} for i in range(8)]
    rows[6] = {"input_ids": [9, 299, 10]}
    fields = {"train_sampling_strategy": "sequential", "gradient_accumulation_steps": 2, **fields}
    return sft(model=model, rows=Dataset.from_list(rows), **fields)


def test_a_step_that_is_not_finite_names_and_saves_its_rows(tmp_path: Path):
    trainer = poisoned(output_dir=str(tmp_path))
    with pytest.raises(NonFiniteError, match=r"step 2: .*rows [4-7, ]+ of.*Row 6 alone has loss nan"):
        trainer.train()
    found = read_run(tmp_path)
    assert found.state == "failed" and found.events[-1]["error"].startswith("NonFiniteError: step 2: ")
    folder = tmp_path / "failed-step-2"
    facts = json.loads((folder / "rank0.json").read_text())
    assert sorted(row for rows in facts["rows"] for row in rows) == [4, 5, 6, 7] and facts["loss"] == "nan"
    again = poisoned()
    before = {name: p.detach().clone() for name, p in again.model.named_parameters()}
    found = replay_failed(again, folder)
    assert [unit.rows for unit in found if not unit.finite] == [(6,)] and len(found) == 4
    assert all(torch.equal(p.nan_to_num(), before[n].nan_to_num()) for n, p in again.model.named_parameters())
    assert all(p.grad is None for p in again.model.parameters())
    assert sum(batch.num_sequences for batch in load_failed(folder)) == 4


def test_a_step_that_is_not_finite_is_told_whatever_else_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("basic_ios::clear: iostream error")

    def out_of_memory(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch, "save", full)
    monkeypatch.setattr("posttrain.trainer.failed._alone", out_of_memory)
    with pytest.raises(NonFiniteError, match=r"tried one by one \(OutOfMemory.*could not be saved .*iostream"):
        poisoned(output_dir=str(tmp_path)).train()


def test_a_folder_without_rows_is_an_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="failed-step-N"):
        load_failed(tmp_path)
