"""f-DPO: a log-ratio becomes the reward f'(u) of the divergence that holds the policy near its reference
(arXiv 2309.16240, table 1), u = π/π_ref, shifted so that it is 0 at u = 1.

Letters: S sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

FDivergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]

_CAP = 30.0


def capped_exp(x: Tensor) -> Tensor:
    """exp(x), going on along its tangent above 30: finite, with a finite gradient that still points the right way."""
    beyond = (x - _CAP).clamp(min=0)
    return x.clamp(max=_CAP).exp() + math.exp(_CAP) * beyond


def reverse_kl(log_ratio: Tensor, alpha: float) -> Tensor:
    """f(u) = u log u → log u: DPO. [S] → [S]"""
    return log_ratio


def forward_kl(log_ratio: Tensor, alpha: float) -> Tensor:
    """f(u) = −log u → 1 − 1/u. [S] → [S]"""
    return 1 - capped_exp(-log_ratio)


def js_divergence(log_ratio: Tensor, alpha: float) -> Tensor:
    """f(u) = u log u − (u+1) log((u+1)/2) → log(2u/(1+u)). [S] → [S]"""
    return math.log(2) + logsigmoid(log_ratio)


def alpha_divergence(log_ratio: Tensor, alpha: float) -> Tensor:
    """f(u) = (u^(1−α) − (1−α)u − α)/(α(α−1)) → (1 − u^(−α))/α; α → 0 is the reverse KL, α = 1 the forward. [S] → [S]"""
    if alpha == 0:
        return log_ratio
    exponent = -alpha * log_ratio
    small = exponent.abs() < 1  # expm1 keeps the digits that 1 − exp loses near 0
    near = torch.expm1(torch.where(small, exponent, torch.zeros_like(exponent)))
    return -torch.where(small, near, capped_exp(exponent) - 1) / alpha


F_DIVERGENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": reverse_kl,
    "forward_kl": forward_kl,
    "js_divergence": js_divergence,
    "alpha_divergence": alpha_divergence,
}
