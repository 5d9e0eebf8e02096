"""Preference and reward methods on two ranks under FSDP2 and ZeRO-3: losses and gradients are those of one process,
with uneven rows, with every kind of reference, and with one class of rows on each rank."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import test_kto
import torch
from families import build as build_family
from laws.runs import TRAINERS, Run, same, scratch
from peft import LoraConfig, get_peft_model
from pool import POOL
from strategies import STRATEGIES, _Gradients, clean
from tiny import tiny_model, token_rows

from posttrain.model.handle import FrozenReference, StartingWeights, WithoutAdapter

_ZERO = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
STRATEGY = pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("zero3", marks=_ZERO)])


def train(method: str, strategy: str | None, **settings: Any) -> tuple[Run, str]:
    """Losses, the gradients of the first step, and the kind of the reference."""
    with clean():
        torch.manual_seed(0)  # the adapter's weights
        build = test_kto.kto if method == "labelled" else TRAINERS[method]
        trainer = build(**(STRATEGIES[strategy] if strategy else {}), **settings)
        gradients, reference = _Gradients(), type(getattr(trainer, "reference", None)).__name__
        trainer.add_callback(gradients)
        trainer.train()
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return Run(losses, gradients.found, gradients.found), reference


def one_is_two(method: str, strategy: str, **settings: Any) -> str:
    """4 rows a step. Returns the kind of the reference, which is the same on all ranks."""
    # A copy: a model that was trained cannot be sent to the ranks.
    one, kind = train(method, None, per_device_train_batch_size=4, **copy.deepcopy(settings))
    ranks = POOL.run(train, method=method, strategy=strategy, per_device_train_batch_size=2, **settings)
    for two, its in ranks:
        same(one, two)
        assert its == kind
    assert ranks[0][0].losses == ranks[1][0].losses
    return kind


@STRATEGY
@pytest.mark.parametrize("method", ["dpo", "kto", "reward", "prm"])
def test_uneven_rows(method: str, strategy: str):
    """5 rows, two passes: one rank has a row and the other none."""
    one_is_two(method, strategy, rows=token_rows(5), max_steps=-1, num_train_epochs=2)


@STRATEGY
@pytest.mark.parametrize("method", ["dpo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("kto", "reward"))])
def test_experts(method: str, strategy: str):
    """Their balance loss weighs as much as the rest, beside a reference that has experts too."""
    one_is_two(method, strategy, model=build_family("qwen3-moe"), router_aux_loss_coef=1.0, max_steps=2)


@STRATEGY
def test_a_class_of_kto_on_each_rank(strategy: str):
    rows = [row | {"label": at % 4 < 2} for at, row in enumerate(test_kto.labelled(8))]
    one_is_two("labelled", strategy, rows=rows, max_steps=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model, and an adapter on it, that load by name."""
    base, adapter = (str(tmp_path_factory.mktemp(name)) for name in ("base", "adapter"))
    tiny_model("qwen3").save_pretrained(base)
    torch.manual_seed(0)
    made = get_peft_model(tiny_model("qwen3"), lora(fresh=False))
    made.peft_config["default"].base_model_name_or_path = base
    made.save_pretrained(adapter)
    return {"object": "", "base": base, "adapter": adapter}


def lora(fresh: bool) -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=fresh, task_type="CAUSAL_LM")


REFERENCES: dict[str, tuple[str, Any, type]] = {
    "a frozen copy": ("object", None, FrozenReference),
    "a frozen copy, by name": ("base", None, FrozenReference),
    "a fresh adapter": ("base", lora(fresh=True), WithoutAdapter),
    "an adapter with weights": ("object", lora(fresh=False), StartingWeights),
    "a saved adapter": ("adapter", None, StartingWeights),
}


@STRATEGY
@pytest.mark.parametrize("method", ["dpo", pytest.param("kto", marks=pytest.mark.slow)])
@pytest.mark.parametrize("reference", REFERENCES)
def test_references(reference: str, method: str, strategy: str, folders: dict[str, str]):
    model, config, kind = REFERENCES[reference]
    given = {"peft_config": config} if config is not None else {}
    given |= {"model": folders[model]} if folders[model] else {}
    found = one_is_two(method, strategy, output_dir=scratch(), learning_rate=1.0, **given)
    assert found == kind.__name__


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero2", marks=_ZERO)])
def test_a_moving_reference(strategy: str, adapted: bool):
    given = {"peft_config": lora(fresh=False)} if adapted else {}
    one_is_two("dpo", strategy, sync_ref_model=True, ref_model_sync_steps=1, learning_rate=1.0, **given)
