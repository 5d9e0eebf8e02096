"""The one subclass of `transformers.Trainer`: a training step in two halves.

    experience(window)      no grad, once for the accumulation window: what the loss needs and does not differentiate
    unit(experience)        how many units of loss it holds
    loss_step(model, exp)   grad: one forward and one pure loss, a *sum* over units

Only the engine divides, once, by the units of the window over all ranks. So accumulation, micro-batch size, packing,
world size, chunk size and token budget are memory knobs: they cannot change the result.
"""

from __future__ import annotations

import abc
import functools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from accelerate.utils.memory import clear_device_cache
from torch import Tensor
from transformers import ProgressCallback, Trainer
from transformers.trainer_utils import EvalLoopOutput, set_seed

from posttrain.data.forest import build_forest
from posttrain.data.sampling import Collator, RowItems
from posttrain.errors import ConfigError, NonFiniteError, TrainingError
from posttrain.model.adapters import is_adapted
from posttrain.model.load import base_model
from posttrain.model.router import balance_coefficient
from posttrain.parallel.deepspeed import use_deepspeed
from posttrain.parallel.device import keep_freed_memory
from posttrain.parallel.params import fsdp2_plugin, refuse_fsdp1, use_fsdp2
from posttrain.parallel.ranks import all_max, all_sum, world_size
from posttrain.parallel.roles import find_strategy, prepare_role
from posttrain.parallel.training_state import has_shards
from posttrain.trainer.callbacks import RichProgressCallback
from posttrain.trainer.config import BaseConfig
from posttrain.trainer.cost import ModelCost, peak_flops, peak_memory
from posttrain.trainer.evaluation import evaluate_all
from posttrain.trainer.experience import Experience, Window, tokens_and_sequences
from posttrain.trainer.failed import report_failed
from posttrain.trainer.loading import eval_loader, train_loader
from posttrain.trainer.meter import Meter, Speed, laid_tokens, layout_metrics, next_step_logs
from posttrain.trainer.randomness import preserved_environment, preserved_rng
from posttrain.trainer.recovery import NO_GRADIENT, Recovery
from posttrain.trainer.refusals import refuse_combinations, refuse_unsupported
from posttrain.trainer.resuming import going_on, opened_run, use_learning_rate, write_run
from posttrain.trainer.run_record import RunFiles
from posttrain.trainer.saving import save_checkpoint
from posttrain.trainer.selfcheck import SelfCheck, SelfChecks
from posttrain.trainer.stops import Stops, guarded
from posttrain.trainer.training_state import load_training, load_weights, save_training, writes_shards
from posttrain.trainer.tuning import Tuning
from posttrain.trainer.uploading import private_files_kept
from posttrain.types import LossOutput, Mean, TokenBatch

logger = logging.getLogger(__name__)


