"""What only two processes can show, beside the laws: errors reach both ranks, and a hang ends."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from datasets import Dataset
from laws.runs import run, sft
from pool import POOL, PoolError
from tiny import tiny_model, token_rows

from posttrain.errors import NonFiniteError
from posttrain.parallel.ranks import gather_objects, rank


def poisoned() -> dict[str, Any]:
    """Two rows a step, one a rank; the second row of each step meets a token whose embedding is NaN."""
    model = tiny_model("qwen3")
    with torch.no_grad():
        model.model.embed_tokens.weight[299] = float("nan")
    rows = Dataset.from_list([{"input_ids": [5, 6, 7, 8]}, {"input_ids": [9, 299, 10]}])
    return {"model": model, "rows": rows, "train_sampling_strategy": "sequential", "per_device_train_batch_size": 1}


def train_poisoned() -> tuple[str, float]:
    trainer = sft(**poisoned())
    try:
        run(trainer)
    except NonFiniteError as error:
        return str(error), float(trainer._window_loss)
    return "", 0.0


def test_nan_on_one_rank_stops_both():
    (first, first_loss), (second, second_loss) = POOL.run(train_poisoned)
    assert [torch.isnan(torch.tensor(x)).item() for x in (first_loss, second_loss)].count(True) == 1
    assert "step 1" in first
    assert "step 1" in second


def accuracy(prediction: Any) -> dict[str, float]:
    at = prediction.label_ids[:, 1:] != -100
    right = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    return {"rows": float(len(at)), "targets": float(at.sum()), "accuracy": float(right[at].mean())}


def evaluate_with_metrics() -> dict[str, float]:
    trainer = sft(eval_rows=token_rows(5, seed=1), per_device_eval_batch_size=2)
    trainer.compute_metrics = accuracy
    return trainer.evaluate()


def test_compute_metrics_sees_every_row_once():
    one = evaluate_with_metrics()
    assert one["eval_rows"] == 5
    for two in POOL.run(evaluate_with_metrics):
        for name in ("eval_rows", "eval_targets", "eval_accuracy"):
            assert two[name] == pytest.approx(one[name])


def who() -> list[int]:
    return gather_objects(rank())


def fail_on_rank_1() -> None:
    if rank() == 1:
        raise ValueError("no")


def hang_on_rank_1() -> None:
    if rank() == 1:
        time.sleep(600)


def test_ranks_answer_in_order():
    assert POOL.run(who) == [[0, 1], [0, 1]]


@pytest.mark.slow
def test_an_error_or_a_hang_ends_and_the_pool_starts_again():
    with pytest.raises(PoolError, match=r"rank 1:[\s\S]*ValueError: no"):
        POOL.run(fail_on_rank_1)
    with pytest.raises(PoolError, match="no answer after 2 s"):
        POOL.run(hang_on_rank_1, hang_seconds=2)
    assert POOL.run(who) == [[0, 1], [0, 1]]
