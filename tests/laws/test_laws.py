"""The laws: what may change the cost of a step and never its result. Over all trainers, on losses and gradients.

Every law has a mutant that must fail it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from laws.mutants import active, applied
from laws.runs import (
    TRAINERS,
    Run,
    as_prm,
    as_reward,
    bit_equal,
    labelled_from,
    pairs_from,
    run,
    same,
    scratch,
    steps_from,
)
from peft import LoraConfig
from pool import POOL
from tiny import tiny_model, token_rows
from torch.nn.functional import cross_entropy

from posttrain.model.scoring import bind_head

LAWS: dict[str, Law] = {}
# Laws that say nothing of a trainer: pairs are not packed into bins.
WITHOUT = {"dpo": {"packing", "resume_packed"}, "kto": {"packing", "resume_packed"}}
WITHOUT |= dict.fromkeys(("reward", "prm"), WITHOUT["dpo"])
# Metrics that differ from micro-batch to micro-batch.
METRICS = {
    "sft": ("entropy", "mean_token_accuracy"),
    "kto": ("entropy", "logps/chosen", "lengths/rejected", "kl"),
    "reward": ("accuracy", "margin", "mean_reward", "brier"),
    "prm": ("accuracy", "accuracy/correct", "accuracy/incorrect", "brier"),
    "dpo": ("entropy", "logps/chosen", "lengths/rejected", "loss/sft"),
}


@dataclass(frozen=True)
class Law:
    check: Callable[[str], None]  # raises AssertionError where the law is broken
    mutants: tuple[str, ...]


def law(*mutants: str) -> Callable[[Callable[[str], None]], Callable[[str], None]]:
    def add(check: Callable[[str], None]) -> Callable[[str], None]:
        LAWS[check.__name__] = Law(check, mutants)
        return check

    return add


def rows_with_prefix() -> Any:
    """12 rows that start with the same 20 tokens, and go on differently."""
    return token_rows(prefix=20)


def train(trainer: str, **settings: Any) -> Run:
    return run(TRAINERS[trainer](**settings))


# ---- memory knobs ----------------------------------------------------------------------------------------------------


@law("mean_of_micro_batch_means")
def accumulation(trainer: str) -> None:
    """4 × 1 = 2 × 2 = 1 × 4, over rows of unequal target counts."""
    one = train(trainer, per_device_train_batch_size=4)
    for size in (2, 1):
        same(one, train(trainer, per_device_train_batch_size=size, gradient_accumulation_steps=4 // size))


@law("neighbours_seen")
def layout(trainer: str) -> None:
    """Padded = packed without sharing = packed with common prefixes computed once."""
    runs = {
        name: train(trainer, rows=rows_with_prefix(), layout=name) for name in ("padded", "packed-unshared", "packed")
    }
    assert runs["packed"].logs[0]["shared_share"] > 0.1
    assert runs["packed-unshared"].logs[0]["shared_share"] == 0
    assert runs["padded"].logs[0]["padding_share"] > 0
    same(runs["padded"], runs["packed-unshared"])
    same(runs["padded"], runs["packed"])


@law("neighbours_seen")
def packing(trainer: str) -> None:
    """Bins = rows, when one step holds them all."""
    loose = train(trainer, per_device_train_batch_size=12, max_steps=2, layout="padded")
    packed = train(trainer, per_device_train_batch_size=12, max_steps=2, packing=True)
    same(loose, packed)


@law("first_chunk_twice")
def chunk_size(trainer: str) -> None:
    """The head may project 1, 3 or 7 read-outs at a time, or all, in any memory."""
    whole = train(trainer)
    for chunk in (1, 3, 7):
        same(whole, train(trainer, head_chunk_tokens=chunk))
    same(whole, train(trainer, model=tiny_model("qwen3"), head_memory_mb=1))


@law("piece_lost")
def token_budget(trainer: str) -> None:
    """A micro-batch may run in pieces, with and without a common prefix."""
    for rows in (token_rows(), rows_with_prefix()):
        settings = {"rows": rows, "per_device_train_batch_size": 6, "max_steps": 2}
        whole = train(trainer, **settings)
        for budget in (1, 40):
            same(whole, train(trainer, max_tokens_per_forward=budget, **settings))


@law("left_padding_read_as_right")
def padding_side(trainer: str) -> None:
    """C21: padding on the left = on the right, to any multiple."""

    def padded(side: str, multiple: int | None = None) -> Run:
        built = TRAINERS[trainer](layout="padded", pad_to_multiple_of=multiple)
        bind_head(built.model, replace(built.model._posttrain_scoring, padding_side=side))
        return run(built)

    same(padded("right"), padded("left"))
    same(padded("right"), padded("left", multiple=16))


@law("other_keys_in_recomputation")
def checkpointing(trainer: str) -> None:
    """Recomputing activations = keeping them."""
    kept = train(trainer, rows=rows_with_prefix())
    same(kept, train(trainer, rows=rows_with_prefix(), gradient_checkpointing=True))


@law("offloaded_in_half_precision")
def offloading(trainer: str) -> None:
    """Activations in host memory = where they were."""
    same(train(trainer), train(trainer, activation_offloading=True))
    same(train(trainer), train(trainer, activation_offloading=True, gradient_checkpointing=True))


# ---- one loss --------------------------------------------------------------------------------------------------------


@law("mean_of_eval_means", "mask_forgotten")
def train_is_eval(trainer: str) -> None:
    """The first training loss over all rows = the evaluation before it, at any batch size, by hand."""
    first = train(trainer, per_device_train_batch_size=12, max_steps=1).losses[0]
    for size in (1, 5, 12):
        built = TRAINERS[trainer](eval_rows=token_rows(), per_device_eval_batch_size=size)
        assert built.evaluate()["eval_loss"] == pytest.approx(first, rel=1e-5)
    assert PLAIN[trainer](tiny_model("qwen3"), token_rows()) == pytest.approx(first, rel=1e-5)


def plain_loss(model: Any, rows: Any) -> float:
    """Mean negative log-likelihood of all targets, row by row, from the model's own logits."""
    total, count = 0.0, 0
    for row in rows:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum").item()
        count += int((labels[1:] != -100).sum())
    return total / count


