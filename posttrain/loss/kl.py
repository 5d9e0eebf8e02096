"""Estimators of KL(π ‖ π_ref) from tokens that π wrote (Schulman, "Approximating KL divergence", 2020).

Letters: N tokens. log π and log π_ref [N] → [N]; each has the KL as its mean over tokens drawn from π.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from posttrain.loss.fdivergence import capped_exp

KLEstimator = Literal["k1", "k2", "k3"]


def k1(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """log π/π_ref: unbiased, of either sign, with much variance. e.g. −1.0, −1.5 → 0.5"""
    return logps - ref_logps


def k2(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """½ (log π/π_ref)²: biased, at least 0; its gradient is that of the KL, in expectation. e.g. −1.0, −1.5 → 0.125"""
    return 0.5 * (logps - ref_logps).square()


def k3(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """π_ref/π − 1 − log π_ref/π: unbiased, at least 0, with little variance. e.g. −1.0, −1.5 → 0.106531"""
    inverse = ref_logps - logps
    return capped_exp(inverse) - 1 - inverse


KL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
