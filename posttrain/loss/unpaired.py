"""Losses of single completions, each desirable or not.

Letters: S completions, ρ = log π/π_ref summed over the completion's tokens, M mismatched completions.

Each function takes `Unpaired` and `UnpairedOptions` and returns the loss of each completion [S], finite with finite
gradients for log-ratios up to ±1e4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.errors import ConfigError, suggest

UnpairedLoss = Literal["kto", "apo_zero_unpaired", "bco"]


@dataclass(frozen=True)
class Unpaired:
    """What is known of each completion. e.g. Unpaired(tensor([-4.0]), tensor([-5.0]), tensor([True]))"""

    logps: Tensor  # [S]   log π, summed over the completion's tokens
    ref_logps: Tensor | None  # [S]   no gradient; None counts as 0
    desirable: Tensor  # [S]   bool
    kl: Tensor | float = 0.0  # [] or [S]   KTO's z, from `kl_estimate`
    delta: Tensor | float = 0.0  # []   BCO's δ: the running mean of the rewards of both classes
    udm: Tensor | None = None  # [S]   from `udm_weights`: weight of each undesirable completion

    def log_ratios(self) -> Tensor:
        return self.logps if self.ref_logps is None else self.logps - self.ref_logps


@dataclass(frozen=True)
class UnpairedOptions:
    """Constants of the losses, by the names of the config fields."""

    beta: float = 0.1
    desirable_weight: float = 1.0  # λ_D
    undesirable_weight: float = 1.0  # λ_U


def kl_estimate(log_ratios: Tensor) -> Tensor:
    """z = max(0, mean ρ over mismatched pairs): prompts with another prompt's completion (arXiv 2402.01306, eq. 8).

    log_ratios [M] → [], without a gradient; 0 when there are none. Their scale is β-free, as in eq. 7.
    """
    if log_ratios.numel() == 0:
        return log_ratios.new_zeros(())
    return log_ratios.detach().mean().clamp(min=0)


def _weighted(losses: Tensor, rows: Unpaired, options: UnpairedOptions) -> Tensor:
    desirable, undesirable = (losses.new_tensor(w) for w in (options.desirable_weight, options.undesirable_weight))
    return torch.where(rows.desirable, desirable, undesirable) * losses


def kto(rows: Unpaired, options: UnpairedOptions) -> Tensor:
    """λ_D(1 − σ(β(ρ − z))) for a desirable completion, λ_U(1 − σ(β(z − ρ))) for an undesirable one
    (arXiv 2402.01306, eq. 7). → [S]"""
    gain = options.beta * (rows.log_ratios() - rows.kl)
    return _weighted(torch.sigmoid(torch.where(rows.desirable, -gain, gain)), rows, options)


def apo_zero_unpaired(rows: Unpaired, options: UnpairedOptions) -> Tensor:
    """λ_D(1 − σ(βρ)) for a desirable completion, λ_U σ(βρ) for an undesirable one: the two terms of eq. 7 of
    arXiv 2408.06266, each on completions of its own. → [S]"""
    reward = options.beta * rows.log_ratios()
    return _weighted(torch.sigmoid(torch.where(rows.desirable, -reward, reward)), rows, options)


def bco(rows: Unpaired, options: UnpairedOptions) -> Tensor:
    """−λ_D log σ(βρ − δ) for a desirable completion, −λ_U w log σ(−(βρ − δ)) for an undesirable one, w its UDM weight
    or 1 (arXiv 2404.04656). → [S]"""
    reward = options.beta * rows.log_ratios() - rows.delta
    losses = _weighted(-logsigmoid(torch.where(rows.desirable, reward, -reward)), rows, options)
    return losses if rows.udm is None else torch.where(rows.desirable, losses, rows.udm * losses)


def udm_weights(probability: Tensor, low: float = 0.5, high: float = 2.0) -> Tensor:
    """P(desirable | prompt)/P(undesirable | prompt) within [low, high]: how much the prompt of an undesirable
    completion looks like those of desirable ones (underlying distribution matching, arXiv 2404.04656).

    probability [S] of a prompt classifier → [S], no gradient.
    """
    p = probability.detach().clamp(1e-6, 1 - 1e-6)
    return (p / (1 - p)).clamp(low, high)


def running_mean(mean: Tensor, count: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and count after values [S] more: BCO's δ over a run. mean [], count [] → [], []"""
    total = count + values.numel()
    return (mean * count + values.detach().sum()) / total.clamp(min=1), total


@dataclass(frozen=True)
class UnpairedRow:
    """A row of the table: the loss, and what of its arguments it reads. All have a reference."""

    loss: Callable[[Unpaired, UnpairedOptions], Tensor]
    batch: str | None = None  # what of the whole optimizer batch it needs: "kl" or "delta"
    udm: bool = False

    def __call__(self, rows: Unpaired, options: UnpairedOptions) -> Tensor:
        return self.loss(rows, options)


UNPAIRED: dict[str, UnpairedRow] = {
    "kto": UnpairedRow(kto, batch="kl"),
    "apo_zero_unpaired": UnpairedRow(apo_zero_unpaired),
    "bco": UnpairedRow(bco, batch="delta", udm=True),
}


def check_unpaired(name: str, options: UnpairedOptions) -> None:
    """Refuse a loss that does not exist and constants below 0. Raises ConfigError."""
    if name not in UNPAIRED:
        raise ConfigError(f"loss_type={name!r} is not known.{suggest(name, UNPAIRED)} One of: {[*UNPAIRED]}.")
    for f in fields(options):
        value = getattr(options, f.name)
        if value < 0 or (f.name == "beta" and value == 0):
            raise ConfigError(f"{f.name}={value}: it must be {'above' if f.name == 'beta' else 'at least'} 0.")