def plain_pair_loss(model: Any, rows: Any) -> float:
    """−log σ(−margin) of a policy that is its own reference, and the mean negative log-likelihood of the chosen
    response; a weighted mean over pairs, from the model's own logits."""
    total, weights = 0.0, 0.0
    for pair in pairs_from(rows):
        ids, prompt = torch.tensor(pair["prompt_ids"] + pair["chosen_ids"]), len(pair["prompt_ids"])
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, prompt - 1 : -1]
        nll = torch.nn.functional.cross_entropy(logits, ids[prompt:]).item()
        total += pair["sample_weight"] * (math.log1p(math.exp(pair["margin"])) + nll)
        weights += pair["sample_weight"]
    return total / weights


def plain_labelled_loss(model: Any, rows: Any) -> float:
    """λ/2 of a policy that is its own reference: z is 0. A weighted mean."""
    labelled = labelled_from(rows)
    weights = [row["sample_weight"] for row in labelled]
    losses = [0.75 if row["label"] else 0.5 for row in labelled]
    return sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)


def plain_reward_loss(model: Any, rows: Any) -> float:
    """−log σ(r_w − r_l − m) + 0.05 (r_w + r_l)², a weighted mean, from the model's own pooled outputs."""
    judge, total, weights = as_reward(model), 0.0, 0.0
    judge.config.pad_token_id = None  # one row at a time: its last token, whichever it is
    for pair in pairs_from(rows):
        ids = (torch.tensor([pair["prompt_ids"] + pair[side]]) for side in ("chosen_ids", "rejected_ids"))
        with torch.no_grad():
            w, l = (judge(input_ids=each).logits.item() for each in ids)
        loss = math.log1p(math.exp(pair["margin"] - w + l)) + 0.05 * (w + l) ** 2
        total += pair["sample_weight"] * loss
        weights += pair["sample_weight"]
    return total / weights


