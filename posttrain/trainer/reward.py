"""Reward models: a scalar head that learns which of two responses is preferred."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from posttrain.data.pairs import PairOptions, prepare_pairs
from posttrain.data.sampling import Collator, RowItems
from posttrain.errors import ConfigError
from posttrain.loss.ranking import bradley_terry
from posttrain.trainer.config import BaseConfig
from posttrain.trainer.engine import Engine
from posttrain.trainer.experience import Experience
from posttrain.trainer.loading import unpacked_items
from posttrain.trainer.opening import config_of, open_run, refuse_given
from posttrain.trainer.options import made_of
from posttrain.trainer.references import pair_values
from posttrain.trainer.run_record import summarize
from posttrain.types import LossOutput, Mean, ScoreRequest, TokenBatch


@dataclass
class RewardConfig(BaseConfig):
    """Arguments of `RewardTrainer`."""

    task: ClassVar[str] = "SEQ_CLS"
    learning_rate: float = 1e-4
    """Peak learning rate of AdamW."""
    disable_dropout: bool = True
    """Train without dropout: with it, equal responses would have unequal rewards."""
    max_length: int | None = 1024
    """Longest prompt with its response, in tokens. A pair that is longer is dropped and counted: a reward is read at
    the end, which a cut would move. `None`: no limit."""
    center_rewards_coefficient: float | None = None
    """Weight κ of (r_w + r_l)², which holds the rewards near 0. Unset: 0."""
    eos_token: str | None = None
    """Token that ends a response, at which the reward is read. Unset: the tokenizer's."""
    pad_token: str | None = None
    """Token used for padding. Unset: the tokenizer's, else its end token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(
                f"`max_length` is {self.max_length}; a response needs one token before it: set at least 2."
            )
        centring = self.center_rewards_coefficient
        if centring is not None and not (math.isfinite(centring) and centring >= 0):
            raise ConfigError(f"`center_rewards_coefficient` is {centring}; set 0 or more.")


def reward_pairs(args: RewardConfig) -> PairOptions:
    """How pairs are prepared for a reward model."""
    return PairOptions(args.max_length, references="a reward model has no reference", drop_long=True, at_end=True)


@final
@dataclass(frozen=True)
class RewardExperience(Experience):
    """Pairs of responses, whose read-outs lie at their last tokens."""


@final
class RewardTrainer(Engine):
    """Train a scalar head, and the model under it, on pairs of responses to one prompt (Bradley–Terry).

    `model` is a name, whose causal language model gets a new head, or a sequence classification model with one label.
    The reward of a response is what the head gives at its last token. Raises `ConfigError`, `DataError` and
    `ModelError` before anything is trained.

    e.g. RewardTrainer("Qwen/Qwen3-0.6B", args=RewardConfig(output_dir="out"), train_dataset=pairs).train()
    """

    def __init__(
        self,
        model: Any,
        args: RewardConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Callable[..., dict[str, float]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, Any] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
    ) -> None:
        args = config_of(args, RewardConfig)
        refuse_given(
            data_collator=data_collator,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        self._config = args
        run = open_run(
            args, model, processing_class, train_dataset, eval_dataset, self._items, peft_config, quantization_config
        )
        self.layout = run.layout
        super().__init__(
            run.model,
            args,
            Collator(run.share, grouped=True, own=True),
            train_dataset=run.train_items,
            eval_dataset=run.eval_items,
            processing_class=run.tokenizer,
            callbacks=[*run.audits, *(callbacks or [])],
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )

    def _items(self, tokenizer: Any, dataset: Any, name: str) -> Any:
        config = self._config
        rows, report = prepare_pairs(dataset, tokenizer, reward_pairs(config), config.dataset_num_proc, name)
        items = unpacked_items(rows, report, config, name, made_of(dataset, config, tokenizer), sides=2)
        self.data_summary = {**self.data_summary, name: summarize(report, items, None)}
        return items

    def eval_items(self, dataset: Any, name: str = "eval") -> RowItems:
        return self._items(self.processing_class, dataset, name)

    # ---- the method --------------------------------------------------------------------------------------------------

    def experience(self, window: list[TokenBatch]) -> list[RewardExperience]:
        return [RewardExperience(batch) for batch in window]

    def unit(self, exp: RewardExperience) -> Tensor:
        return pair_values(exp.batch, "weight").sum()

    def loss_step(self, model: Any, exp: RewardExperience) -> LossOutput:
        batch, centring = exp.batch, self._config.center_rewards_coefficient or 0.0
        scores = model(token_batch=batch, score_request=ScoreRequest(aux_loss=self.balancing))
        # One read-out a sequence, sequence by sequence.
        chosen, rejected = scores.logps.view(-1, 2).unbind(1)
        losses = bradley_terry(chosen, rejected, pair_values(batch, "margin"), centring)
        total = (pair_values(batch, "weight") * losses).sum()
        return LossOutput(total, reward_metrics(chosen, rejected), scores.aux_loss)


def reward_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Mean]:
    """Means over pairs. `confidence` − `accuracy` above 0: the model is surer than it is right; `brier` is the mean
    squared error of its probability that the chosen response is the better one (Brier, 1950)."""
    difference, count = chosen - rejected, float(len(chosen))
    probability = torch.sigmoid(difference)
    found = {
        "accuracy": (difference > 0).float(),
        "margin": difference,
        "mean_reward": (chosen + rejected) / 2,
        "min_reward": torch.minimum(chosen, rejected),
        "max_reward": torch.maximum(chosen, rejected),
        "confidence": torch.maximum(probability, 1 - probability),
        "brier": (1 - probability).square(),
    }
    return {name: Mean(value.sum(), count) for name, value in found.items()}
