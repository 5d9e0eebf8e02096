"""`torch.compile` of the decoder layers, each class once, with dynamic lengths.

Compiled is what a layer does around attention: checkpointing stays outside of it, so a layer is compiled as it would be
without. Forest attention is a break in the graph: its calls follow the segments of the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from posttrain.errors import ConfigError
from posttrain.model.attention import FOREST, forest_attention
from posttrain.parallel.ranks import say


def compile_layers(model: nn.Module, backend: str, mode: str | None) -> Callable[[], None]:
    """Compile every decoder layer in place; return what undoes it. Raises `ConfigError` for a model without layers of
    transformers' kind."""
    found = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    layers = [layer for layer in found if "forward" not in vars(layer)]
    if len(layers) < len(found):
        say(f"torch_compile: {len(found) - len(layers)} layers whose forward was replaced stay as they are")
    if not layers:
        raise ConfigError(
            f"`torch_compile` is on, and {type(model).__name__} has no decoder layers of transformers' kind; leave it "
            "out."
        )
    AttentionInterface.register(FOREST, torch.compiler.disable(forest_attention))
    compiled = {
        own: torch.compile(own, dynamic=True, backend=backend, mode=mode) for own in {_own_forward(x) for x in layers}
    }
    for layer in layers:
        own = _own_forward(layer)
        layer.forward = MethodType(functools.partial(_forward, own, compiled[own]), layer)

    def undo() -> None:
        AttentionInterface.register(FOREST, forest_attention)
        for layer in layers:
            layer.__dict__.pop("forward", None)

    return undo


def _forward(own: Callable[..., Any], compiled: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    # While generating, the cache grows by a token a call.
    run = functools.partial(own if kwargs.get("past_key_values") is not None else compiled, self, **kwargs)
    if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
        return self._gradient_checkpointing_func(run, *args)
    return run(*args)


def _own_forward(layer: nn.Module) -> Callable[..., Any]:
    """The class's forward under transformers' checkpointing wrapper; FSDP2's subclass is wrapped a second time."""
    forward: Any = type(layer).forward
    while forward.__code__.co_name == "forward_with_checkpointing":
        forward = forward.__wrapped__
    return forward
