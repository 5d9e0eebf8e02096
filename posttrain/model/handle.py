"""What a policy is compared with: a frozen copy, the model without its adapter, or the weights it started from."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator
from typing import Any, final

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from posttrain.errors import ConfigError
from posttrain.model.adapters import is_adapted
from posttrain.model.reference import mix_into
from posttrain.parallel.deepspeed import whole_parameters
from posttrain.parallel.params import whole
from posttrain.parallel.roles import prepare_role
from posttrain.parallel.training_state import fill
from posttrain.types import ScoreRequest, TokenBatch


def score_tokens(model: Any, batch: TokenBatch) -> Tensor:
    """[N] log-probability of each read-out."""
    return model(token_batch=batch, score_request=ScoreRequest()).logps


class Reference(abc.ABC):
    """A reference model as a handle: it scores batches, and says which weights it stands for."""

    def prepare(self, accelerator: Any) -> None:  # noqa: B027  most hold no model of their own
        """Place what the handle holds as the run places its policy. Once, before it scores."""

    @abc.abstractmethod
    def score(self, policy: Any, batch: TokenBatch) -> Tensor:
        """[N] log-probability of each read-out. `policy` is the wrapped model in training."""

    @abc.abstractmethod
    def move(self, policy: nn.Module, alpha: float) -> None:
        """reference ← (1 − α) reference + α policy (TR-DPO, arXiv 2404.09656, eq. 5)."""

    def tensors(self) -> dict[str, Tensor]:
        """What `move` changes, for a checkpoint."""
        return {}

    def restore(self, tensors: dict[str, Tensor]) -> None:  # noqa: B027  most have nothing to restore
        """Put back what `tensors` gave."""

    @abc.abstractmethod
    def identity(self, policy: nn.Module) -> str:
        """A hash (XXH3) of the weights."""


@final
class FrozenReference(Reference):
    """Another model, or a frozen copy, prepared like the policy."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def prepare(self, accelerator: Any) -> None:
        self.model = prepare_role(self.model, "reference", accelerator)

    def score(self, policy: Any, batch: TokenBatch) -> Tensor:
        return score_tokens(self.model, batch)

    def move(self, policy: nn.Module, alpha: float) -> None:
        mix_into(self.model, policy, alpha)

    def tensors(self) -> dict[str, Tensor]:
        return self.model.state_dict()

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.model.load_state_dict(tensors)

    def identity(self, policy: nn.Module) -> str:
        return hash_weights(self.model.state_dict())


@final
class WithoutAdapter(Reference):
    """The base of an adapter that began as nothing: the same model, its adapter switched off."""

    def __init__(self, adapted: Any) -> None:
        self._adapted = adapted

    def score(self, policy: Any, batch: TokenBatch) -> Tensor:
        with self._adapted.disable_adapter():
            return score_tokens(policy, batch)

    def move(self, policy: nn.Module, alpha: float) -> None:
        raise ConfigError("`sync_ref_model` moves a reference, and the base of an adapter stays as it is.")

    def identity(self, policy: nn.Module) -> str:
        frozen = {name: p for name, p in self._adapted.named_parameters() if not p.requires_grad}
        return hash_weights(frozen)


@final
class StartingWeights(Reference):
    """The policy as it started: copies of its trained weights, swapped in while it scores. For adapters, whose trained
    weights are few; a copy of an adapter that is trained further stays the reference."""

    def __init__(self, adapted: nn.Module) -> None:
        self._model = adapted
        trained = ((name, p) for name, p in adapted.named_parameters() if p.requires_grad)
        self._start = {name: whole(p.detach()).cpu().float().clone() for name, p in trained}

    def score(self, policy: Any, batch: TokenBatch) -> Tensor:
        with self._swapped():
            return score_tokens(policy, batch)

    @contextlib.contextmanager
    def _swapped(self) -> Iterator[None]:
        trained = {name: p for name, p in self._model.named_parameters() if name in self._start}
        with whole_parameters(trained.values(), writing=True):
            now = {name: p.detach().clone() for name, p in trained.items()}
            for name, p in trained.items():
                fill(p.detach(), self._start[name])
        _forget_gathered(self._model)
        try:
            yield
        finally:
            with whole_parameters(trained.values(), writing=True):
                for name, p in trained.items():
                    p.detach().copy_(now[name])
            _forget_gathered(self._model)

    def move(self, policy: nn.Module, alpha: float) -> None:
        for name, parameter in self._model.named_parameters():
            if name in self._start:
                self._start[name].lerp_(whole(parameter.detach()).cpu().float(), alpha)

    def tensors(self) -> dict[str, Tensor]:
        return self._start

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self._start = dict(tensors)

    def identity(self, policy: nn.Module) -> str:
        frozen = {name: p for name, p in self._model.named_parameters() if name not in self._start}
        return hash_weights({**frozen, **self._start})


def starting_reference(policy: Any, moves: bool = False) -> Reference | None:
    """The handle that needs no second model, for a policy under an adapter; None for one trained in full.

    An adapter that adds nothing yet, beside which nothing is trained, has its base for a reference.
    """
    if not is_adapted(policy):
        return None
    with whole_parameters(p for p in policy.parameters() if p.requires_grad):
        return StartingWeights(policy) if moves or not _adds_nothing(policy) else WithoutAdapter(policy)


def _adds_nothing(policy: nn.Module) -> bool:
    """Whether every trained weight is one of LoRA's, and its second matrix is still zero."""
    trained = [(name, p) for name, p in policy.named_parameters() if p.requires_grad]
    wide = [p for name, p in trained if ".lora_B." in name or ".lora_embedding_B." in name]
    narrow = [name for name, _ in trained if ".lora_A." in name or ".lora_embedding_A." in name]
    return len(wide) + len(narrow) == len(trained) and not any(bool(p.detach().any()) for p in wide)


def _forget_gathered(model: nn.Module) -> None:
    """FSDP2 keeps the root gathered after a forward: weights that were swapped must be gathered again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def hash_weights(tensors: dict[str, Any]) -> str:
    """XXH3 of names, dtypes and bytes."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        value = whole(tensors[name].detach()).cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.view(torch.uint8).numpy().data if value.numel() else b"")
    return digest.hexdigest()
