"""DeepSpeed ZeRO-2 and 3 on two ranks: what one process does."""

from __future__ import annotations

from typing import Any

import pytest
import strategies as s
import torch
from laws.runs import scratch, sft
from pool import POOL
from tiny import tiny_model

from posttrain import BEMACallback
from posttrain.errors import ConfigError
from posttrain.trainer.checkpoints import refuse_other_strategy

pytest.importorskip("deepspeed")
from deepspeed.utils import safe_get_full_fp32_param

STAGES = pytest.mark.parametrize("strategy", ["zero2", "zero3"])


@STAGES
def test_one_process_is_two_ranks(strategy):
    facts = s.one_is_two(strategy)
    assert facts["wrapper"] == "DeepSpeedEngine"
    assert (facts["partitioned"] == facts["parameters"]) == (strategy == "zero3")


def test_tied_embeddings_under_gradient_checkpointing():
    model = tiny_model("qwen3", tie_word_embeddings=True)
    s.one_is_two("zero3", model=model, gradient_checkpointing=True, max_steps=2, head_memory_mb=1)


@STAGES
@pytest.mark.parametrize("mutant", ["ranks_forgotten", "steps_in_every_backward", "divided_once_more"])
def test_mutants_are_caught(strategy, mutant):
    with s.caught():
        s.one_is_two(strategy, 8, split=2, mutant=mutant, max_steps=1)


@STAGES
def test_a_frozen_reference(strategy):
    assert s.reference_scores_alike(strategy)["partitioned"] == (strategy == "zero3")


def averaged() -> tuple[float, bool]:
    """How far BEMA's last copy of a weight is from ZeRO's master, and whether it is rounded to bfloat16."""
    model = tiny_model("qwen3")
    callback = BEMACallback(update_freq=1, ema_power=0.0, bias_power=100.0)  # β = 1, α = 0: the weights themselves
    with s.clean():
        trainer = sft(model, bf16=True, max_steps=2, **s.ADAM, **s.STRATEGIES["zero2"])
        trainer.add_callback(callback)
        trainer.train()
        name, weight = next(iter(model.named_parameters()))
        master = safe_get_full_fp32_param(weight)
        result = callback.bema.result[name]
        return float((result - master).abs().max()), torch.equal(result, result.bfloat16().float())


def test_averages_are_of_the_float32_masters():
    for far, rounded in POOL.run(averaged):
        assert far < 1e-7
        assert not rounded


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_an_adapter_resumed_by_two():
    s.resumed_is_whole("zero3", peft_config=s.lora())


def test_another_number_of_ranks_is_refused():
    _, settings, checkpoint = s.going_on("zero2")
    with pytest.raises(ConfigError, match="saved with DeepSpeed, and this run is without"):
        s.train(per_device_train_batch_size=4, resume=checkpoint, output_dir=scratch(), **settings)
    with pytest.raises(ConfigError, match="2 DeepSpeed processes, and this run has 1"):
        refuse_other_strategy(checkpoint, deepspeed=True, world_size=1)


# ---- refused ---------------------------------------------------------------------------------------------------------


def build(**fields: Any) -> str:
    with s.clean():
        try:
            sft(**fields)
        except ConfigError as error:
            return str(error)
    return ""


CONFLICTS = {
    "gradient_accumulation_steps": s.zero(2, gradient_accumulation_steps=7),
    "max_grad_norm": s.zero(2, gradient_clipping=3.0),
    "zero_optimization.stage": s.zero(0),
    "curriculum_learning": s.zero(2, curriculum_learning={"enabled": True}),
}


def test_configs_that_disagree_are_refused():
    for first, second in zip(*POOL.run(build_all), strict=True):
        assert first == second
    told = dict(zip(CONFLICTS, POOL.run(build_all)[0], strict=True))
    for name, text in told.items():
        assert name in text


def build_all() -> list[str]:
    return [build(**fields) for fields in CONFLICTS.values()]
