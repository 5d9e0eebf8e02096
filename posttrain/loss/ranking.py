"""Losses of reward models and process reward models.

Letters: P pairs, K steps.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid


def bradley_terry(
    chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, center_coefficient: float = 0.0
) -> Tensor:
    """−log σ(r_w − r_l − m) + κ (r_w + r_l)² (Bradley–Terry; the centring term is arXiv 2312.09244, eq. 2, which leaves
    the rewards' free constant near 0). Rewards [P], margin m [P] → [P]."""
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    loss = -logsigmoid(difference)
    return loss + center_coefficient * (chosen + rejected).square() if center_coefficient else loss


def stepwise(logits: Tensor, correct: Tensor) -> Tensor:
    """Binary cross-entropy of each step's correctness, read at its separator (process supervision, arXiv 2211.14275).

    logits [K] of "correct", correct [K] bool → [K].
    """
    return binary_cross_entropy_with_logits(logits, correct.to(logits.dtype), reduction="none")


def stepwise_two_class(logits: Tensor, correct: Tensor) -> Tensor:
    """As `stepwise`, of a head with one logit for each class, [incorrect, correct]. logits [K, 2] → [K]."""
    return stepwise(logits[:, 1] - logits[:, 0], correct)
