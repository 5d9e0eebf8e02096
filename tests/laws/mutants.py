"""Faults the laws guard against. Each law must fail under its mutant.

A mutant is a function that patches the library through `patch`; its name can be sent to another process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from posttrain.data.sampling import WindowSampler
from posttrain.model.attention import FOREST, forest_attention
from posttrain.parallel.offload import HostTransport
from posttrain.trainer.engine import Engine
from posttrain.types import Mean

Patch = pytest.MonkeyPatch
MUTANTS: dict[str, Callable[[Patch], None]] = {}
_active: list[str] = []


def mutant(fn: Callable[[Patch], None]) -> Callable[[Patch], None]:
    MUTANTS[fn.__name__] = fn
    return fn


@contextlib.contextmanager
def applied(name: str | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            MUTANTS[name](patch)
            _active.append(name)
        try:
            yield
        finally:
            _active.clear()


def active() -> str | None:
    """Name of the mutant applied, for the processes of the pool."""
    return _active[0] if _active else None


@mutant
def mean_of_micro_batch_means(patch: Patch) -> None:
    """A micro-batch is divided by its own units, and by the number of micro-batches."""

    def compute_loss(self: Any, model: Any, inputs: dict, *args: Any, **kwargs: Any) -> Any:
        exp = inputs["batch"]
        return self.loss_step(model, exp).total / self.unit(exp) / self.args.gradient_accumulation_steps

    patch.setattr(Engine, "compute_loss", compute_loss)


@mutant
def ranks_forgotten(patch: Patch) -> None:
    """DDP averages gradients, and the loss is not multiplied by the number of ranks."""
    patch.setattr("posttrain.trainer.engine.world_size", lambda: 1)


@mutant
def rows_repeated(patch: Patch) -> None:
    """Rows are repeated until every rank has a full batch."""
    own = WindowSampler._mine

    def mine(self: Any, window: list[int]) -> Any:
        short = -len(window) % (self.batch_size * self.world_size) if self.world_size > 1 else 0
        return own(self, window + list(range(short)))

    patch.setattr(WindowSampler, "_mine", mine)


@mutant
def neighbours_seen(patch: Patch) -> None:
    """Every sequence of a packed row goes on from the one before it."""
    import posttrain.data.sampling as sampling

    own = sampling.build_forest

    def build_forest(*args: Any, **kwargs: Any) -> Any:
        batch = own(*args, **kwargs)
        parents = tuple(range(-1, len(batch.segments.parent) - 1))
        return replace(batch, segments=replace(batch.segments, parent=parents))

    patch.setattr(sampling, "build_forest", build_forest)


@mutant
def first_chunk_twice(patch: Patch) -> None:
    """The head scores its first chunk again."""
    import posttrain.loss.linear as linear

    own = linear.chunks

    def chunks(total: int, size: int) -> Iterator[slice]:
        found = list(own(total, size))
        return iter([*found, found[0]] if len(found) > 1 else found)

    patch.setattr(linear, "chunks", chunks)


@mutant
def piece_lost(patch: Patch) -> None:
    """A micro-batch over the token budget loses its last piece."""
    import posttrain.trainer.experience as experience

    own = experience.split_sequences

    def split_sequences(*args: Any) -> Any:
        pieces = own(*args)
        return pieces[:-1] if len(pieces) > 1 else pieces

    patch.setattr(experience, "split_sequences", split_sequences)


@mutant
def left_padding_read_as_right(patch: Patch) -> None:
    """Rows are padded left, and read where they would lie had they been padded right."""
    import posttrain.model.body as body

    own = body.pad_rows

    def pad_rows(batch: Any, side: str = "right", multiple: int | None = None) -> Any:
        return replace(own(batch, side, multiple), read_column=own(batch, "right", multiple).read_column)

    patch.setattr(body, "pad_rows", pad_rows)


@mutant
def randomness_not_restored(patch: Patch) -> None:
    """A resumed run draws other dropout masks."""
    patch.setattr(Engine, "_load_rng_state", lambda self, checkpoint: None)


@mutant
def cursor_not_restored(patch: Patch) -> None:
    """A resumed run starts its epoch with the first rows again."""
    patch.setattr("transformers.trainer.skip_first_batches", lambda loader, count: loader)


@mutant
def epoch_not_restored(patch: Patch) -> None:
    """A resumed run takes the order of the first epoch."""
    import transformers.trainer as trainer

    own = trainer.skip_first_batches

    def skip_first_batches(loader: Any, count: int) -> Any:
        skipping = own(loader, count)
        skipping.batch_sampler.batch_sampler.set_epoch = lambda epoch: None
        return skipping

    patch.setattr(trainer, "skip_first_batches", skip_first_batches)


@mutant
def mean_of_eval_means(patch: Patch) -> None:
    """Evaluation averages the means of its batches."""
    from posttrain.trainer.sft import SFTTrainer

    own_loss, own_unit = SFTTrainer.loss_step, SFTTrainer.unit

    def loss_step(self: Any, model: Any, exp: Any) -> Any:
        output = own_loss(self, model, exp)
        return output if torch.is_grad_enabled() else replace(output, total=output.total / own_unit(self, exp))

    def unit(self: Any, exp: Any) -> Any:
        own = own_unit(self, exp)
        return torch.ones_like(own) if self.window.units == 0 and not self.is_in_train else own

    patch.setattr(SFTTrainer, "loss_step", loss_step)
    patch.setattr(SFTTrainer, "unit", unit)


@mutant
def adapter_not_zero(patch: Patch) -> None:
    """The adapter starts away from the base."""
    from peft import LoraConfig

    own = LoraConfig.__post_init__

    def post_init(self: Any) -> None:
        self.init_lora_weights = False
        own(self)

    patch.setattr(LoraConfig, "__post_init__", post_init)


@mutant
def other_keys_in_recomputation(patch: Patch) -> None:
    """Recomputed layers attend to the keys of other tokens."""

    def attention(module: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        recomputing = torch._C._current_graph_task_id() != -1
        return forest_attention(module, query, key.roll(1, dims=2) if recomputing else key, *args, **kwargs)

    patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, FOREST, attention)


@mutant
def offloaded_in_half_precision(patch: Patch) -> None:
    """Activations are rounded on their way to the host."""

    def load(self: Any, stored: Any) -> Any:
        return stored.bfloat16().to(stored.dtype) if stored.is_floating_point() else stored

    patch.setattr(HostTransport, "load", load)


@mutant
def mean_of_means(patch: Patch) -> None:
    """Metrics of micro-batches are averaged, whatever their size."""
    patch.setattr(Mean, "__add__", lambda a, b: Mean((a.total / a.weight + b.total / b.weight) / 2, 1.0))


@mutant
def mask_forgotten(patch: Patch) -> None:
    """Every token is a target."""
    import posttrain.data.sampling as sampling

    own = sampling.Row
    patch.setattr(sampling, "Row", lambda ids, weights, *rest: own(ids, [1.0] * len(ids), *rest))


@mutant
def outputs_rounded(patch: Patch) -> None:
    """FSDP2 casts what leaves the model."""
    import posttrain.parallel.params as params

    own = params.MixedPrecisionPolicy
    patch.setattr(params, "MixedPrecisionPolicy", lambda **fields: own(**fields | {"output_dtype": torch.bfloat16}))


@mutant
def steps_in_every_backward(patch: Patch) -> None:
    """ZeRO steps after every piece and micro-batch."""
    from posttrain.parallel.deepspeed import Zero

    def backward(self: Any, model: Any, loss: Any, synchronise: bool) -> None:
        model.set_gradient_accumulation_boundary(True)
        model.backward(loss, scale_wrt_gas=False)
        if not synchronise:
            model.step()

    patch.setattr(Zero, "backward", backward)


@mutant
def divided_once_more(patch: Patch) -> None:
    """DeepSpeed divides the loss by the accumulation steps."""
    from posttrain.parallel.deepspeed import Zero

    own = Zero.backward
    patch.setattr(Zero, "backward", lambda self, model, loss, sync: own(self, model, loss / 2, sync))
