"""Out of memory: the step is run again in smaller pieces and comes out the same, or the run ends and says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset
from laws.runs import bit_equal, run, same, sft
from pool import POOL, PoolError
from strategies import STRATEGIES, clean
from tiny import tiny_model, token_rows

from posttrain.errors import OutOfMemoryError
from posttrain.parallel.ranks import rank
from posttrain.trainer.budget import Probe
from posttrain.trainer.recovery import is_out_of_memory

# Three micro-batches a step, of 4 rows each, of 4 to 12 tokens.
STEPS: dict[str, Any] = {"gradient_accumulation_steps": 3, "max_steps": 2, "per_device_train_batch_size": 4}
STEPS["rows"] = token_rows(24, longest=12)


def inject(trainer: Any, part: str, tokens: int, steps: tuple[int, ...] = (1,), on: int | None = None) -> list[int]:
    """Make passes over more than `tokens` tokens run out of memory in those steps. Returns a list that fills with the
    tokens of the passes that did."""
    failed: list[int] = []

    def fail(batch: Any) -> None:
        if trainer.state.global_step + 1 in steps and batch.num_tokens > tokens and on in (None, rank()):
            failed.append(batch.num_tokens)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has …")

    own = trainer.loss_step

    def loss_step(model: Any, exp: Any) -> Any:
        layer = trainer.model.model.layers[0].mlp.down_proj.weight
        # What is computed first is differentiated last: once nearly all gradients are there.
        late = _Raises.apply(layer, lambda: fail(exp.batch)) if part == "backward" else None
        output = own(model, exp)
        if part == "forward":
            fail(exp.batch)
        if late is not None:
            output.total = output.total + late
        return output

    trainer.loss_step = loss_step
    return failed


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fail: Callable[[], None]) -> torch.Tensor:
        ctx.fail = fail
        return x.sum() * 0.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.fail()
        return None, None


def dropped(p: float = 0.3) -> dict[str, Any]:
    """A model with dropout: what random numbers a pass draws shows in the weights."""
    return {"model": tiny_model("qwen3", attention_dropout=p)}


@pytest.mark.parametrize("part", ["forward", "backward"])
@pytest.mark.parametrize("tokens", [12, 25])
def test_a_replayed_step_equals_the_unsplit_one(part: str, tokens: int):
    plain = run(sft(**STEPS))
    trainer = sft(**STEPS)
    failed = inject(trainer, part, tokens)
    replayed = run(trainer)
    assert failed
    same(plain, replayed)
    for name in ("mean_token_accuracy", "entropy", "num_tokens", "shared_share"):
        assert [a[name] for a in plain.logs] == pytest.approx([b[name] for b in replayed.logs], rel=1e-5), name


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_random_numbers_are_those_of_the_smaller_budget(part: str):
    """Dropout: equal, to the bit, to a run that had the budget from its beginning."""
    trainer = sft(**dropped(), **STEPS)
    inject(trainer, part, 20)
    replayed = run(trainer)
    assert trainer.recovery.budget is not None
    bit_equal(run(sft(**dropped(), max_tokens_per_forward=trainer.recovery.budget, **STEPS)), replayed)


def test_gradients_of_the_failed_pass_are_thrown_away(monkeypatch: pytest.MonkeyPatch):
    """The mutant keeps them: the law above then fails."""
    monkeypatch.setattr(torch.nn.Module, "zero_grad", lambda *args, **kwargs: None)
    fields: dict[str, Any] = {**STEPS, "max_steps": 1}
    plain = run(sft(**fields))
    trainer = sft(**fields)
    inject(trainer, "backward", 20)
    with pytest.raises(AssertionError):
        same(plain, run(trainer))


def test_the_budget_is_kept_and_logged():
    trainer = sft(**STEPS, logging_steps=2)
    failed = inject(trainer, "forward", 20, steps=(1, 2))
    logs = run(trainer).logs
    budget = trainer.recovery.budget
    assert budget is not None and max(failed) // 8 <= budget <= max(failed) // 2
    events = [line for line in trainer.state.log_history if line.get("event") == "out_of_memory"]
    assert [event["step"] for event in events] == [1] * len(events)  # the second step began with the budget
    assert events[-1]["max_tokens_per_forward"] == budget and events[0]["part"] == "forward"
    assert logs[0]["out_of_memory"] == len(events) == len(failed)


def test_a_resumed_run_keeps_the_budget(tmp_path: Any):
    fields = {**STEPS, "output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 1}
    first = sft(**fields)
    inject(first, "forward", 20)
    run(first)
    again = sft(**fields)
    run(again, resume=str(tmp_path / "checkpoint-1"))
    assert again.recovery.budget == first.recovery.budget is not None


def test_a_row_that_does_not_fit_is_named():
    trainer = sft(rows=Dataset.from_list([{"input_ids": [3, 4, 5]}, {"input_ids": list(range(3, 63))}]), max_steps=1)
    inject(trainer, "backward", 20)
    with pytest.raises(OutOfMemoryError, match=r"step 1: .*backward of row 1 .*60 tokens.*`max_length` below 60"):
        run(trainer)


def test_out_of_memory_in_the_optimizer_ends_the_run(monkeypatch: pytest.MonkeyPatch):
    trainer = sft(optim="adamw_torch")

    def step(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    trainer.create_optimizer()
    monkeypatch.setattr(type(trainer.optimizer), "step", step)
    with pytest.raises(OutOfMemoryError, match=r"step 1, optimizer step.*some of whose weights may have changed"):
        run(trainer)


def test_other_errors_are_not_taken_for_it():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(RuntimeError("MPS backend out of memory"))
    assert not is_out_of_memory(RuntimeError("size mismatch")) and not is_out_of_memory(ValueError("out of memory"))
    assert not is_out_of_memory(OutOfMemoryError("out of memory"))
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60)
    assert is_out_of_memory(raised.value)


# ---- two processes ---------------------------------------------------------------------------------------------------


def train_failing(part: str, tokens: int, on: int, strategy: str = "ddp", **settings: Any) -> tuple[Any, Any, int]:
    with clean():
        trainer = sft(**STRATEGIES[strategy], **settings)
        failed = inject(trainer, part, tokens, on=on)
        done = run(trainer)
    return done, trainer.recovery.budget, len(failed)


@pytest.mark.parametrize("part", ["forward", "backward"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_one_rank_replays_under_ddp(part: str, accumulation: int):
    """With an accumulation of 1 the only pass of the step exchanges gradients."""
    settings = {"gradient_accumulation_steps": accumulation, "max_steps": 2, "rows": token_rows(24, longest=12)}
    settings["per_device_train_batch_size"] = 4
    (one, budget, failed), (other, its, none) = POOL.run(train_failing, part=part, tokens=20, on=0, **settings)
    assert failed and not none and budget == its
    same(one, other, tolerance=0.0)
    plain = POOL.run(train_failing, part=part, tokens=1000, on=0, **settings)[0][0]
    same(plain, one)
    assert [a["mean_token_accuracy"] for a in plain.logs] == pytest.approx([a["mean_token_accuracy"] for a in one.logs])
    assert one.logs[0]["out_of_memory"] == failed


def end_failing(**settings: Any) -> str:
    try:
        train_failing(**settings)
    except OutOfMemoryError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("zero2", marks=pytest.mark.slow)])
def test_sharded_ranks_end_together(strategy: str):
    """The rank that failed raises, the other is ended by its watch: the pool loses it, and does not hang."""
    with pytest.raises(PoolError, match=r"ranks \[0\] died"):
        POOL.run(end_failing, part="forward", tokens=20, on=1, strategy=strategy, max_steps=2)


# ---- a budget measured ahead -----------------------------------------------------------------------------------------


class Fake:
    """A device whose peak is 2,000 bytes and 100 a token."""

    def __init__(self, engine: Any, size: int) -> None:
        self.engine, self.size = engine, size

    def reset(self) -> None:
        pass

    def peak(self) -> int:
        return 2000 + 100 * self.engine.recovery._at.piece.batch.num_tokens

    def capacity(self) -> int:
        return self.size


def train_measured(sizes: tuple[int, int] | None, strategy: str = "fsdp2") -> tuple[Any, Any, list[int]]:
    """`sizes`: memory of each rank."""
    with clean():
        trainer = sft(**STRATEGIES[strategy], rows=token_rows(48, longest=12), per_device_train_batch_size=6)
        if sizes is not None:
            trainer.recovery.memory = lambda: Fake(trainer, sizes[rank()])
        tokens, own = [], trainer.loss_step

        def loss_step(model: Any, exp: Any) -> Any:
            tokens.append(exp.batch.num_tokens)
            return own(model, exp)

        trainer.loss_step = loss_step
        return run(trainer).losses, trainer.recovery.budget, tokens


def test_a_budget_is_measured_and_agreed_under_fsdp2():
    plain = POOL.run(train_measured, sizes=None)
    measured = POOL.run(train_measured, sizes=(10**6, 5000))
    for (losses, budget, tokens), (whole, none, _) in zip(measured, plain, strict=True):
        assert budget == 25 and none is None  # (0.9 · 5000 − 2000) / 100, of the smaller rank
        assert losses == pytest.approx(whole, rel=1e-5)
        assert max(tokens) <= 25
    # In the third step pieces hold as much as fits, no longer one sequence.
    assert max(measured[0][2][-3:]) > 12
    longest = POOL.run(train_measured, sizes=(10**6, 10**6))
    assert all(budget > 5000 for _, budget, _ in longest)


def test_pieces_too_alike_say_nothing():
    probe = Probe(Fake(None, 10**6))
    assert probe.budget() is None
    probe._peaks = {100: 3000, 200: 4000}
    assert probe.budget() == (900000 - 2000) / 10
    probe._peaks = {100: 4000, 200: 4000}
    assert probe.budget() is None
