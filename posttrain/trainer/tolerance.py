"""How far apart two numbers may lie that are the same but for rounding."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Tolerance(NamedTuple):
    """Relative differences of loss and gradient, and the mean difference of a log-probability."""

    loss: float
    gradient: float
    logp: float


FULL, HALF = Tolerance(1e-4, 1e-3, 1e-4), Tolerance(2e-2, 0.1, 0.25)
"""In float32, and where products are in bfloat16 or float16. A row that sees another moves by a few nats."""


def tolerance(engine: Any) -> Tolerance:
    """How far apart numbers of the same rows may lie in the run's precision."""
    half = any(p.dtype in (torch.bfloat16, torch.float16) for p in engine.model.parameters() if p.is_floating_point())
    return HALF if half or engine.args.bf16 or engine.args.fp16 else FULL
