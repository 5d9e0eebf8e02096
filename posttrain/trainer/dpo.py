"""Direct preference optimisation and its kin: a policy against a reference, on pairs of responses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, final

import torch
from torch import Tensor

from posttrain.data.pairs import prepare_pairs
from posttrain.data.sampling import Collator, RowItems
from posttrain.errors import ConfigError
from posttrain.loss.preference import mix
from posttrain.loss.reweight import wpo_pair_weights, wpo_weights
from posttrain.model.handle import score_tokens
from posttrain.trainer.config import BaseConfig, load_options
from posttrain.trainer.engine import Engine
from posttrain.trainer.loading import unpacked_items
from posttrain.trainer.opening import config_of, open_run, refuse_given
from posttrain.trainer.options import check_references, made_of, pair_options
from posttrain.trainer.pairs import (
    PairExperience,
    PairLossFields,
    RunningMean,
    matched,
    of_pairs,
    pair_metrics,
    pairs_of,
    with_tail_weights,
)
from posttrain.trainer.references import (
    MovingReference,
    choose_reference,
    compare_with_start,
    pair_values,
    precompute_all,
    reference_sums,
    scored_sums,
)
from posttrain.trainer.run_record import summarize
from posttrain.trainer.selfcheck import SelfCheck
from posttrain.types import LossOutput, ScoreRequest, TokenBatch


@dataclass
class DPOConfig(PairLossFields, BaseConfig):
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
    sync_ref_model: bool = False
    """TR-DPO: let the reference follow the policy."""
    ref_model_mixup_alpha: float = 0.6
    """How far it goes at each synchronisation: reference ← (1 − α) reference + α policy."""
    ref_model_sync_steps: int = 512
    """Steps between two synchronisations."""
    pad_token: str | None = None
    """Token used for padding. Unset: the tokenizer's, else its end token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_losses()
        check_references(self)


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
        optimizer_cls_and_kwargs: tuple[Any, Any] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
    ) -> None:
        args = config_of(args, DPOConfig)
        refuse_given(
            data_collator=data_collator,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        if ref_model is not None and not args.compares:
            raise ConfigError(f"`ref_model` is given, and {args.loss_type} compares with no reference; leave it out.")
        self._config = args
        self.given_reference = ref_model is not None  # by the user: it may be another model than the start
        run = open_run(
            args, model, processing_class, train_dataset, eval_dataset, self._items, peft_config, quantization_config
        )
        self.layout = run.layout
        self.reference = None
        if args.compares:
            self.reference = choose_reference(run.model, model, ref_model, load_options(args), args.sync_ref_model)
        super().__init__(
            run.model,
            args,
            Collator(run.share, grouped=True),
            train_dataset=run.train_items,
            eval_dataset=run.eval_items,
            processing_class=run.tokenizer,
            callbacks=[*run.audits, *(callbacks or [])],
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )
        self.delta = RunningMean()
        if args.needs("delta"):
            self.add_callback(self.delta)
        self.more_self_checks = [SelfCheck("reference", partial(compare_with_start, self))]
        if self.reference is not None:
            self.reference.prepare(self.accelerator)
            if args.sync_ref_model:
                self.add_callback(MovingReference(self.reference, self.model))
        if args.precompute_ref_log_probs:
            precompute_all(self, args.precompute_ref_batch_size or args.per_device_eval_batch_size)

    # ---- rows → items ------------------------------------------------------------------------------------------------

    def _items(self, tokenizer: Any, dataset: Any, name: str) -> Any:
        config = self._config
        rows, report = prepare_pairs(dataset, tokenizer, pair_options(config), config.dataset_num_proc, name)
        self.given_reference = self.given_reference or report.references
        items = unpacked_items(rows, report, config, name, made_of(dataset, config, tokenizer), config.sides)
        self.data_summary = {**self.data_summary, name: summarize(report, items, None)}
        return items

    def eval_items(self, dataset: Any, name: str = "eval") -> RowItems:
        return self._items(self.processing_class, dataset, name)

    # ---- the method --------------------------------------------------------------------------------------------------

    def experience(self, window: list[TokenBatch]) -> list[PairExperience]:
        config, policy = self._config, self.model_wrapped
        place = self.args.device, self.recovery.limit(window)
        found = []
        for batch in (with_tail_weights(each, config.ld_alpha) for each in window):
            zeros = torch.zeros(batch.num_sequences)
            sums = reference_sums(self.reference, policy, batch, *place) if config.compares else zeros
            found.append(PairExperience(batch, sums, partner=zeros, side_partner=zeros))
        partners, learns = config.needs("partners"), config.needs("delta") and self.window.training
        if partners or learns:
            own = [scored_sums(lambda piece: score_tokens(policy, piece), exp.batch, *place) for exp in found]
            if learns:
                pairs = zip(own, found, strict=True)
                rewards = [config.beta * of_pairs(sums - exp.reference, exp.batch).flatten() for sums, exp in pairs]
                self.delta.add(torch.cat(rewards), self.args.device)
            found = matched(found, own, config.compares) if partners else found
        return [replace(exp, delta=self.delta.value) for exp in found]

    def unit(self, exp: PairExperience) -> Tensor:
        return pair_values(exp.batch, "weight").sum()

    def loss_step(self, model: Any, exp: PairExperience) -> LossOutput:
        config, batch = self._config, exp.batch
        request = ScoreRequest(entropy=self.measuring, log_collision=config.use_weighting, aux_loss=self.balancing)
        scores = model(token_batch=batch, score_request=request)
        pairs = pairs_of(scores.logps, exp, pair_values(batch, "margin"), config)
        weights = pair_values(batch, "weight")
        if scores.log_collision is not None:
            likely = wpo_weights(scores.logps, scores.log_collision, batch.sequence, batch.num_sequences)
            weights = weights * wpo_pair_weights(*of_pairs(likely, batch).unbind(1))
        losses, each = mix(config.loss_type, pairs, config.options(), config.loss_weights, weights)
        metrics = pair_metrics(pairs, config.beta, each if len(each) > 1 else {}, scores.entropy)
        return LossOutput(losses.sum(), metrics, scores.aux_loss)
