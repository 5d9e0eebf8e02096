"""What the laws run: a trainer on a 2-layer random fp32 model, and what it did.

A new trainer joins the laws with one row in `TRAINERS`: a function that takes config fields, a model and rows, and
returns a trainer that is ready to train.
"""

from __future__ import annotations

import copy
import gc
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from data_fixtures import byte_tokenizer
from datasets import Dataset
from tiny import tiny_model, token_rows
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, TrainerCallback

from posttrain import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    PRMConfig,
    PRMTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

# A run of a trainer collects garbage; without this it looks at every object of torch and transformers each time.
gc.collect()
gc.freeze()

_SCRATCH = tempfile.TemporaryDirectory(prefix="posttrain-")  # removed when the session ends


def scratch() -> str:
    """A fresh folder."""
    return tempfile.mkdtemp(dir=_SCRATCH.name)


FIELDS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "max_steps": 3,
    # Plain gradient descent: Adam divides by the gradient's size, which would blow rounding up.
    "optim": "sgd",
    "learning_rate": 0.5,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "seed": 0,
    # Tests of the checks turn them on; a mutant of a law would be found by them, not by the law.
    "skip_self_checks": ["all"],
}


@dataclass
class Run:
    """What a training run did."""

    losses: list[float] = field(default_factory=list)  # one a log line
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the first optimizer step, before clipping
    weights: dict[str, Tensor] = field(default_factory=dict)  # at the end
    logs: list[dict[str, float]] = field(default_factory=list)


class _FirstGradients(TrainerCallback):
    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not self.found:
            self.found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def run(trainer: Any, resume: str | None = None) -> Run:
    """Train, and gather what happened."""
    first = _FirstGradients()
    trainer.add_callback(first)
    trainer.train(resume_from_checkpoint=resume)
    logs = [line for line in trainer.state.log_history if "loss" in line]
    weights = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    return Run([line["loss"] for line in logs], first.found, weights, logs)


def sft(
    model: Any = None,
    rows: Any = None,
    eval_rows: Any = None,
    peft_config: Any = None,
    packing: bool = False,
    tokenizer: Any = None,
    **fields: Any,
) -> SFTTrainer:
    """An SFT trainer on a tiny Qwen3, 12 rows of 4 to 24 tokens of which a third is masked."""
    fields = FIELDS | fields
    fields.setdefault("output_dir", scratch())
    return SFTTrainer(
        tiny_model("qwen3") if model is None else model,
        SFTConfig(**{"packing": packing, "max_length": 64} | fields),
        train_dataset=token_rows() if rows is None else rows,
        eval_dataset=eval_rows,
        processing_class=byte_tokenizer() if tokenizer is None else tokenizer,
        peft_config=peft_config,
    )


