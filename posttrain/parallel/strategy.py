"""How the ranks share the weights: what differs between DDP, FSDP2 and ZeRO, behind one small interface."""

from __future__ import annotations

import abc
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from posttrain.parallel.params import shard, whole, whole_state


class Strategy(abc.ABC):
    """What the engine asks of a strategy. `model` is the wrapped one: DDP's, FSDP2's or DeepSpeed's."""

    sharded = False  # whether a rank holds only a part of the weights

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    @abc.abstractmethod
    def prepare(self, model: nn.Module) -> Any:
        """A model ready to score, before or without training."""

    def release(self, wrapped: Any, model: nn.Module) -> Any:
        """What the trainer is to wrap for training, once `wrapped` has scored, or trained before."""
        return wrapped

    @abc.abstractmethod
    def backward(self, model: Any, loss: Tensor, synchronise: bool) -> None:
        """Add gradients; over the ranks when `synchronise`."""

    @abc.abstractmethod
    def grad_norm(self, model: Any, measured: Any) -> Any:
        """The norm of the gradients over all ranks before clipping. A collective."""

    @abc.abstractmethod
    def skip_step(self, model: Any) -> None:
        """Throw the gradients away, so that the coming step changes nothing."""

    @abc.abstractmethod
    def joined(self, optimizer: Any, model: Any) -> Any:
        """The optimizer the trainer is to step, once the model is wrapped."""

    @abc.abstractmethod
    def whole_state(self, model: nn.Module, adapter_only: bool) -> dict[str, Tensor] | None:
        """Rank 0: the state dict, made whole, on the host. None: the model's own is whole already. A collective."""


class Replicated(Strategy):
    """One process, or DDP: every rank holds all weights."""

    def prepare(self, model: nn.Module) -> Any:
        prepared = self.accelerator.prepare_model(model, evaluation_mode=True)
        # Else training would find it prepared, and each rank would train its own weights.
        vars(prepared).pop("_is_accelerate_prepared", None)
        return prepared

    def backward(self, model: Any, loss: Tensor, synchronise: bool) -> None:
        self.accelerator.backward(loss)

    def grad_norm(self, model: Any, measured: Any) -> Any:
        return whole(measured) if isinstance(measured, Tensor) else measured

    def skip_step(self, model: Any) -> None:
        model.zero_grad(set_to_none=True)  # the optimizer skips parameters without a gradient

    def joined(self, optimizer: Any, model: Any) -> Any:
        return optimizer

    def whole_state(self, model: nn.Module, adapter_only: bool) -> dict[str, Tensor] | None:
        return None


class Sharded(Strategy):
    """FSDP2."""

    sharded = True

    def prepare(self, model: nn.Module) -> Any:
        return shard(model, self.accelerator)

    def backward(self, model: Any, loss: Tensor, synchronise: bool) -> None:
        self.accelerator.backward(loss)

    def grad_norm(self, model: Any, measured: Any) -> Any:
        return whole(torch.as_tensor(measured))

    def skip_step(self, model: Any) -> None:
        model.zero_grad(set_to_none=True)

    def joined(self, optimizer: Any, model: Any) -> Any:
        return optimizer

    def whole_state(self, model: nn.Module, adapter_only: bool) -> dict[str, Tensor] | None:
        return whole_state(model, adapter_only)