class Engine(Trainer, abc.ABC):
    """Abstract trainer: leaves implement `experience`, `unit` and `loss_step`, and give it items to load."""

    args: BaseConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    model: Any  # pyright: ignore[reportIncompatibleVariableOverride]
    model_wrapped: Any
    data_summary: Mapping[str, Any] = {}  # what became of the rows of each set; leaves say it
    layout: str = "packed"  # set by the leaf once the model is probed
    more_self_checks: Sequence[SelfCheck] = ()  # of a method, beside those that all share

    def __init__(self, model: Any, args: BaseConfig, collator: Collator, **kwargs: Any) -> None:
        refuse_unsupported(args)
        self.collator = collator
        self.meter = Meter()
        self.window = Window(units=0.0)
        self._window_loss: Tensor | float = 0.0
        self.speed = Speed()
        self.run_record: dict[str, Any] | None = None  # what checkpoints say the run is made of
        self.failed_saves: list[int] = []
        self._balance = balance_coefficient(base_model(model), args.router_aux_loss_coef)
        use_cache = model.config.use_cache if "use_cache" in vars(model.config) else None
        with preserved_rng():
            super().__init__(model=model, args=args, **kwargs)
        if use_cache is not None:
            model.config.use_cache = use_cache  # the base class turns it off, in the saved model too; we pass it
        self.neftune_noise_alpha = None  # the base class's noise takes a packed row for one sequence
        refuse_combinations(args, base_model(model), self.strategy, self._balance)
        self.accelerator.state.dynamo_plugin = TorchDynamoPlugin(
            backend=DynamoBackend.NO
        )  # layers are compiled, not all
        self.tuning = Tuning(model, args)
        self.recovery, self.stops, self.selfchecks = Recovery(self), Stops(self), SelfChecks(self)
        self.run_files, self.cost = RunFiles(self), ModelCost(model)
        for part in (self.tuning, self.stops, self.selfchecks, self.run_files):
            self.add_callback(part)
        self.loss_is_scaled_for_ga = True
        self.model_accepts_loss_kwargs = False
        if not args.disable_tqdm:
            self.remove_callback(ProgressCallback)
            self.add_callback(RichProgressCallback)

    # ---- what a method is --------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def experience(self, window: list[TokenBatch]) -> Sequence[Experience]:
        """No grad: one experience for each micro-batch of the window."""

    @abc.abstractmethod
    def unit(self, exp: Any) -> Tensor:
        """[] how many units of loss the experience holds."""

    @abc.abstractmethod
    def loss_step(self, model: Any, exp: Any) -> LossOutput:
        """Grad: the summed loss of the experience, and metrics that add."""

    @final
    @property
    def measuring(self) -> bool:
        """Whether metrics that cost something are wanted: on steps that log, and in evaluation."""
        return self.window.measure

    @final
    @property
    def balancing(self) -> bool:
        """Whether the router's balance loss is wanted: in training, of a mixture of experts that has one."""
        return self._balance > 0 and torch.is_grad_enabled()

    # ---- the window: once per optimizer step -------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """Pull the window, run its no-grad half, and count its units over all ranks. Always `num_batches`
        micro-batches."""
        self.speed.run(0)
        window = [inputs["batch"] for inputs in (next(epoch_iterator, None) for _ in range(num_batches)) if inputs]
        window += [build_forest([])] * (num_batches - len(window))
        self.stops.at("preparing the step")  # and no longer at the data, where others may still be
        sources = tuple(s for batch in window for s in batch.source)
        self._set_window(measure=next_step_logs(self.args, self.state), sources=sources, training=True)
        micro = self.pieces(window, device)
        mine = sum((self.unit(e) for m in micro for e in m), torch.zeros(())).double()
        counts = torch.stack([mine, *tokens_and_sequences(window)])
        units, tokens, sequences = all_sum(counts.to(device)).tolist()
        self._set_window(units=units, sequences=sequences)
        self._window_loss = 0.0
        self.recovery.begin()
        self.selfchecks.run(micro)
        laid = (laid_tokens(e.batch, self.layout, self.args.pad_to_multiple_of) for m in micro for e in m)
        self.tuning.plan(laid, device)
        self.state.num_input_tokens_seen += int(tokens)
        self.speed.run(tokens, self.cost.of(window))
        self.meter.add(layout_metrics(window, self.layout, self.args.pad_to_multiple_of))
        if units == 0:
            logger.warning("step %d has no targets; its weights stay as they are", self.state.global_step + 1)
        return [{"batch": pieces} for pieces in micro], units

    def _set_window(self, **values: Any) -> None:
        self.window = replace(self.window, **values)

    def pieces(self, window: list[TokenBatch], device: torch.device) -> list[list[Experience]]:
        """Each micro-batch in pieces that fit the token budget; every rank as many, agreed before any forward."""
        model_was_training = self.model.training
        self.model.eval()
        with torch.no_grad():
            found = self.experience(window)
        self.model.train(model_was_training)
        budget = self.recovery.limit(window)
        pieces = [list(e.split(budget)) if budget else [e] for e in found]
        if budget is None:
            return pieces
        agreed = all_max([len(p) for p in pieces], device)
        return [p + [p[0].part([])] * (n - len(p)) for p, n in zip(pieces, agreed, strict=True)]

    # ---- the step ----------------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one micro-batch, piece by piece. Only the last piece of the last micro-batch
        synchronises gradients: the caller's `no_sync` covers the other micro-batches, ours the other pieces."""
        model.train()
        self._optimizer_mode("train")
        total = self.recovery.run(model, inputs["batch"])
        self._window_loss += total
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        return total

    def _optimizer_mode(self, mode: str) -> None:
        """Schedule-free optimizers keep other weights in training than in evaluation."""
        switch = getattr(self.optimizer, mode, None)
        if callable(switch):
            switch()

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """total × R / units of the window, where R ranks average their gradients; and the balance loss of experts, a
        mean over its sequences."""
        output = self.loss_step(model, inputs["batch"])
        self.meter.add(output.metrics)
        loss = output.total * (world_size() / max(self.window.units, 1e-12))
        if self.balancing and output.aux_loss is None:
            raise ConfigError(
                f"`router_aux_loss_coef` is {self._balance}; this `loss_step` gives no `aux_loss`: set 0."
            )
        if output.aux_loss is not None:
            loss = loss + output.aux_loss * (self._balance * world_size() / max(self.window.sequences, 1.0))
            count = float(inputs["batch"].batch.num_sequences)
            self.meter.add({"aux_loss": Mean(output.aux_loss.detach(), count)})
        return (loss, output) if return_outputs else loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """The norm, after checks that stop a run before the optimizer takes a bad step."""
        norm: Any = self.strategy.grad_norm(model, super()._get_grad_norm(model, grad_norm))
        value, loss = float(norm), float(self._window_loss)
        step = self.state.global_step + 1
        # A loss scaler means to overflow at times, and then skips the step itself.
        bad = not math.isfinite(loss) or (not math.isfinite(value) and self.accelerator.scaler is None)
        # Together: a rank that raised alone would leave the others waiting in the next collective.
        votes = all_max([int(bad), *self.stops.votes(), *self.recovery.votes()], self.args.device)
        self.stops.agree(votes[1:2])
        self.recovery.agree(votes[2:])
        if votes[0]:
            raise NonFiniteError(report_failed(self, loss, value))
        if self.window.units == 0:
            self.strategy.skip_step(model)
        elif value == 0.0 and step == 1:
            raise TrainingError(NO_GRADIENT.format(step))
        return norm

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As `transformers.Trainer.train`; a fresh run starts from `seed`, whatever was drawn before."""
        if self.train_dataset is None:
            raise ConfigError("`train_dataset` is None; give one, or call `evaluate`.")
        self.selfchecks.refuse_unknown()
        asked = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        with opened_run(self, asked) as checkpoint:
            if checkpoint is None:
                set_seed(self.args.seed)
            self.speed = Speed(peak_flops(self.args.device, bool(self.args.bf16 or self.args.fp16)))
            if self.args.use_cpu:
                keep_freed_memory()
            return super().train(checkpoint, *args, **kwargs)

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        return going_on(self, super()._init_training_state(*args), *args)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        with guarded(self):
            return super()._inner_training_loop(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.speed.stand()
        save_checkpoint(self, trial, functools.partial(write_run, self))

    # ---- strategies: DDP, FSDP2, DeepSpeed ---------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Let accelerate run the strategy that was asked for, on any device and with our policy."""
        refuse_fsdp1(self.args)
        with preserved_environment():
            super().create_accelerator_and_postprocess()
            self.is_fsdp_enabled = use_fsdp2(self.accelerator, self._fsdp2)
            self.is_deepspeed_enabled = use_deepspeed(self.accelerator, self.args.deepspeed_plugin, self.args)
        self.strategy = find_strategy(self.accelerator)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        self._fsdp2 = kwargs["fsdp_plugin"] = fsdp2_plugin(kwargs["fsdp_plugin"], self.args)
        return super()._build_accelerator_args(**kwargs)

    def _prepare_for_training(self, *args: Any) -> Any:
        self.model_wrapped = self.strategy.release(self.model_wrapped, self.model)
        model, loader = super()._prepare_for_training(*args)
        self.optimizer = self.strategy.joined(self.optimizer, model)
        return model, loader

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """One Hugging Face folder, written by rank 0, whatever the strategy; the adapter alone under peft."""
        in_checkpoint = _internal_call and output_dir is not None
        if in_checkpoint and writes_shards(self) and not self.args.save_only_model:
            return  # the shards hold the weights
        state = self.strategy.whole_state(self.model, is_adapted(self.model))
        self._save(output_dir or self.args.output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        with private_files_kept():
            return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        with private_files_kept():
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_fsdp_enabled:
            return super()._save_optimizer_and_scheduler(output_dir)
        save_training(self, output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if has_shards(resume_from_checkpoint):
            return  # weights and optimizer come together, once there is an optimizer
        if not load_weights(self, resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (self.is_fsdp_enabled or has_shards(checkpoint)):
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            load_training(self, checkpoint)
        use_learning_rate(self, checkpoint)

    def _load_best_model(self) -> None:
        if not load_weights(self, str(self.state.best_model_checkpoint)):
            super()._load_best_model()

    # ---- loaders -----------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        return train_loader(self.train_dataset, self.args, self.collator)  # pyright: ignore[reportArgumentType]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        items = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(items, str) and isinstance(self.eval_dataset, dict):
            items = self.eval_dataset[items]
        if items is None:
            raise ConfigError("`eval_dataset` is None; give one to evaluate.")
        if not isinstance(items, RowItems):
            items = self.eval_items(items)
        return eval_loader(items, self.args, self.collator)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return self.get_eval_dataloader(test_dataset)

    def eval_items(self, dataset: Any, name: str = "eval") -> RowItems:
        """Rows given to `evaluate`, prepared like those given at construction."""
        raise ConfigError(f"`eval_dataset` is a {type(dataset).__name__}, which this trainer cannot prepare.")

    # ---- evaluation --------------------------------------------------------------------------------------------------

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The same two halves without grad. The loss is Σ total / Σ units over the whole set, whatever the batch
        size."""
        self.speed.stand()
        self.stops.at("evaluation")
        model = self._evaluation_model(dataloader)
        training_window, training_meter = self.window, self.meter
        self.window, self.meter = Window(units=0.0, measure=True), Meter()
        try:
            wanted = self.compute_metrics is not None and not (prediction_loss_only or self.args.prediction_loss_only)
            with torch.no_grad():
                return evaluate_all(self, model, dataloader, wanted, f"{metric_key_prefix}_")
        finally:
            self.window, self.meter = training_window, training_meter

    def _evaluation_model(self, dataloader: Any) -> Any:
        model = self._wrap_model(self.model, training=False, dataloader=dataloader)
        if len(self.accelerator._models) == 0 and model is self.model:
            if self.model_wrapped is self.model:  # a second ZeRO-3 engine would hook the same weights twice
                self.model_wrapped = prepare_role(model, "policy", self.accelerator)
            model = self.model_wrapped
        model.eval()
        self._optimizer_mode("eval")
        return model

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        raise ConfigError("`prediction_step` is not used: `evaluate` sums losses over the whole set.")

    # ---- logs and counts ---------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add what the meter holds to a training line: one reduction over the ranks, here and nowhere else."""
        if "loss" in logs:
            peak = peak_memory(self.args.device, self.recovery.highest_peak())
            logs.update(self.meter.drain({"peak_memory_mib": peak}))
            logs["num_tokens"] = float(self.state.num_input_tokens_seen)
            logs.update(self.speed.drain())
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """What the model needs for the tokens that are really laid."""
        return int(self.cost.of(piece.batch for piece in inputs["batch"]))

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Counted once for the window, in `get_batch_samples`."""

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["batch"]
