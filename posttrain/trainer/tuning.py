"""What a config turns on in the model for the length of a training run: checkpointing, compilation, noise, offload."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import TrainerCallback

from posttrain.model.checkpointing import CheckpointOptions, Checkpoints
from posttrain.model.compiling import compile_layers
from posttrain.model.head import output_head
from posttrain.model.load import base_model
from posttrain.model.noise import EmbeddingNoise
from posttrain.parallel.offload import offloaded
from posttrain.trainer.config import BaseConfig


class Tuning(TrainerCallback):
    """Set up when a run begins, since transformers turns checkpointing on just before, and undone when it ends."""

    def __init__(self, model: Any, args: BaseConfig) -> None:
        self._model, self._args = model, args
        self.checkpoints: Checkpoints | None = None
        self._undo: list[Callable[[], None]] = []
        # Layers the caller checkpoints already, and how.
        self._own = {m: m._gradient_checkpointing_func for m in _checkpointed(model)}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stop()
        ours: BaseConfig = self._args
        budget = ours.activation_memory_mb
        if ours.activation_checkpointing_policy != "full" or budget is not None:
            options = CheckpointOptions(ours.activation_checkpointing_policy, None if budget is None else budget << 20)
            own: Any = ours.activation_checkpointing_kwargs or {}
            self.checkpoints = Checkpoints(options, own)
            self.checkpoints.attach(self._model)
        if ours.torch_compile:
            undo = compile_layers(self._model, ours.torch_compile_backend or "inductor", ours.torch_compile_mode)
            self._undo.append(undo)
        if ours.neftune_noise_alpha is not None:
            noise = EmbeddingNoise(base_model(self._model), ours.neftune_noise_alpha)
            self._undo.append(noise.remove)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stop()
        # transformers leaves it on, and the next trainer of this model would recompute whatever its arguments say.
        for module in _checkpointed(self._model):
            if module in self._own:
                module._gradient_checkpointing_func = self._own[module]
            else:
                module.gradient_checkpointing = False

    def _stop(self) -> None:
        while self._undo:
            self._undo.pop()()

    def plan(self, tokens: Iterable[int], device: torch.device) -> None:
        """Before the forwards of a window, with the tokens each of them lays."""
        if self.checkpoints is not None:
            self.checkpoints.plan(max(tokens, default=0), device)

    def offload(self) -> contextlib.AbstractContextManager[Any]:
        if not self._args.activation_offloading:
            return contextlib.nullcontext()
        return offloaded(self._model, output_head(base_model(self._model)), self._args.device)


def _checkpointed(model: Any) -> list[Any]:
    return [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
