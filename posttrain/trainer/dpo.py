"""Direct preference optimisation and its kin: a policy against a reference, on pairs of responses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor

from posttrain.data.pairs import PairOptions, prepare_pairs
from posttrain.data.sampling import Collator, RowItems
from posttrain.errors import ConfigError
from posttrain.loss.preference import mix
from posttrain.loss.reweight import wpo_pair_weights, wpo_weights
from posttrain.model.handle import score_tokens
from posttrain.parallel.ranks import say
from posttrain.trainer.config import BaseConfig, load_options
from posttrain.trainer.engine import Engine
from posttrain.trainer.loading import pair_items
from posttrain.trainer.opening import config_of, open_run, refuse_given
from posttrain.trainer.pairs import PairExperience, PairLossFields, matched, pair_metrics, pairs_of, with_tail_weights
from posttrain.trainer.references import (
    MovingReference,
    choose_reference,
    pair_values,
    precompute,
    reference_sums,
    scored_sums,
)
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
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(
                f"`max_length` is {self.max_length}; a response needs one token before it: set 2 or more."
            )
        if self.sync_ref_model and self.precompute_ref_log_probs:
            raise ConfigError(
                "`sync_ref_model` and `precompute_ref_log_probs` are both on: a reference that moves is not found once."
            )
        for name in ("sync_ref_model", "precompute_ref_log_probs"):
            if getattr(self, name) and not self.compares:
                raise ConfigError(f"`{name}` is on, and {self.loss_type} compares with no reference; leave it out.")


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
        self.reference = None
        if self._config.compares:
            self.reference = choose_reference(run.model, model, ref_model, load_options(args), args.sync_ref_model)
        elif ref_model is not None:
            raise ConfigError(f"`ref_model` is given, and {args.loss_type} compares with no reference; leave it out.")
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
        if self.reference is not None:
            self.reference.prepare(self.accelerator)
            if args.sync_ref_model:
                self.add_callback(MovingReference(self.reference))
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
        config, policy = self._config, self.model_wrapped
        place = config.device, config.max_tokens_per_forward
        found = []
        for batch in (with_tail_weights(each, config.ld_alpha) for each in window):
            zeros = torch.zeros(batch.num_sequences)
            sums = reference_sums(self.reference, policy, batch, *place) if config.compares else zeros
            found.append(PairExperience(batch, sums, partner=zeros, side_partner=zeros))
        if config.needs("partners"):
            own = [scored_sums(lambda piece: score_tokens(policy, piece), exp.batch, *place) for exp in found]
            return matched(found, own, config.compares)
        return found

    def unit(self, exp: PairExperience) -> Tensor:
        return pair_values(exp.batch, "weight").sum()

    def loss_step(self, model: Any, exp: PairExperience) -> LossOutput:
        config, batch = self._config, exp.batch
        request = ScoreRequest(entropy=self.measuring, aux_loss=self.balancing)
        scores = model(token_batch=batch, score_request=request)
        pairs = pairs_of(scores.logps, exp, pair_values(batch, "margin"), config.compares)
        weights = pair_values(batch, "weight")
        if config.use_weighting:
            likely = wpo_weights(scores.logps, scores.entropy, batch.sequence, batch.num_sequences)
            weights = weights * wpo_pair_weights(*likely.view(-1, 2).unbind(1))
        losses, each = mix(config.loss_type, pairs, config.options(), config.loss_weights, weights)
        metrics = pair_metrics(pairs, config.beta, each if len(each) > 1 else {}, scores.entropy)
        return LossOutput(losses.sum(), metrics, scores.aux_loss)
