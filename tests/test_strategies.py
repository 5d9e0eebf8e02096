"""DDP, FSDP2 and DeepSpeed on two ranks: what one process does, in every strategy alike.

What only one of them has is in test_fsdp2.py and test_deepspeed.py.
"""

from __future__ import annotations

import importlib.util

import pytest
import strategies as s
from pool import POOL
from tiny import token_rows

_ZERO = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
NAMES = ["ddp", "fsdp2", *(pytest.param(name, marks=_ZERO) for name in ("zero1", "zero2", "zero3"))]
EVERY = pytest.mark.parametrize("strategy", NAMES)


@EVERY
def test_accumulation_pieces_and_empty_micro_batches(strategy):
    """9 rows, 8 a step, in pieces: at the end one rank has one row and the other none."""
    rows = token_rows(9)
    s.one_is_two(strategy, 8, split=2, rows=rows, max_tokens_per_forward=30, max_steps=-1, num_train_epochs=1)


@EVERY
def test_clipped_steps_and_norms(strategy):
    s.clipped_one_is_two(strategy)


@EVERY
def test_model_by_name(strategy):
    s.named_is_object(strategy)


@EVERY
def test_adapter(strategy):
    s.adapted_one_is_two(strategy)


@EVERY
def test_mixture_of_experts(strategy):
    s.mixture_one_is_two(strategy)


@EVERY
def test_long_rope(strategy):
    s.long_rope_one_is_two(strategy)


@EVERY
def test_adapter_of_the_head(strategy):
    s.head_adapted_one_is_two(strategy)


@EVERY
def test_modules_to_save_of_a_half_precision_base(strategy):
    s.half_copy_one_is_two(strategy)


@EVERY
def test_evaluation(strategy):
    s.evaluation_is_ones(strategy)


@EVERY
def test_nothing_is_rounded_on_its_way(strategy):
    s.nothing_is_rounded(strategy)


@EVERY
def test_nan_on_one_rank_stops_both(strategy):
    for told in POOL.run(s.train_poisoned, strategy=strategy):
        assert "step 1" in told


@EVERY
def test_a_step_without_units_changes_nothing(strategy):
    s.an_empty_step_changes_nothing(strategy)


@pytest.mark.parametrize("strategy", [*NAMES, "fsdp2-sharded"])
def test_resumed_by_two(strategy):
    s.resumed_is_whole(strategy)
