"""Token-level losses of supervised fine-tuning: functions of each target's own log-probability.

Letters: n read-outs.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def nll(logps: Tensor, weights: Tensor) -> Tensor:
    """ℓ_n = −w_n log p_n: maximum likelihood. logps [n], weights [n] → [n]."""
    return -weights * logps


def dft(logps: Tensor, weights: Tensor) -> Tensor:
    """ℓ_n = −w_n sg(p_n) log p_n: dynamic fine-tuning (arXiv 2508.05629, eq. 9). logps [n], weights [n] → [n].

    The probability rescales the gradient and takes no gradient itself.
    """
    return -weights * logps.detach().exp() * logps


TOKEN_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"nll": nll, "chunked_nll": nll, "dft": dft}
