"""Selective activation checkpointing: which layers keep their activations, and what a checkpointed layer keeps.

A checkpointed layer keeps its input and computes the rest again in the backward pass (Chen et al. 2016, arXiv
1604.06174). A policy keeps the outputs of some operators too. With a budget, as many layers as fit keep everything:
the last ones, whose activations are freed before the first layer is computed again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from posttrain.errors import ConfigError
from posttrain.parallel.offload import Weights
from posttrain.parallel.ranks import all_max

Policy = Literal["full", "attention", "matmul"]

_ATTENTION = (
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "torch_attn::_varlen_attn",
)
# Not bmm: where attention is written out, its outputs are the scores, quadratic in the length.
_MATMUL = ("aten::mm", "aten::addmm", "aten::_grouped_mm", "aten::_scaled_mm", "aten::_scaled_grouped_mm")

KEPT: dict[str, tuple[str, ...]] = {"full": (), "attention": _ATTENTION, "matmul": _ATTENTION + _MATMUL}
"""Operators whose outputs a checkpointed layer keeps, under each policy."""

MEASURED_TOKENS = 16
"""A layer that saw fewer says little about the bytes of a token."""


def kept_operators(policy: str) -> list[Any]:
    """The overloads of the operators that the policy keeps, those this build of torch has."""
    import torch.nn.attention.varlen

    found = []
    for name in KEPT[policy]:
        space, operator = name.split("::")
        packet = getattr(getattr(torch.ops, space), operator, None)
        found += [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    return found


@dataclass(frozen=True)
class CheckpointOptions:
    """What is recomputed. `memory_bytes`: what the layers that keep everything may take together."""

    policy: Policy = "full"
    memory_bytes: int | None = None


class Checkpoints:
    """The checkpointed layers of one model. `attach` once transformers has turned checkpointing on; then, with a
    budget, `plan` before the forwards of each window."""

    def __init__(self, options: CheckpointOptions, checkpoint_kwargs: dict[str, Any]) -> None:
        self.options = options
        self.kept = 0  # how many of the last layers keep everything
        self._kinds: list[Any] = []  # of each layer
        self._rates: dict[Any, float] = {}  # bytes a token of each kind measured here
        self._agreed: dict[Any, float] | None = None  # … of all kinds, on all ranks
        kwargs = {"use_reentrant": False, **checkpoint_kwargs}
        if options.policy != "full":
            kwargs["context_fn"] = functools.partial(
                create_selective_checkpoint_contexts, kept_operators(options.policy)
            )
        self._checkpoint: Callable[..., Any] = functools.partial(checkpoint, **kwargs)

    def attach(self, model: nn.Module) -> None:
        """Take over the layers that transformers checkpoints. Raises `ConfigError` when a budget is set and the model
        has no layers that can be told apart."""
        self._kinds = []
        for module in model.modules():
            if not getattr(module, "gradient_checkpointing", False):
                continue
            run: Callable[..., Any] = self._checkpoint
            if isinstance(module, GradientCheckpointingLayer):
                run = functools.partial(self._run, len(self._kinds), module)
                self._kinds.append(_kind(module))
            module._gradient_checkpointing_func = run  # pyright: ignore[reportArgumentType]
        if self.options.memory_bytes is not None and not self._kinds:
            raise ConfigError(
                f"`activation_memory_mb` is set, and {type(model).__name__} has no decoder layers of transformers' "
                "kind to choose from; leave it out."
            )

    def plan(self, tokens: int, device: torch.device) -> None:
        """Choose how many layers keep everything, for forwards of at most `tokens` on this rank. The same on every
        rank, since recomputing may gather weights."""
        if self.options.memory_bytes is None:
            return
        kinds = list(dict.fromkeys(self._kinds))
        if self._agreed is None:
            rates = all_max([round(self._rates.get(kind, 0)) for kind in kinds], device)
            if not all(rates):
                return
            self._agreed = dict(zip(kinds, rates, strict=True))
        (longest,) = all_max([tokens], device)
        costs = [self._agreed[kind] * longest for kind in self._kinds]
        self.kept = _fitting(costs, self.options.memory_bytes)

    def _run(self, index: int, layer: nn.Module, function: Callable[..., Any], *args: Any) -> Any:
        if self.options.memory_bytes is None:
            return self._checkpoint(function, *args)
        kind = self._kinds[index]
        # Every rank runs the first layer of each kind like this until all have measured it.
        if self._agreed is None and self._kinds.index(kind) == index:
            return self._measured(kind, layer, function, *args)
        if index >= len(self._kinds) - self.kept:
            return function(*args)
        return self._checkpoint(function, *args)

    def _measured(self, kind: Any, layer: nn.Module, function: Callable[..., Any], *args: Any) -> Any:
        """Run a layer that keeps everything, and note the bytes it keeps for a token."""
        given = (*args, *getattr(function, "keywords", {}).values())  # some families call their layers by keyword
        tokens = next(x for x in given if isinstance(x, Tensor) and x.is_floating_point()).shape[:-1].numel()
        saved = SavedBytes(layer)
        with saved:
            out = function(*args)
        if tokens >= MEASURED_TOKENS:
            self._rates[kind] = max(self._rates.get(kind, 0.0), saved.total / tokens)
        return out


def _kind(layer: nn.Module) -> Any:
    """Layers of a kind keep as much for a token: equal class, window and shapes."""
    window = [getattr(m, "sliding_window", None) for m in layer.children()]
    return (
        type(layer),
        str(window),
        tuple((name, tuple(getattr(p, "ds_shape", p.shape))) for name, p in layer.named_parameters()),
    )


def _fitting(costs: list[float], budget: float) -> int:
    """How many of the last layers cost no more than the budget together. e.g. ([4, 3, 3], 7) -> 2"""
    total, count = 0.0, 0
    for cost in reversed(costs):
        total += cost
        if total > budget:
            break
        count += 1
    return count


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts what autograd saves while entered: each storage once, weights and their casts left out."""

    def __init__(self, module: nn.Module) -> None:
        self._weights = Weights(module.parameters())
        self._seen: dict[int, Tensor] = {}
        super().__init__(self._pack, lambda x: x)

    @property
    def total(self) -> int:
        return sum(x.untyped_storage().nbytes() for x in self._seen.values())

    def _pack(self, x: Tensor) -> Tensor:
        if not self._weights.hold(x):
            self._seen[x.untyped_storage().data_ptr()] = x
        return x