def plain_step_loss(model: Any, rows: Any) -> float:
    """Cross-entropy of the two labels at the end of each step, a weighted mean, from the model's own logits."""
    judge, total, weights = as_prm(model).eval(), 0.0, 0.0
    for row in steps_from(rows):
        with torch.no_grad():
            logits = judge(input_ids=torch.tensor([row["input_ids"]])).logits[0]
        labels = torch.tensor(row["labels"])
        total += row["sample_weight"] * cross_entropy(logits, labels, reduction="sum").item()
        weights += row["sample_weight"] * int((labels != -100).sum())
    return total / weights


PLAIN = {"sft": plain_loss, "dpo": plain_pair_loss, "kto": plain_labelled_loss, "reward": plain_reward_loss}
PLAIN["prm"] = plain_step_loss


@law("adapter_not_zero")
def zero_adapter_is_base(trainer: str) -> None:
    """LoRA with B = 0: the base's loss; dB = s · dW Aᵀ, dA = 0."""
    target = "model.layers.0.mlp.down_proj"
    base = train(trainer, max_steps=1)
    built = TRAINERS[trainer](max_steps=1, peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["down_proj"]))
    A = built.model.get_submodule(f"base_model.model.{target}").lora_A["default"].weight.detach().clone()
    adapted = run(built)
    assert adapted.losses == pytest.approx(base.losses, rel=1e-6)
    name = f"base_model.model.{target}.lora_{{}}.default.weight"
    expected = 2.0 * base.gradients[f"{target}.weight"] @ A.T
    torch.testing.assert_close(adapted.gradients[name.format("B")], expected, rtol=1e-4, atol=1e-7)
    assert adapted.gradients[name.format("A")].abs().max() == 0


@law("mean_of_means")
def metrics_add_up(trainer: str) -> None:
    """Means over micro-batches weigh by tokens: 4 × 1 = 1 × 4, over one log line of several steps too."""
    # Targets the model is good at in some rows only, so that their means differ.
    model = sure_model()
    settings: dict[str, Any] = {"learning_rate": 0.0, "max_steps": 1, "rows": token_rows(masked=False)}
    one = train(trainer, model=model, per_device_train_batch_size=12, **settings)
    four = train(trainer, model=model, per_device_train_batch_size=1, gradient_accumulation_steps=12, **settings)
    assert trainer in ("reward", "prm") or one.logs[0]["entropy"] < 5.6
    for name in (*METRICS[trainer], "num_tokens"):
        assert one.logs[0][name] == pytest.approx(four.logs[0][name], rel=1e-5)


def sure_model() -> Any:
    """A model with peaked logits: entropies vary from token to token."""
    model = tiny_model("qwen3")
    with torch.no_grad():
        model.lm_head.weight.mul_(20.0)
    return model


# ---- two processes ---------------------------------------------------------------------------------------------------


def on_two(trainer: str, **settings: Any) -> Run:
    """The same run by two processes; both must end alike."""
    first, second = POOL.run(train_ranked, trainer=trainer, mutant=active(), **settings)
    same(first, second, tolerance=0.0)
    return first


def train_ranked(trainer: str, mutant: str | None, **settings: Any) -> Run:
    with applied(mutant):
        return train(trainer, **settings)


@law("ranks_forgotten", "mean_of_micro_batch_means")
def world_size(trainer: str) -> None:
    """1 process × 4 rows = 2 processes × 2 rows = 2 processes × 1 row × 2 micro-batches."""
    one = train(trainer, per_device_train_batch_size=4)
    same(one, on_two(trainer, per_device_train_batch_size=2))
    same(one, on_two(trainer, per_device_train_batch_size=1, gradient_accumulation_steps=2))


@law("rows_repeated")
def uneven_rows(trainer: str) -> None:
    """9 rows, 8 a step: in the last step one rank has one row and the other none."""
    settings: dict[str, Any] = {"rows": token_rows(9), "max_steps": -1, "num_train_epochs": 2}
    one = train(trainer, per_device_train_batch_size=8, **settings)
    two = on_two(trainer, per_device_train_batch_size=2, gradient_accumulation_steps=2, **settings)
    assert len(one.losses) == 4
    same(one, two)


