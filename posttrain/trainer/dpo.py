"""Direct preference optimisation and its kin: a policy against a reference, on pairs of responses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor

from posttrain.data.pairs import PairOptions, prepare_pairs
from posttrain.data.sampling import Collator, RowItems
from posttrain.model.handle import Reference
from posttrain.parallel.ranks import say
from posttrain.trainer.config import BaseConfig, load_options
from posttrain.trainer.engine import Engine
from posttrain.trainer.experience import Experience
from posttrain.trainer.loading import pair_items
from posttrain.trainer.opening import config_of, open_run, refuse_given
from posttrain.trainer.references import choose_reference, pair_values, precompute, reference_sums, sequence_sums
from posttrain.types import LossOutput, Mean, ScoreRequest, TokenBatch


@dataclass
class DPOConfig(BaseConfig):
    """Arguments of `DPOTrainer`."""

    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    disable_dropout: bool = True
    """Train without dropout: with it, policy and reference would differ before the first step."""
    max_length: int | None = 1024
    """Longest prompt with its response, in tokens. The prompt gives way first, at its start and for both responses
    alike. `None`: no limit."""
    truncation_mode: Literal["keep_start", "keep_end"] = "keep_start"
    """Which end of a response is kept that fills `max_length` alone."""
    padding_free: bool = False
    """Accepted for compatibility: the packed layout never pads."""
    precompute_ref_log_probs: bool = False
    """Score the reference once, before training, and keep no second model in memory. What it found is cached on disk,
    by the weights and by each row's tokens."""
    precompute_ref_batch_size: int | None = None
    """Pairs a forward of that pass. Unset: `per_device_eval_batch_size`."""
    loss_type: list[str] = field(default_factory=lambda: ["sigmoid"])
    """One loss, or several that are mixed; docs/dpo.md lists them."""
    loss_weights: list[float] | None = None
    """Weight of each loss of a mix. Unset: 1 each."""
    beta: float = 0.1
    """How strongly the reference holds the policy back: β."""
    label_smoothing: float = 0.0
    """Share of pairs whose labels are taken to be wrong (cDPO, robust, exo_pair)."""
    pad_token: str | None = None
    """Token used for padding. Unset: the tokenizer's, else its end token."""


@dataclass(frozen=True)
class PairExperience(Experience):
    """Pairs: sequences 2k and 2k + 1 are the chosen and the rejected one."""

    per_sequence: ClassVar[tuple[str, ...]] = ("reference",)
    reference: Tensor  # [S] log-probability of the response under the reference


@final
class DPOTrainer(Engine):
    """Train a policy on pairs of responses to one prompt, of which one is preferred.

    `ref_model` is what it is compared with. Unset, that is the model as it starts: a frozen copy, or under an adapter
    the model itself with the adapter off, or with the weights the adapter started from. Raises `ConfigError`,
    `DataError` and `ModelError` before anything is trained.

    e.g. DPOTrainer("Qwen/Qwen3-0.6B", args=DPOConfig(output_dir="out"), train_dataset=pairs).train()
    """

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        args: DPOConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Callable[..., dict[str, float]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
    ) -> None:
        args = config_of(args, DPOConfig)
        refuse_given(data_collator=data_collator, compute_metrics=compute_metrics)
        self._config: DPOConfig = args
        run = open_run(
            args, model, processing_class, train_dataset, eval_dataset, self._items, peft_config, quantization_config
        )
        self.layout = run.layout
        self.reference: Reference | None = choose_reference(run.model, model, ref_model, load_options(args))
        super().__init__(
            run.model,
            args,
            Collator(run.share, grouped=True),
            train_dataset=run.train_items,
            eval_dataset=run.eval_items,
            processing_class=run.tokenizer,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self.reference.prepare(self.accelerator)
        if args.precompute_ref_log_probs:
            self._precompute(args.precompute_ref_batch_size or args.per_device_eval_batch_size)

    # ---- rows → items ------------------------------------------------------------------------------------------------

    def _items(self, tokenizer: Any, dataset: Any, name: str) -> RowItems:
        options = PairOptions(self._config.max_length, self._config.truncation_mode)
        rows, report = prepare_pairs(dataset, tokenizer, options, self._config.dataset_num_proc, name)
        say(report.summary())
        return pair_items(rows)

    def eval_items(self, dataset: Any, name: str = "eval") -> RowItems:
        return self._items(self.processing_class, dataset, name)

    def _precompute(self, batch_size: int) -> None:
        """Score the reference now, and let it go."""
        model, reference = self._evaluation_model(None), self.reference
        assert reference is not None and model is not None
        if self.train_dataset is not None:
            self.train_dataset = precompute(self, self.train_dataset, reference, batch_size, "train")
        if isinstance(self.eval_dataset, dict):
            sets = self.eval_dataset.items()
            self.eval_dataset = {n: precompute(self, items, reference, batch_size, n) for n, items in sets}
        elif self.eval_dataset is not None:
            self.eval_dataset = precompute(self, self.eval_dataset, reference, batch_size, "eval")
        self.reference = None

    # ---- the method --------------------------------------------------------------------------------------------------

    def experience(self, window: list[TokenBatch]) -> list[PairExperience]:
        args, policy = self.args, self.model_wrapped
        budget = args.max_tokens_per_forward
        found = (reference_sums(self.reference, policy, batch, args.device, budget) for batch in window)
        return [PairExperience(batch, sums) for batch, sums in zip(window, found, strict=True)]

    def unit(self, exp: PairExperience) -> Tensor:
        return pair_values(exp.batch, "weight").sum()

    def loss_step(self, model: Any, exp: PairExperience) -> LossOutput:
        request = ScoreRequest(entropy=self.measuring, aux_loss=self.balancing)
        scores = model(token_batch=exp.batch, score_request=request)
        policy = sequence_sums(scores.logps, exp.batch).view(-1, 2)
        reference = exp.reference.view(-1, 2)
        weights = pair_values(exp.batch, "weight")
        c, r = (policy - reference).unbind(1)
        margins = self._config.beta * (c - r)
        losses = -torch.nn.functional.logsigmoid(margins - pair_values(exp.batch, "margin"))
        total = (weights * losses).sum()
        return LossOutput(total, self._metrics(exp, policy, reference, scores), scores.aux_loss)

    def _metrics(self, exp: PairExperience, policy: Tensor, reference: Tensor, scores: Any) -> dict[str, Mean]:
        rewards = self._config.beta * (policy.detach() - reference)
        pairs = float(len(rewards))
        chosen, rejected = rewards.unbind(1)
        metrics = {
            "rewards/chosen": Mean(chosen.sum(), pairs),
            "rewards/rejected": Mean(rejected.sum(), pairs),
            "rewards/margins": Mean((chosen - rejected).sum(), pairs),
            "rewards/accuracies": Mean((chosen > rejected).float().sum(), pairs),
            "logps/chosen": Mean(policy.detach()[:, 0].sum(), pairs),
            "logps/rejected": Mean(policy.detach()[:, 1].sum(), pairs),
        }
        if scores.entropy is not None:
            metrics["entropy"] = Mean(scores.entropy.sum(), float(len(scores.entropy)))
        return metrics
