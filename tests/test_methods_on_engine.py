"""Preference and reward methods have what SFT has of the engine: experts, adapters, quantized bases, checkpointing,
offload, token budgets, and steps that are run again when memory runs out."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from data_fixtures import byte_tokenizer
from datasets import Dataset
from families import build as build_family
from laws.runs import FIELDS, TRAINERS, Run, labelled_from, pairs_from, run, same, scratch, sft, steps_from
from peft import LoraConfig
from pool import POOL
from test_recovery import inject
from tiny import tiny_model, token_rows
from transformers import BitsAndBytesConfig

import posttrain
from posttrain.model.load import base_model

METHODS = ["dpo", "kto", "reward", "prm"]
EVERY = pytest.mark.parametrize("method", METHODS)
WAYS: dict[str, dict[str, Any]] = {
    "accumulation": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
    "budget": {"max_tokens_per_forward": 40},
    "checkpointing": {"gradient_checkpointing": True},
    "offload": {"activation_offloading": True},
    "offload and matmul": {
        "activation_offloading": True,
        "gradient_checkpointing": True,
        "activation_checkpointing_policy": "matmul",
    },
}
TWO_STEPS: dict[str, Any] = {"per_device_train_batch_size": 4, "max_steps": 2}


def lora(**more: Any) -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **more)


def ways_are_plain(build: Any, tolerance: float = 1e-5) -> Run:
    """Every way = the plain run. Returns that."""

    def built(**fields: Any) -> Run:
        torch.manual_seed(0)  # the adapter's weights
        return run(build(**TWO_STEPS | fields))

    plain = built()
    for name, fields in WAYS.items():
        try:
            same(plain, built(**fields), tolerance)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    return plain


@EVERY
def test_an_adapter(method: str):
    plain = ways_are_plain(lambda **fields: TRAINERS[method](peft_config=lora(), rows=token_rows(prefix=20), **fields))
    trained = {name: g for name, g in plain.gradients.items() if "lora_" in name}
    assert len(trained) == 2 * 2 * 2 and all(g.abs().max() > 0 for g in trained.values())


# ---- experts ---------------------------------------------------------------------------------------------------------


def experts(method: str, **fields: Any) -> Any:
    return TRAINERS[method](model=build_family("qwen3-moe"), **fields)


@EVERY
def test_experts(method: str):
    """Their balance loss weighs as much as the rest."""
    plain = ways_are_plain(lambda **fields: experts(method, router_aux_loss_coef=1.0, **fields))
    balanced, free = plain.logs[0], run(experts(method, router_aux_loss_coef=0.0, **TWO_STEPS)).logs[0]
    assert balanced["loss"] == pytest.approx(free["loss"] + balanced["aux_loss"], rel=1e-5)
    assert "aux_loss" not in free


def sequences(method: str) -> list[list[int]]:
    rows = token_rows(4)
    if method in ("dpo", "reward"):
        return [pair["prompt_ids"] + pair[side] for pair in pairs_from(rows) for side in ("chosen_ids", "rejected_ids")]
    if method == "prm":  # up to the end of its last step
        steps = steps_from(rows)
        return [row["input_ids"][: max(i for i, mark in enumerate(row["labels"]) if mark >= 0) + 1] for row in steps]
    return [row["input_ids"] for row in rows]


@EVERY
def test_the_balance_loss_is_that_of_sft_on_the_same_sequences(method: str):
    rows = [{"input_ids": ids} for ids in sequences(method)]
    fields: dict[str, Any] = {"max_steps": 1, "per_device_train_batch_size": 8, "router_aux_loss_coef": 0.5}
    want = run(sft(model=build_family("qwen3-moe"), rows=rows, **fields)).logs[0]["aux_loss"]
    assert run(experts(method, rows=token_rows(4), **fields)).logs[0]["aux_loss"] == pytest.approx(want, rel=1e-5)


# ---- quantized bases -------------------------------------------------------------------------------------------------

NAMES = {"dpo": "DPO", "kto": "KTO", "reward": "Reward", "prm": "PRM"}
ROWS = {"dpo": pairs_from, "reward": pairs_from, "kto": labelled_from, "prm": steps_from}


@pytest.fixture(scope="module")
def wide() -> str:
    folder = scratch()
    tiny_model("qwen3", hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(folder)
    return folder


@EVERY
def test_a_4_bit_base(method: str, wide: str):
    pytest.importorskip("bitsandbytes")

    def build(**fields: Any) -> Any:
        args = getattr(posttrain, f"{NAMES[method]}Config")(
            **FIELDS | {"output_dir": scratch(), "learning_rate": 0.1} | fields
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getattr(posttrain, f"{NAMES[method]}Trainer")(
                wide,
                args=args,
                train_dataset=ROWS[method](token_rows()),
                processing_class=byte_tokenizer(),
                peft_config=lora(),
                quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32),
            )

    built = build()
    assert type(base_model(built.model).model.layers[0].self_attn.q_proj.base_layer).__name__ == "Linear4bit"
    plain = ways_are_plain(build, tolerance=1e-4)
    if method == "dpo":
        assert plain.logs[0]["rewards/chosen"] == pytest.approx(0, abs=1e-5)  # its reference is the adapter as it was


# ---- out of memory ---------------------------------------------------------------------------------------------------

# Tokens that a row or a pair alone stays under, as do four short ones, and four long ones do not.
LIMIT = {"dpo": 60, "reward": 60, "kto": 30, "prm": 30}


def rows_of(lengths: list[int]) -> Dataset:
    made = []
    for at, n in enumerate(lengths):
        ids = [3 + (31 * at + 7 * i) % 290 for i in range(n)]
        made.append({"input_ids": ids, "labels": [-100] * (n // 3) + ids[n // 3 :]})
    return Dataset.from_list(made)


def failing(method: str, part: str, fails: bool, on: int | None = None) -> tuple[Run, int | None, list[int]]:
    """Three micro-batches a step, of 4 rows each; in one process the second has long rows, and fails."""
    lengths = [6] * 4 + [18, 19, 20, 21] + [6] * 4 if on is None else [18, 19, 20, 21] * 6
    trainer = TRAINERS[method](
        rows=rows_of(lengths),
        train_sampling_strategy="sequential",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        max_steps=2,
    )
    failed = inject(trainer, part, LIMIT[method] if fails else 1000, on=on)
    return run(trainer), trainer.recovery.budget, failed


@EVERY
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_memory_that_runs_out_in_the_middle_of_a_window(method: str, part: str):
    plain, _, seen = failing(method, part, fails=False)
    replayed, budget, failed = failing(method, part, fails=True)
    assert failed and not seen and budget is not None
    same(plain, replayed)
    for name, value in plain.logs[0].items():
        if name.startswith(("rewards/", "logps/", "accuracy", "margin", "brier", "kl")):
            assert replayed.logs[0][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@EVERY
def test_memory_that_runs_out_on_one_rank(method: str):
    (plain, _, _), _ = POOL.run(failing, method=method, part="backward", fails=False, on=0)
    (one, budget, failed), (other, its, none) = POOL.run(failing, method=method, part="backward", fails=True, on=0)
    assert failed and not none and budget == its
    same(one, other, tolerance=0.0)
    same(plain, one)


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_the_reference_is_scored_within_the_budget_found(method: str):
    trainer = TRAINERS[method](rows=rows_of([18, 19, 20, 21]), per_device_train_batch_size=4, max_steps=2)
    inject(trainer, "forward", LIMIT[method])
    sizes: dict[int, int] = {}
    own = trainer.reference.score

    def score(policy: Any, batch: Any) -> Any:
        step = trainer.state.global_step
        sizes[step] = max(sizes.get(step, 0), batch.num_tokens)
        return own(policy, batch)

    trainer.reference.score = score
    run(trainer)
    assert sizes[0] > LIMIT[method] > trainer.recovery.budget
    assert sizes[1] <= sizes[0] / 2  # a pair alone is over the budget
