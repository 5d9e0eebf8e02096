"""What the fused losses share: the trained positions of a batch, scored by the head and summed over rows.

Letters: B rows, T positions, N read-outs (trained positions), P pairs, S completions, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.errors import ConfigError
from posttrain.loss.linear import linear_scores
from posttrain.loss.reduce import per_token, sequence_sums
from posttrain.loss.softmax import HeadSpec
from posttrain.types import ScoreRequest, TokenScores


def check_inputs(hidden: Tensor, weight: Tensor, targets: Tensor, names: tuple[str, str, str]) -> None:
    """Raises ConfigError when the shapes do not go together, or the weight is sharded."""
    first, second, third = names
    if type(weight).__name__ == "DTensor":
        raise ConfigError(
            f"{second} is a DTensor. Call the loss in the wrapped model's forward, where the weight is gathered, or "
            "pass weight.full_tensor(grad_placements=…) with the placements your gradients are reduced by."
        )
    if hidden.shape[:-1] != targets.shape:
        raise ConfigError(
            f"{first} has shape {tuple(hidden.shape)} and {third} {tuple(targets.shape)}: they must agree but for the "
            "hidden size. Shift the targets first: position t predicts target t."
        )
    if hidden.shape[-1] != weight.shape[-1]:
        raise ConfigError(f"{first} has {hidden.shape[-1]} columns and {second} {weight.shape[-1]}: they must agree.")


class TrainedRows:
    """The trained positions of rows [B, T], and sums over each row."""

    def __init__(self, targets: Tensor, trained: Tensor) -> None:
        self.count = targets.shape[0]
        self.row, self.position = trained.nonzero(as_tuple=True)
        self.targets = targets[self.row, self.position]
        self.tokens = trained.sum(1)

    def pick(self, x: Tensor) -> Tensor:
        """[B, T, …] → [N, …]; [B, 1] and [B] count for all positions of the row."""
        if x.ndim == 1 or (x.ndim == 2 and x.shape[1] == 1):
            return x.reshape(self.count)[self.row]
        return x[self.row, self.position]

    def score(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, spec: HeadSpec, request: ScoreRequest
    ) -> TokenScores:
        return linear_scores(self.pick(hidden), weight, self.targets, bias, spec, request)

    def sums(self, x: Tensor, average: bool = False) -> Tensor:
        """[N] → [B]"""
        found = sequence_sums(x, self.row, self.count)
        return per_token(found, self.tokens) if average else found


def head_spec(memory_mb: float) -> HeadSpec:
    if memory_mb <= 0:
        raise ConfigError(f"memory_mb={memory_mb}: it must be above 0.")
    return HeadSpec(memory_bytes=int(memory_mb * 2**20))


def reference_logps(
    rows: TrainedRows, inputs: tuple[Tensor | None, Tensor | None, Tensor | None], average: bool, spec: HeadSpec
) -> Tensor | None:
    """Log-probabilities of the rows under the reference head [B], no gradient; None without a reference."""
    hidden, weight, bias = inputs
    if hidden is None or weight is None:
        return None
    with torch.no_grad():
        return rows.sums(rows.score(hidden, weight, bias, spec, ScoreRequest()).logps, average)
