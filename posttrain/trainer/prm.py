"""Process reward models: a head that learns whether each step of an answer is correct."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from posttrain.data.sampling import Collator, RowItems
from posttrain.data.stepwise import StepOptions, prepare_steps
from posttrain.errors import ConfigError
from posttrain.loss.ranking import stepwise_two_class
from posttrain.trainer.config import BaseConfig
from posttrain.trainer.engine import Engine
from posttrain.trainer.experience import Experience
from posttrain.trainer.loading import unpacked_items
from posttrain.trainer.opening import config_of, open_run, refuse_given
from posttrain.trainer.options import made_of
from posttrain.trainer.run_record import summarize
from posttrain.types import LossOutput, Mean, ScoreRequest, TokenBatch


@dataclass
class PRMConfig(BaseConfig):
    """Arguments of `PRMTrainer`."""

    task: ClassVar[str] = "TOKEN_CLS"
    learning_rate: float = 1e-5
    """Peak learning rate of AdamW."""
    disable_dropout: bool = True
    """Train without dropout."""
    max_length: int | None = 1024
    """Longest prompt with its steps, in tokens. A step that ends beyond it is dropped and counted. `None`: no limit."""
    max_completion_length: int | None = None
    """Longest steps of a row together, in tokens, likewise. Unset: `max_length` alone."""
    step_separator: str = "\n"
    """Text that ends a step; its last token is where the step is judged."""
    train_on_last_step_only: bool = False
    """Learn from the last step of each row alone."""
    eos_token: str | None = None
    """End token of the model; no step gets one. Unset: the tokenizer's."""
    pad_token: str | None = None
    """Token used for padding. Unset: the tokenizer's, else its end token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_length", "max_completion_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"`{name}` is {value}; it must be at least 1, or None for no limit.")
        if not self.step_separator:
            raise ConfigError("`step_separator` is empty; a step is judged at its separator: give a text.")


@final
@dataclass(frozen=True)
class StepExperience(Experience):
    """Rows of steps, whose read-outs lie at the ends of the steps."""


@final
class PRMTrainer(Engine):
    """Train a head with two labels, and the model under it, to say whether each step of an answer is correct.

    `model` is a name, whose causal language model gets a new head, or a token classification model with two labels: 0
    is an incorrect step and 1 a correct one. Raises `ConfigError`, `DataError` and `ModelError` before anything is
    trained.

    e.g. PRMTrainer("Qwen/Qwen3-0.6B", args=PRMConfig(output_dir="out"), train_dataset=rows).train()
    """

    def __init__(
        self,
        model: Any,
        args: PRMConfig | None = None,
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
        args = config_of(args, PRMConfig)
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
            Collator(run.share, own=True),
            train_dataset=run.train_items,
            eval_dataset=run.eval_items,
            processing_class=run.tokenizer,
            callbacks=[*run.audits, *(callbacks or [])],
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )

    def _items(self, tokenizer: Any, dataset: Any, name: str) -> Any:
        config = self._config
        rows, report = prepare_steps(dataset, tokenizer, step_options(config), config.dataset_num_proc, name)
        items = unpacked_items(rows, report, config, name, made_of(dataset, config, tokenizer))
        self.data_summary = {**self.data_summary, name: summarize(report, items, None)}
        return items

    def eval_items(self, dataset: Any, name: str = "eval") -> RowItems:
        return self._items(self.processing_class, dataset, name)

    # ---- the method --------------------------------------------------------------------------------------------------

    def experience(self, window: list[TokenBatch]) -> list[StepExperience]:
        return [StepExperience(batch) for batch in window]

    def unit(self, exp: StepExperience) -> Tensor:
        return exp.batch.weights.abs().sum()

    def loss_step(self, model: Any, exp: StepExperience) -> LossOutput:
        batch = exp.batch
        scores = model(token_batch=batch, score_request=ScoreRequest(aux_loss=self.balancing))
        correct = batch.weights > 0  # the sign says whether the step is
        total = (batch.weights.abs() * stepwise_two_class(scores.values, correct)).sum()
        return LossOutput(total, step_metrics(scores.values, correct), scores.aux_loss)


def step_metrics(logits: Tensor, correct: Tensor) -> dict[str, Mean]:
    """Means over steps. logits [K, 2], correct [K] bool. `accuracy/correct` and `accuracy/incorrect` are those of one
    class, absent where it is; `confidence` − `accuracy` above 0: the model is surer than it is right; `brier` is the
    mean squared error of its probability that a step is correct (Brier, 1950)."""
    probability = torch.sigmoid(logits[:, 1] - logits[:, 0])
    right = ((probability > 0.5) == correct).float()
    found = {
        "accuracy": right,
        "accuracy/correct": right[correct],
        "accuracy/incorrect": right[~correct],
        "confidence": torch.maximum(probability, 1 - probability),
        "brier": (probability - correct.float()).square(),
    }
    return {name: Mean(value.sum(), float(len(value))) for name, value in found.items() if len(value)}


def step_options(args: PRMConfig) -> StepOptions:
    """How rows are prepared for a process reward model."""
    return StepOptions(args.max_length, args.max_completion_length, args.step_separator, args.train_on_last_step_only)
