"""Copies of a model that are not trained, and averages of the weights that are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from posttrain.errors import ConfigError, ModelError
from posttrain.parallel.deepspeed import master_weight

# How families name layer k of the decoder.
_LAYER = r"(?:^|\.)(?:layers|h|blocks?)\.{layer}\."


def create_reference_model(
    model: nn.Module, num_shared_layers: int | None = None, pattern: str | None = None
) -> nn.Module:
    """A frozen copy of a model, in eval mode.

    With `num_shared_layers` the weights before that layer, embeddings included, are frozen in both and kept once.
    `pattern` says how a layer is named where the name is unusual.   e.g. "transformer.h.{layer}"
    Raises `ModelError` for weights that are sharded, and where no layer has that name.
    """
    _refuse_sharded(model, "create_reference_model")
    names = [name for name, _ in model.named_parameters()]
    shared = [] if num_shared_layers is None else _names_before(names, num_shared_layers, pattern)
    reference = deepcopy(model)
    for name in shared:
        parameter = model.get_parameter(name).requires_grad_(False)
        reference.get_parameter(name).data = parameter.data
    return reference.requires_grad_(False).eval()


def _names_before(names: list[str], layer: int, pattern: str | None) -> list[str]:
    wanted = _LAYER if pattern is None else re.escape(pattern).replace(re.escape("{layer}"), "{layer}") + r"\."
    found = re.compile(wanted.replace("{layer}", str(layer)))
    first = next((index for index, name in enumerate(names) if found.search(name)), None)
    if first is None:
        raise ModelError(
            f"`num_shared_layers` is {layer} and `pattern` is {pattern!r}; no weight of the model is in a layer of "
            "that name. Give its name as `pattern`, such as 'model.layers.{layer}'."
        )
    return names[:first]


def _refuse_sharded(model: nn.Module, who: str) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) or getattr(parameter, "ds_id", None) is not None:
            raise ModelError(f"{who} needs whole weights, and {name!r} is sharded (FSDP2 or ZeRO-3).")


@torch.no_grad()
def mix_into(target: nn.Module, model: nn.Module, alpha: float) -> None:
    """target ← (1 − α) target + α model, weight by weight.

    Raises `ModelError` when the two do not have the same weights.
    """
    for (name, old), (_, new) in _paired(target, model):
        if old.shape != new.shape:
            raise ModelError(f"{name!r} is {tuple(new.shape)} in the model and {tuple(old.shape)} in its reference.")
        old.lerp_(new.to(old.dtype), alpha)


def _paired(a: nn.Module, b: nn.Module) -> Iterator[tuple[tuple[str, Tensor], tuple[str, Tensor]]]:
    first, second = list(a.named_parameters()), list(b.named_parameters())
    if len(first) != len(second):
        raise ModelError(
            f"The reference has {len(first)} weights and the model {len(second)}; with an adapter the reference is the "
            "base without it, which has nothing to average."
        )
    return zip(first, second, strict=True)


@dataclass
class Bema:
    """Bias-corrected exponential moving average of weights (arXiv 2508.00180, algorithm 1).

    α_t = (ρ + γ t)^−η,  β_t = max((ρ + γ t)^−κ, β_min)
    EMA_t = (1 − β_t) EMA_{t−1} + β_t θ_t
    result_t = EMA_t + α_t (θ_t − θ_0)

    θ_0 and EMA start at the weights of `start`.
    """

    ema_power: float = 0.5  # κ
    bias_power: float = 0.2  # η
    lag: int = 10  # ρ
    multiplier: float = 1.0  # γ
    min_ema_multiplier: float = 0.0
    device: str = "cpu"
    first: dict[str, Tensor] = field(default_factory=dict)  # θ_0
    ema: dict[str, Tensor] = field(default_factory=dict)
    result: dict[str, Tensor] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # of the weights, or of their masters

    def alpha(self, step: int) -> float:
        return (self.lag + self.multiplier * step) ** -self.bias_power

    def beta(self, step: int) -> float:
        return max((self.lag + self.multiplier * step) ** -self.ema_power, self.min_ema_multiplier)

    @torch.no_grad()
    def start(self, model: nn.Module) -> None:
        """Take the trained weights as θ_0. Raises `ModelError` for sharded ones."""
        _refuse_sharded(model, "BEMACallback")
        found = {name: _precise(weight) for name, weight in _trained(model)}
        self.dtypes = {name: weight.dtype for name, weight in found.items()}
        self.first = {name: self._copy(weight) for name, weight in found.items()}
        if not self.first:
            raise ModelError("BEMACallback: no weight of the model is trained.")
        self.ema = {name: weight.clone() for name, weight in self.first.items()}
        self.result = {name: weight.clone() for name, weight in self.first.items()}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        alpha, beta = self.alpha(step), self.beta(step)
        for name, weight in _trained(model):
            now = self._copy(_precise(weight))
            self.ema[name].lerp_(now, beta)
            torch.add(self.ema[name], now - self.first[name], alpha=alpha, out=self.result[name])

    def _copy(self, weight: Tensor) -> Tensor:
        # float32 whatever the weights are: a bf16 average would not move.
        return weight.to(self.device, torch.float32, copy=True)

    def state_of(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's state with the result in place of the trained weights, tied names included."""
        by_weight = {id(weight): self.result[name].to(self.dtypes[name]) for name, weight in _trained(model)}
        state: dict[str, Tensor] = model.state_dict(keep_vars=True)
        return {name: by_weight.get(id(w), w.detach()) for name, w in state.items()}

    def tensors(self) -> Mapping[str, dict[str, Tensor]]:
        """What goes on from a checkpoint."""
        return {"first": self.first, "ema": self.ema, "result": self.result}

    def load(self, tensors: Mapping[str, dict[str, Tensor]]) -> None:
        if set(tensors["ema"]) != set(self.ema):
            raise ConfigError("The BEMA state of the checkpoint belongs to other weights.")
        self.first, self.ema, self.result = (dict(tensors[name]) for name in ("first", "ema", "result"))


def _precise(weight: Tensor) -> Tensor:
    """The weight, or the float32 master that ZeRO keeps of it. A collective under ZeRO."""
    master = master_weight(weight)
    return weight if master is None else master


def _trained(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
