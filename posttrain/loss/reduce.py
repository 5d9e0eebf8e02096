"""From read-outs to sequences. Letters: N read-outs, S sequences."""

from __future__ import annotations

import torch
from torch import Tensor


def per_token(total: Tensor, tokens: Tensor) -> Tensor:
    """total / tokens, and total itself (0) for an empty sequence. [S], [S] → [S]"""
    return total / tokens.clamp(min=1)


def sequence_sums(values: Tensor, sequence: Tensor, count: int) -> Tensor:
    """Sum of values [N] over each sequence, `sequence` [N] → [count]. In the dtype of the values, differentiable."""
    return values.new_zeros(count).index_add(0, sequence, values)


def sequence_lengths(sequence: Tensor, count: int) -> Tensor:
    """Read-outs of each sequence: [N] → int64 [count]."""
    return torch.bincount(sequence, minlength=count)


def sequence_means(values: Tensor, sequence: Tensor, count: int) -> Tensor:
    """Mean over each sequence [count]; 0 for an empty one."""
    return per_token(sequence_sums(values, sequence, count), sequence_lengths(sequence, count))
