"""KTO and its kin: a policy against a reference, on responses that are each desirable or not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from posttrain.data.forest import build_forest
from posttrain.data.sampling import Collator, RowItems
from posttrain.data.unpaired import prepare_unpaired
from posttrain.loss.reduce import sequence_lengths, sequence_sums
from posttrain.loss.unpaired import UNPAIRED, Unpaired
from posttrain.model.handle import score_tokens
from posttrain.trainer.config import BaseConfig, load_options
from posttrain.trainer.engine import Engine
from posttrain.trainer.loading import first_items, unpacked_items
from posttrain.trainer.opening import config_of, open_run, refuse_given
from posttrain.trainer.options import check_references, check_unpaired_window, made_of, unpaired_options
from posttrain.trainer.pairs import RunningMean
from posttrain.trainer.references import (
    MovingReference,
    choose_reference,
    compare_with_start,
    precompute_all,
    reference_sums,
    scored_sums,
)
from posttrain.trainer.run_record import summarize
from posttrain.trainer.selfcheck import SelfCheck
from posttrain.trainer.unpaired import (
    UnpairedExperience,
    UnpairedLossFields,
    both_forests,
    kl_over_ranks,
    row_values,
    spare_row,
    unpaired_metrics,
    with_other_responses,
)
from posttrain.types import LossOutput, Mean, ScoreRequest, TokenBatch


@dataclass
class KTOConfig(UnpairedLossFields, BaseConfig):
    """Arguments of `KTOTrainer`."""

    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    train_sampling_strategy: str = "sequential"
    """random, or sequential: rows in the order of the data set."""
    disable_dropout: bool = True
    """Train without dropout: with it, policy and reference would differ before the first step."""
    max_length: int | None = 1024
    """Longest prompt with its response, in tokens. The prompt gives way first, at its start. `None`: no limit."""
    precompute_ref_log_probs: bool = False
    """Score the reference once, before training, and keep no second model in memory. Not for `kto`, whose mismatched
    rows are made step by step."""
    precompute_ref_batch_size: int | None = None
    """Rows a forward of that pass. Unset: `per_device_eval_batch_size`."""
    sync_ref_model: bool = False
    """TR-DPO: let the reference follow the policy."""
    ref_model_mixup_alpha: float = 0.6
    """How far it goes at each synchronisation: reference ← (1 − α) reference + α policy."""
    ref_model_sync_steps: int = 512
    """Steps between two synchronisations."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_losses()
        check_references(self)


@final
class KTOTrainer(Engine):
    """Train a policy on responses that are each marked desirable or not.

    `ref_model`: as for `DPOTrainer`. Raises `ConfigError`, `DataError` and `ModelError` before anything is trained.

    e.g. KTOTrainer("Qwen/Qwen3-0.6B", args=KTOConfig(output_dir="out"), train_dataset=rows).train()
    """

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        args: KTOConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, Any] | None = None,
        preprocess_logits_for_metrics: Any = None,
        quantization_config: Any = None,
        peft_config: Any = None,
    ) -> None:
        args = config_of(args, KTOConfig)
        refuse_given(
            data_collator=data_collator,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        self._config = args
        self.given_reference = ref_model is not None  # by the user: it may be another model than the start
        run = open_run(
            args, model, processing_class, train_dataset, eval_dataset, self._items, peft_config, quantization_config
        )
        check_unpaired_window(args, run.train_items)
        self.layout, self._share = run.layout, run.share
        self._spare = first_items(run.train_items, 2)  # a stream is read from its start here, and only here
        self.reference = choose_reference(run.model, model, ref_model, load_options(args), args.sync_ref_model)
        super().__init__(
            run.model,
            args,
            Collator(run.share),
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
        self.reference.prepare(self.accelerator)
        if args.sync_ref_model:
            self.add_callback(MovingReference(self.reference, self.model))
        if args.precompute_ref_log_probs:
            precompute_all(self, args.precompute_ref_batch_size or args.per_device_eval_batch_size)

    # ---- rows → items ------------------------------------------------------------------------------------------------

    def _items(self, tokenizer: Any, dataset: Any, name: str) -> Any:
        config = self._config
        rows, report = prepare_unpaired(dataset, tokenizer, unpaired_options(config), config.dataset_num_proc, name)
        self.given_reference = self.given_reference or report.references
        items = unpacked_items(rows, report, config, name, made_of(dataset, config, tokenizer))
        self.data_summary = {**self.data_summary, name: summarize(report, items, None)}
        return items

    def eval_items(self, dataset: Any, name: str = "eval") -> RowItems:
        return self._items(self.processing_class, dataset, name)

    # ---- the method --------------------------------------------------------------------------------------------------

    def experience(self, window: list[TokenBatch]) -> list[UnpairedExperience]:
        config, policy, device = self._config, self.model_wrapped, self.args.device
        if config.needs("kl"):
            return self._with_kl(window)
        place = device, self.recovery.limit(window)
        found = [UnpairedExperience(b, reference_sums(self.reference, policy, b, *place)) for b in window]
        if config.needs("delta") and self.window.training:
            own = [scored_sums(partial(score_tokens, policy), exp.batch, *place) for exp in found]
            rewards = [config.beta * (sums - exp.reference) for sums, exp in zip(own, found, strict=True)]
            self.delta.add(torch.cat(rewards), device)
        return [replace(exp, delta=self.delta.value) for exp in found]

    def _with_kl(self, window: list[TokenBatch]) -> list[UnpairedExperience]:
        """Own and mismatched responses go through the reference in one forest; the mismatched through the policy."""
        config, policy, reference = self._config, self.model_wrapped, self.reference
        place, found, ratios = (self.args.device, self.recovery.limit(window)), [], []
        spare = spare_row(self._spare, window)
        for batch, others in zip(window, with_other_responses(window, spare, config.max_length), strict=True):
            both, S = both_forests(batch, others, self._share), batch.num_sequences
            compared = scored_sums(lambda piece: reference.score(policy, piece), both, *place)
            mismatched = scored_sums(partial(score_tokens, policy), build_forest(others, share=self._share), *place)
            found.append(UnpairedExperience(batch, compared[:S]))
            ratios.append(mismatched[: len(others)] - compared[S:])
        kl = kl_over_ranks(ratios, self.args.device)
        return [replace(exp, kl=kl) for exp in found]

    def unit(self, exp: UnpairedExperience) -> Tensor:
        return row_values(exp.batch, "weight").sum()

    def loss_step(self, model: Any, exp: UnpairedExperience) -> LossOutput:
        config, batch, S = self._config, exp.batch, exp.batch.num_sequences
        scores = model(token_batch=batch, score_request=ScoreRequest(entropy=self.measuring, aux_loss=self.balancing))
        logps = sequence_sums(scores.logps * batch.weights, batch.sequence, S)
        rows = Unpaired(logps, exp.reference, row_values(batch, "desirable") > 0, exp.kl, exp.delta)
        losses = UNPAIRED[config.loss_type](rows, config.options()) * row_values(batch, "weight")
        metrics = unpaired_metrics(rows, sequence_lengths(batch.sequence, S), config.beta, scores.entropy)
        if config.needs("kl"):
            metrics["kl"] = Mean(exp.kl * S, float(S))
        return LossOutput(losses.sum(), metrics, scores.aux_loss)