@law("piece_lost")
def token_budget_on_two(trainer: str) -> None:
    """Ranks cut their micro-batches into unequal numbers of pieces."""
    settings: dict[str, Any] = {"rows": token_rows(7, longest=40), "max_steps": 2}
    one = train(trainer, per_device_train_batch_size=6, **settings)
    same(one, on_two(trainer, per_device_train_batch_size=3, max_tokens_per_forward=30, **settings))


@law("rows_repeated")
def evaluation_on_two(trainer: str) -> None:
    """Evaluation of 5 rows by two processes, 2 at a time, = by one."""
    settings: dict[str, Any] = {"eval_rows": token_rows(5, seed=3), "per_device_eval_batch_size": 2}
    one = TRAINERS[trainer](**settings).evaluate()
    for two in POOL.run(evaluate_ranked, trainer=trainer, mutant=active(), **settings):
        for name in ("eval_loss", *(f"eval_{metric}" for metric in METRICS[trainer])):
            assert two[name] == pytest.approx(one[name], rel=1e-5)


def evaluate_ranked(trainer: str, mutant: str | None, **settings: Any) -> dict[str, float]:
    with applied(mutant):
        return TRAINERS[trainer](**settings).evaluate()


@law("cursor_not_restored")
def two_resumed_by_one(trainer: str) -> None:
    """A checkpoint of two processes goes on in one."""
    folder = scratch()
    settings: dict[str, Any] = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2, "output_dir": folder}
    whole = on_two(trainer, per_device_train_batch_size=2, **settings)
    # Half the processes, twice the rows: the same windows.
    rest = run(TRAINERS[trainer](per_device_train_batch_size=4, **settings), resume=f"{folder}/checkpoint-2")
    assert len(rest.losses) == 5
    assert rest.losses == pytest.approx(whole.losses, rel=1e-5)


# ---- resuming --------------------------------------------------------------------------------------------------------

LORA = {"r": 4, "lora_dropout": 0.3, "target_modules": ["q_proj", "down_proj"]}


def resumed(trainer: str, stop: int, packing: bool = False) -> tuple[Run, Run]:
    """A run of 8 steps (3 an epoch), and one that goes on from the checkpoint written at `stop`. Rows are shuffled and
    the adapter has dropout."""
    folder = scratch()
    settings: dict[str, Any] = {
        "max_steps": 8,
        "per_device_train_batch_size": 1 if packing else 2,
        "gradient_accumulation_steps": 2,
        "optim": "adamw_torch",
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "save_strategy": "steps",
        "save_steps": stop,
        "output_dir": folder,
        **({"packing": True} if packing else {}),
    }

    def build() -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return TRAINERS[trainer](peft_config=LoraConfig(**LORA), **settings)

    whole = run(build())
    rest = run(build(), resume=str(Path(folder) / f"checkpoint-{stop}"))
    # state.log_history is in the checkpoint, so the resumed run tells of all 8 steps.
    return whole, rest


@law("randomness_not_restored", "cursor_not_restored")
def resume_mid_epoch(trainer: str) -> None:
    """Stopped at step 2 of 3 in the first epoch: the same bits."""
    bit_equal(*resumed(trainer, stop=2))


@law("randomness_not_restored", "epoch_not_restored")
def resume_later_epoch(trainer: str) -> None:
    """Stopped at step 5, in the middle of the second epoch: the same bits."""
    bit_equal(*resumed(trainer, stop=5))


@law("randomness_not_restored")
def resume_between_epochs(trainer: str) -> None:
    """Stopped at step 3, the end of the first epoch: the same bits."""
    bit_equal(*resumed(trainer, stop=3))


@law("randomness_not_restored")
def resume_packed(trainer: str) -> None:
    """Bins are found again."""
    bit_equal(*resumed(trainer, stop=3, packing=True))


# ---- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "trainer"), [(n, t) for n in LAWS for t in TRAINERS if n not in WITHOUT.get(t, set())]
)
def test_law(name: str, trainer: str) -> None:
    LAWS[name].check(trainer)


# One trainer a law: the first.
@pytest.mark.parametrize(("name", "mutant"), [(name, m) for name, each in LAWS.items() for m in each.mutants])
def test_mutant_breaks_law(name: str, mutant: str) -> None:
    with applied(mutant), pytest.raises(AssertionError):
        LAWS[name].check(next(iter(TRAINERS)))