def pairs_from(rows: Any) -> Dataset:
    """Pairs of token ids from token rows: what is not trained is the prompt, the rest the chosen response; the rejected
    one is longer and ends with it backwards. Margins and weights differ from pair to pair."""
    made = []
    for at, row in enumerate(rows):
        border = max(1, sum(label == -100 for label in row["labels"]))
        prompt, chosen = row["input_ids"][:border], row["input_ids"][border:]
        rejected = [3 + at, *chosen[::-1], *chosen[: at % 3]]
        made.append({"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected})
        made[-1] |= {"margin": 0.1 * (at % 4), "sample_weight": 1.0 + at % 2}
    return Dataset.from_list(made)


def dpo(
    model: Any = None, rows: Any = None, eval_rows: Any = None, peft_config: Any = None, **fields: Any
) -> DPOTrainer:
    """A DPO trainer on a tiny Qwen3 and pairs made of the rows of `sft`. The likelihood of the chosen is mixed in: its
    loss depends on the weights before the first step too."""
    fields = {"loss_type": ["sigmoid", "sft"]} | FIELDS | {"learning_rate": 0.1} | fields
    fields.setdefault("output_dir", scratch())
    return DPOTrainer(
        tiny_model("qwen3") if model is None else model,
        args=DPOConfig(max_length=128, **fields),
        train_dataset=pairs_from(token_rows() if rows is None else rows),
        eval_dataset=None if eval_rows is None else pairs_from(eval_rows),
        processing_class=byte_tokenizer(),
        peft_config=peft_config,
    )


def labelled_from(rows: Any) -> Dataset:
    """Labelled responses of token ids from token rows: what is not trained is the prompt, the rest the response. Two of
    three are desirable."""
    made = []
    for at, row in enumerate(rows):
        border = max(1, sum(label == -100 for label in row["labels"]))
        prompt, response = row["input_ids"][:border], row["input_ids"][border:]
        made.append({"prompt_ids": prompt, "completion_ids": response, "label": at % 3 != 1})
        made[-1] |= {"sample_weight": 1.0 + at % 2}
    return Dataset.from_list(made)


def kto(
    model: Any = None, rows: Any = None, eval_rows: Any = None, peft_config: Any = None, **fields: Any
) -> KTOTrainer:
    """A KTO trainer on a tiny Qwen3 and labelled responses made of the rows of `sft`."""
    fields = {"beta": 0.5, "desirable_weight": 1.5} | FIELDS | {"learning_rate": 0.1} | fields
    fields.setdefault("output_dir", scratch())
    return KTOTrainer(
        tiny_model("qwen3") if model is None else model,
        args=KTOConfig(max_length=128, **fields),
        train_dataset=labelled_from(token_rows() if rows is None else rows),
        eval_dataset=None if eval_rows is None else labelled_from(eval_rows),
        processing_class=byte_tokenizer(),
        peft_config=peft_config,
    )


def as_reward(model: Any, auto: Any = AutoModelForSequenceClassification, labels: int = 1) -> Any:
    """A classification model over the body of a causal one, its head drawn once; another model as it is."""
    if isinstance(model, str) or model.get_output_embeddings() is None:
        return model
    config = copy.deepcopy(model.config)
    config.num_labels = labels
    with torch.random.fork_rng():
        torch.manual_seed(7)
        made = auto.from_config(config)
        torch.nn.init.normal_(made.score.weight, std=0.3)
    made.base_model.load_state_dict(model.base_model.state_dict())
    return made


def reward(
    model: Any = None, rows: Any = None, eval_rows: Any = None, peft_config: Any = None, **fields: Any
) -> RewardTrainer:
    """A reward trainer on a tiny Qwen3 and pairs made of the rows of `sft`."""
    fields = {"center_rewards_coefficient": 0.05} | FIELDS | {"learning_rate": 0.01} | fields
    fields.setdefault("output_dir", scratch())
    return RewardTrainer(
        as_reward(tiny_model("qwen3") if model is None else model),
        RewardConfig(max_length=128, **fields),
        train_dataset=pairs_from(token_rows() if rows is None else rows),
        eval_dataset=None if eval_rows is None else pairs_from(eval_rows),
        processing_class=byte_tokenizer(),
        peft_config=peft_config,
    )


def steps_from(rows: Any) -> Dataset:
    """Labelled steps of token ids from token rows: one ends at every third trained token, and two of three are
    correct."""
    made = []
    for at, row in enumerate(rows):
        ends = [i for i, label in enumerate(row["labels"]) if label != -100][::3]
        marks = {end: int((at + n) % 3 != 1) for n, end in enumerate(ends)}
        labels = [marks.get(i, -100) for i in range(len(row["input_ids"]))]
        made.append({"input_ids": row["input_ids"], "labels": labels, "sample_weight": 1.0 + at % 2})
    return Dataset.from_list(made)


def as_prm(model: Any) -> Any:
    """As `as_reward`, with a head of two labels at every token."""
    made = as_reward(model, AutoModelForTokenClassification, labels=2)
    for module in made.modules() if made is not model else ():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # of the class's own, which no config of a causal model knows
    return made


def prm(
    model: Any = None, rows: Any = None, eval_rows: Any = None, peft_config: Any = None, **fields: Any
) -> PRMTrainer:
    """A trainer of process reward models on a tiny Qwen3 and steps made of the rows of `sft`."""
    fields = FIELDS | {"learning_rate": 0.01} | fields
    fields.setdefault("output_dir", scratch())
    return PRMTrainer(
        as_prm(tiny_model("qwen3") if model is None else model),
        PRMConfig(max_length=128, **fields),
        train_dataset=steps_from(token_rows() if rows is None else rows),
        eval_dataset=None if eval_rows is None else steps_from(eval_rows),
        processing_class=byte_tokenizer(),
        peft_config=peft_config,
    )


TRAINERS: dict[str, Callable[..., Any]] = {"sft": sft, "dpo": dpo, "kto": kto, "reward": reward, "prm": prm}


def same(a: Run, b: Run, tolerance: float = 1e-5) -> None:
    """Losses, gradients and weights agree, relative to the largest of each. Raises AssertionError."""
    assert len(a.losses) == len(b.losses) > 0
    torch.testing.assert_close(torch.tensor(a.losses), torch.tensor(b.losses), rtol=tolerance, atol=0)
    for left, right in ((a.gradients, b.gradients), (a.weights, b.weights)):
        assert left.keys() == right.keys() and left
        for name, value in left.items():
            scale = max(value.abs().max().item(), 1e-3)
            torch.testing.assert_close(value, right[name], rtol=0, atol=tolerance * scale, msg=lambda m, n=name: n + m)


def bit_equal(a: Run, b: Run) -> None:
    """Losses and weights are the same bits."""
    assert a.losses == b.losses
    assert a.weights.keys() == b.weights.keys()
    for name, value in a.weights.items():
        assert torch.equal(value, b.weights[name]), name
