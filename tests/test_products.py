"""What a method multiplies: every distinct token once in the body, every read-out once in the head.

Operations are counted while the method runs, and held against the forest's own numbers and against separate rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from datasets import Dataset
from laws.runs import TRAINERS
from tiny import SHAPE, token_rows
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from posttrain.data.forest import build_forest, rows_of
from posttrain.model.head import label_head
from posttrain.trainer.unpaired import with_other_responses
from posttrain.types import TokenBatch

PROMPT = 40
FORWARD, BOTH = 1, 3  # products a weight: one forward, two more backward
_aten: Any = torch.ops.aten
# The attention of a CPU, which torch's counter does not know.
ATTENTION: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda d, q, k, v, *_, **__: sdpa_backward_flop_count(
        d, q, k, v
    ),
}


def rows(count: int = 3) -> Dataset:
    """Rows that begin with a prompt of 40 tokens of their own."""
    made = []
    for at, row in enumerate(token_rows(count)):
        prompt = [3 + (37 * at + 7 * i) % 290 for i in range(PROMPT)]
        made.append({"input_ids": prompt + row["input_ids"], "labels": [-100] * PROMPT + row["input_ids"]})
    return Dataset.from_list(made)


def counted(work: Callable[[], Any]) -> tuple[int, Any]:
    """Operations of matrix products and of attention, and what the work gave."""
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        found = work()
    return counter.get_total_flops(), found


@dataclass(frozen=True)
class Weights:
    """How many multiply each token, and how many each read-out."""

    body: int
    head: int

    @classmethod
    def of(cls, model: Any) -> Weights:
        head = label_head(model) or model.get_output_embeddings()
        body = [m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
        return cls(sum(body), head.weight.numel())

    def operations(self, tokens: int, read_outs: int, seen: int, products: int) -> int:
        """`seen`: keys over which queries go. Attention is two products forward and five backward."""
        attention = SHAPE["num_hidden_layers"] * SHAPE["num_attention_heads"] * SHAPE["head_dim"] * seen
        weights = self.body * tokens + self.head * read_outs
        return 2 * (products * weights + (2 if products == FORWARD else 7) * attention)

    def on(self, batch: TokenBatch, products: int) -> int:
        """Operations over a forest: a segment's queries go over the keys of its ancestors and its own."""
        assert batch.distinct is None  # no read-out twice
        segments = batch.segments
        seen = sum(n * len(segments.positions(k)) for k, n in enumerate(segments.sizes))
        return self.operations(batch.num_tokens, len(batch.read_from), seen, products)


def begin(method: str, count: int) -> tuple[Any, TokenBatch, Weights]:
    trainer = TRAINERS[method](rows=rows())
    trainer.model_wrapped = trainer.model
    batch = trainer.collator([trainer.train_dataset[i] for i in range(count)])["batch"]
    return trainer, batch, Weights.of(trainer.model)


def row_by_row(trainer: Any, batch: TokenBatch, weights: Weights) -> int:
    """Operations of the model's own forward and backward, a row at a time, its head at every token."""
    total, lengths = 0, [len(row.input_ids) for row in rows_of(batch)]
    for row in rows_of(batch):
        ids = torch.tensor([row.input_ids])
        total += counted(lambda ids=ids: trainer.model(input_ids=ids).logits.sum().backward())[0]
    tokens, seen = sum(lengths), sum(n * n for n in lengths)
    assert total == weights.operations(tokens, tokens, seen, BOTH)
    return total


@torch.no_grad()
def before(trainer: Any, batch: TokenBatch) -> tuple[int, Any]:
    found, (exp,) = counted(lambda: trainer.experience([batch]))
    return found, exp


def step(trainer: Any, exp: Any) -> int:
    return counted(lambda: trainer.loss_step(trainer.model, exp).total.backward())[0]


@pytest.mark.parametrize("method", ["dpo", "reward"])
@pytest.mark.parametrize("pairs", [1, 3])
def test_a_pair_costs_its_prompt_once(method: str, pairs: int):
    trainer, batch, weights = begin(method, pairs)
    assert batch.num_tokens == batch.unshared_tokens - pairs * PROMPT
    found, exp = before(trainer, batch)
    assert found == (weights.on(batch, FORWARD) if method == "dpo" else 0)  # the reference, over the same forest
    found = step(trainer, exp)
    assert found == weights.on(batch, BOTH)
    unshared = build_forest(rows_of(batch), share=False, own=batch.own)
    assert found < weights.on(unshared, BOTH) < row_by_row(trainer, batch, weights)


def test_a_window_of_kto_costs_its_prompts_once():
    """Own and mismatched responses stand behind one prompt for the reference; the policy scores either alone."""
    trainer, batch, weights = begin("kto", 3)
    (others,) = with_other_responses([batch], None, 128)
    mismatched = build_forest(others)
    both = build_forest([row for pair in zip(rows_of(batch), others, strict=True) for row in pair])
    responses = sum(len(row.input_ids) - PROMPT for row in others)
    assert both.num_tokens == batch.num_tokens + responses
    found, exp = before(trainer, batch)
    assert found == weights.on(both, FORWARD) + weights.on(mismatched, FORWARD)
    found = step(trainer, exp)
    assert found == weights.on(batch, BOTH) < row_by_row(trainer, batch, weights)


def test_steps_of_a_row_cost_one_pass():
    """A process reward model reads many steps from one pass over the row."""
    trainer, batch, weights = begin("prm", 3)
    assert len(batch.read_from) > 3
    found = step(trainer, before(trainer, batch)[1])
    assert found == weights.on(batch, BOTH) < row_by_row(trainer, batch, weights)
