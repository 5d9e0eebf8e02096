"""Weights of pairs and of tokens, from the policy's own scores. None of them takes a gradient.

Letters: N read-outs, S sequences, P pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.loss.reduce import sequence_means


def wpo_weights(logps: Tensor, log_collision: Tensor, sequence: Tensor, count: int) -> Tensor:
    """w(y) = exp(1/|y| Σ_t log π(y_t) − log Σ_v π(v)²): how likely the policy is to write y (arXiv 2406.11827, eq. 2).

    logps [N], log_collision [N] = log Σ_v π(v)² (`ScoreRequest.log_collision`), sequence [N] → [count]. The
    normaliser is the expected probability of a token drawn from the policy, so a sampled completion weighs about 1.
    """
    return sequence_means((logps - log_collision).detach(), sequence, count).exp()


def wpo_pair_weights(chosen: Tensor, rejected: Tensor) -> Tensor:
    """The weight of a pair: min(1, w(y_w) w(y_l)). [P], [P] → [P]. TRL cuts at 1 too."""
    return (chosen * rejected).clamp(max=1)


def ld_weights(position: Tensor, public_length: Tensor, ld_alpha: float) -> Tensor:
    """1 up to the length both completions of the pair have, α beyond it: LD-DPO (arXiv 2409.06411).

    position [N] of the token in its completion, from 0; public_length [N] min(|y_w|, |y_l|) of its pair → [N]. They
    multiply the log-probabilities of policy and reference before these are summed. α = 1 is DPO.
    """
    inside = (position < public_length).to(torch.float32)
    return inside + ld_alpha * (1 - inside)
