"""The one subclass of `transformers.Trainer`: a training step in two halves.

    experience(window)      no grad, once for the accumulation window: what the loss needs and does not differentiate
    unit(experience)        how many units of loss it holds
    loss_step(model, exp)   grad: one forward and one pure loss, a *sum* over units

Only the engine divides, once, by the units of the window over all ranks. So accumulation, micro-batch size, packing,
world size, chunk size and token budget are memory knobs: they cannot change the result.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from accelerate.utils import DistributedType, DynamoBackend, TorchDynamoPlugin
from accelerate.utils.memory import clear_device_cache
from torch import Tensor
from transformers import ProgressCallback, Trainer
from transformers.trainer_utils import EvalLoopOutput, set_seed

from posttrain.data.forest import build_forest, split_forest
from posttrain.data.sampling import Collator, RowItems
from posttrain.errors import ConfigError, EmptyDataError, NonFiniteError, TrainingError
from posttrain.model.load import base_model
from posttrain.model.padding import padded_length
from posttrain.model.router import balance_coefficient
from posttrain.parallel.device import keep_freed_memory
from posttrain.parallel.ranks import all_max, all_sum, world_size
from posttrain.trainer.callbacks import RichProgressCallback
from posttrain.trainer.checkpoints import find_checkpoint, forget
from posttrain.trainer.config import BaseConfig
from posttrain.trainer.loading import eval_loader, train_loader
from posttrain.trainer.meter import Meter, Speed
from posttrain.trainer.predictions import Predictions
from posttrain.trainer.randomness import preserved_rng
from posttrain.trainer.refusals import refuse_unsupported
from posttrain.trainer.tuning import Tuning
from posttrain.types import LossOutput, Mean, TokenBatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Experience:
    """What `loss_step` gets: a batch, and in subclasses what `experience` found, aligned to its read-outs or
    sequences."""

    batch: TokenBatch

    def split(self, max_tokens: int) -> Sequence[Experience]:
        """Pieces of at most `max_tokens` tokens, cut between units."""
        return [replace(self, batch=piece) for piece in split_forest(self.batch, max_tokens)]

    def to(self, device: torch.device) -> Experience:
        return replace(self, batch=self.batch.to(device, non_blocking=True))


@dataclass(frozen=True)
class Window:
    """What one optimizer step uses, over all ranks."""

    units: float
    sequences: float = 0.0
    sources: tuple[int, ...] = ()  # rows of the data set on this rank
    measure: bool = False  # whether this step logs


class Engine(Trainer, abc.ABC):
    """Abstract trainer: leaves implement `experience`, `unit` and `loss_step`, and give it items to load."""

    args: BaseConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    model: Any  # pyright: ignore[reportIncompatibleVariableOverride]
    model_wrapped: Any
    layout: str = "packed"  # set by the leaf once the model is probed

    def __init__(self, model: Any, args: BaseConfig, collator: Collator, **kwargs: Any) -> None:
        refuse_unsupported(args)
        self.collator = collator
        self.meter = Meter()
        self.window = Window(units=0.0)
        self._window_loss: Tensor | float = 0.0
        self.speed = Speed()
        self._balance = balance_coefficient(base_model(model), args.router_aux_loss_coef)
        use_cache = model.config.use_cache if "use_cache" in vars(model.config) else None
        with preserved_rng():
            super().__init__(model=model, args=args, **kwargs)
        if use_cache is not None:
            model.config.use_cache = use_cache  # the base class turns it off, in the saved model too; we pass it
        self.neftune_noise_alpha = None  # the base class's noise takes a packed row for one sequence
        self.accelerator.state.dynamo_plugin = TorchDynamoPlugin(
            backend=DynamoBackend.NO
        )  # layers are compiled, not all
        self.tuning = Tuning(model, args)
        self.add_callback(self.tuning)
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
        self._set_window(measure=self._next_step_logs(), sources=tuple(s for b in window for s in b.source))
        micro = self._pieces(window, device)
        mine = sum((self.unit(e) for m in micro for e in m), torch.zeros(())).double()
        counts = torch.stack([mine, *_tokens_and_sequences(window)])
        units, tokens, sequences = all_sum(counts.to(device)).tolist()
        self._set_window(units=units, sequences=sequences)
        self._window_loss = 0.0
        self.tuning.plan((self._laid_tokens(e.batch) for m in micro for e in m), device)
        self.state.num_input_tokens_seen += int(tokens)
        self.speed.run(tokens)
        self._measure_layout(window)
        if units == 0:
            logger.warning("step %d has no targets; its weights stay as they are", self.state.global_step + 1)
        return [{"batch": pieces} for pieces in micro], units

    def _set_window(self, **values: Any) -> None:
        self.window = replace(self.window, **values)

    def _pieces(self, window: list[TokenBatch], device: torch.device) -> list[list[Experience]]:
        """Each micro-batch in pieces that fit the token budget; every rank as many, agreed before any forward."""
        model_was_training = self.model.training
        self.model.eval()
        with torch.no_grad():
            found = self.experience(window)
        self.model.train(model_was_training)
        budget = self.args.max_tokens_per_forward
        pieces = [list(e.split(budget)) if budget else [e] for e in found]
        if budget is None:
            return pieces
        agreed = all_max([len(p) for p in pieces], device)
        return [p + [replace(p[0], batch=build_forest([]))] * (n - len(p)) for p, n in zip(pieces, agreed, strict=True)]

    def _measure_layout(self, window: list[TokenBatch]) -> None:
        laid = sum(batch.num_tokens for batch in window if batch.num_sequences)
        unshared = sum(batch.unshared_tokens for batch in window)
        self.meter.add({"shared_share": Mean(float(unshared - laid), float(unshared))})
        padded = self._padded_tokens(window)
        self.meter.add({"padding_share": Mean(float(padded), float(padded + laid))})

    def _padded_tokens(self, window: list[TokenBatch]) -> int:
        """Positions computed for nothing: none, unless the model needs the padded layout."""
        if self.layout != "padded":
            return 0
        return sum(self._laid_tokens(b) - b.unshared_tokens for b in window if b.num_sequences)

    def _laid_tokens(self, batch: TokenBatch) -> int:
        """Positions a forward computes."""
        if self.layout != "padded" or not batch.num_sequences:
            return batch.num_tokens
        lengths = [len(batch.segments.positions(leaf)) for leaf in batch.leaf]
        return padded_length(max(lengths), self.args.pad_to_multiple_of) * len(lengths)

    def _next_step_logs(self) -> bool:
        step, every = self.state.global_step + 1, self.state.logging_steps
        if self.args.logging_strategy != "steps":
            return self.args.logging_strategy != "no"
        if step == 1 and self.args.logging_first_step:
            return True
        return step % every == 0 if every else False

    # ---- the step ----------------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one micro-batch, piece by piece. Only the last piece of the last micro-batch
        synchronises gradients: the caller's `no_sync` covers the other micro-batches, ours the other pieces."""
        model.train()
        self._optimizer_mode("train")
        pieces: list[Experience] = inputs["batch"]
        total = torch.zeros((), device=self.args.device)
        for i, piece in enumerate(pieces):
            last = i == len(pieces) - 1
            with contextlib.nullcontext() if last else self.accelerator.no_sync(model=model), self.tuning.offload():
                with self.compute_loss_context_manager():
                    loss = self.compute_loss(model, {"batch": piece.to(self.args.device)}, num_items_in_batch=None)
                if not loss.requires_grad:
                    raise TrainingError(_NO_GRADIENT)
                self._backward(loss)
            total += loss.detach()
        self._window_loss += total
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        return total

    def _backward(self, loss: Tensor) -> None:
        # DeepSpeed would divide by the accumulation steps once more.
        deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        self.accelerator.backward(loss, **({"scale_wrt_gas": False} if deepspeed else {}))

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
        if output.aux_loss is not None:
            loss = loss + output.aux_loss * (self._balance * world_size() / max(self.window.sequences, 1.0))
            count = float(inputs["batch"].batch.num_sequences)
            self.meter.add({"aux_loss": Mean(output.aux_loss.detach(), count)})
        return (loss, output) if return_outputs else loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """The norm, after checks that stop a run before the optimizer takes a bad step."""
        norm: Any = super()._get_grad_norm(model, grad_norm)
        value, loss = float(norm), float(self._window_loss)
        step = self.state.global_step + 1
        # A loss scaler means to overflow at times, and then skips the step itself.
        if not math.isfinite(loss) or (not math.isfinite(value) and self.accelerator.scaler is None):
            raise NonFiniteError(
                f"step {step}: loss {loss}, gradient norm {value}, from rows {_shown(self.window.sources)} of the "
                f"training set on this rank. The weights are those of step {step - 1}; checkpoints in "
                f"{self.args.output_dir!r} are unharmed. Lower `learning_rate` or look at these rows."
            )
        if self.window.units == 0:
            model.zero_grad(set_to_none=True)  # the optimizer skips parameters without a gradient
        elif value == 0.0 and step == 1:
            raise TrainingError(_NO_GRADIENT)
        return norm

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As `transformers.Trainer.train`; a fresh run starts from `seed`, whatever was drawn before."""
        if self.train_dataset is None:
            raise ConfigError("`train_dataset` is None; give one, or call `evaluate`.")
        asked = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        checkpoint = find_checkpoint(asked, self.args.output_dir)
        if checkpoint is None:
            set_seed(self.args.seed)
        self.speed = Speed()
        if self.args.use_cpu:
            keep_freed_memory()
        return super().train(checkpoint, *args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.speed.stand()
        # An older checkpoint of the same step is no longer whole from here on.
        forget(self.args.output_dir, self.state.global_step)
        super()._save_checkpoint(model, trial)

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
        model = self._evaluation_model(dataloader)
        training_window, training_meter = self.window, self.meter
        self.window, self.meter = Window(units=0.0, measure=True), Meter()
        sums = torch.zeros(2, dtype=torch.float64)
        rows = 0
        wanted = self.compute_metrics is not None and not (prediction_loss_only or self.args.prediction_loss_only)
        predictions = Predictions(self.preprocess_logits_for_metrics) if wanted else None
        with torch.no_grad():
            for inputs in dataloader:
                rows += inputs["batch"].num_sequences
                for piece in self._pieces([inputs["batch"]], self.args.device)[0]:
                    output = self.loss_step(model, piece.to(self.args.device))
                    self.meter.add(output.metrics)
                    sums += torch.stack([output.total.double().cpu(), self.unit(piece).double().cpu()])
                if predictions is not None:
                    predictions.add(model, inputs["batch"].to(self.args.device))
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        total, units, count = all_sum(torch.cat([sums, torch.tensor([float(rows)])]).to(self.args.device)).tolist()
        if units == 0:
            raise EmptyDataError("`eval_dataset` has no targets; every row of it is masked or too short.")
        means = {"loss": total / units, **self.meter.drain()}
        self.window, self.meter = training_window, training_meter
        logits, labels = None, None
        if predictions is not None and self.compute_metrics is not None:
            logits, labels, own = predictions.compute(self.compute_metrics)
            means |= own
        prefix = f"{metric_key_prefix}_"
        metrics = {name if name.startswith(prefix) else prefix + name: value for name, value in means.items()}
        return EvalLoopOutput(logits, labels, metrics, int(count))  # pyright: ignore[reportArgumentType]

    def _evaluation_model(self, dataloader: Any) -> Any:
        model = self._wrap_model(self.model, training=False, dataloader=dataloader)
        if len(self.accelerator._models) == 0 and model is self.model:
            model = self.accelerator.prepare_model(model, evaluation_mode=True)
            self.model_wrapped = model if model is not self.model else self.model_wrapped
        model.eval()
        self._optimizer_mode("eval")
        return model

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        raise ConfigError("`prediction_step` is not used: `evaluate` sums losses over the whole set.")

    # ---- logs and counts ---------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add what the meter holds to a training line: one reduction over the ranks, here and nowhere else."""
        if "loss" in logs:
            logs.update(self.meter.drain())
            logs["num_tokens"] = float(self.state.num_input_tokens_seen)
            logs["tokens_per_second"] = self.speed.drain()
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """6 operations a weight and token, over the tokens that are really laid."""
        tokens = sum(piece.batch.num_tokens for piece in inputs["batch"])
        return 6 * tokens * self._parameters

    @property
    def _parameters(self) -> int:
        if "_parameter_count" not in self.__dict__:
            self._parameter_count = sum(p.numel() for p in self.model_wrapped.parameters())
        return self._parameter_count

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Counted once for the window, in `get_batch_samples`."""

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["batch"]


_NO_GRADIENT = "step 1: no trainable weight received a gradient; check `peft_config` and what is frozen."


def _tokens_and_sequences(window: list[TokenBatch]) -> Tensor:
    tokens, sequences = (sum(x) for x in ([b.unshared_tokens for b in window], [b.num_sequences for b in window]))
    return torch.tensor([tokens, sequences], dtype=torch.float64)


def _shown(sources: tuple[int, ...]) -> str:
    return ", ".join(map(str, sources[:16])) + (f", … ({len(sources)} in all)" if len(sources) > 16 else "")
