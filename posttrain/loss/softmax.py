"""The elementwise half of the head: raw logits of a chunk → scores, and the gradient of the raw logits.

Letters: N read-outs, n read-outs of a chunk, b rows of a block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.types import ScoreRequest, TokenObjective


@dataclass(frozen=True)
class HeadSpec:
    """What follows the product, and how much memory the head may take: logits of a chunk and the weight gradient.

    e.g. HeadSpec(scale=0.0625) for a Cohere model, HeadSpec(softcap=30.0) for Gemma 2
    """

    scale: float = 1.0
    softcap: float | None = None
    chunk_tokens: int | None = None
    memory_bytes: int = 1 << 30


def chunks(total: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover `total`."""
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def empty_scores(N: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """logps, entropy, top1, mean_logit, log_collision; [N] each."""
    logps, entropy, top1, mean_logit, collision = torch.empty(5, N, device=device).unbind(0)
    return logps.clone(), entropy.clone(), top1.clone(), mean_logit.clone(), collision.clone()


def slope(objective: TokenObjective, logps: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """Sum of the objective over a chunk, and its derivative at each log-probability [n]."""
    with torch.enable_grad():
        leaf = logps.detach().requires_grad_()
        loss = objective(leaf, part).sum()
        (found,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), found


def row_blocks(logits: Tensor) -> Iterator[slice]:
    """Blocks of rows for the elementwise part: on a CPU small enough to stay in cache, elsewhere the whole chunk."""
    rows = logits.shape[0]
    if logits.device.type != "cpu":
        return chunks(rows, max(rows, 1))
    return chunks(rows, max(1, (2 << 20) // (4 * logits.shape[1])))


def final_logits(block: Tensor, spec: HeadSpec, temperature: float) -> Tensor:
    """Raw logits [b, V] → fp32 logits after scale, soft cap and temperature."""
    z = block.float()
    if spec.scale != 1.0:
        z = z * spec.scale
    if spec.softcap is not None:
        z = torch.tanh(z / spec.softcap) * spec.softcap
    return z if temperature == 1.0 else z / temperature


def score_chunk(
    logits: Tensor, targets: Tensor, spec: HeadSpec, request: ScoreRequest, part: slice, scores: tuple[Tensor, ...]
) -> None:
    """Fill the scores of one chunk from its raw logits [n, V]."""
    logps, entropy, top1, mean_logit, collision = (s[part] for s in scores)
    for rows in row_blocks(logits):
        z = final_logits(logits[rows], spec, request.temperature)
        at_target = z.gather(1, targets[rows, None]).squeeze(1)
        log_norm = torch.logsumexp(z, -1)
        logps[rows] = at_target - log_norm
        if request.top1:
            top1[rows] = (at_target >= z.amax(-1)).float()
        if request.mean_logit:
            mean_logit[rows] = z.mean(-1)
        if request.log_collision:
            collision[rows] = log_collision(z)
        if request.entropy:
            p = (z - log_norm[:, None]).exp_()
            entropy[rows] = log_norm - torch.linalg.vecdot(p, z)


def log_collision(z: Tensor) -> Tensor:
    """log Σ_v p_v² of final logits [b, V] → [b]: the log of how likely two tokens drawn from p are the same."""
    return torch.logsumexp(2 * z, -1) - 2 * torch.logsumexp(z, -1)


def logit_gradient(logits: Tensor, targets: Tensor, slopes: Tensor, spec: HeadSpec, temperature: float) -> Tensor:
    """d loss / d raw logits [n, V], written over the raw logits. dz_j = slope · (1[j = t] − p_j), then the chain rule
    through temperature, soft cap and scale."""
    for rows in row_blocks(logits):
        z = final_logits(logits[rows], spec, temperature)
        d = torch.softmax(z, -1).mul_(-slopes[rows, None])
        d.scatter_add_(1, targets[rows, None], slopes[rows, None])
        if spec.softcap is not None:
            d.mul_(1 - (z * (temperature / spec.softcap)).square_())
        if spec.scale != temperature:
            d.mul_(spec.scale / temperature)
        logits[rows].copy_(d)
    return logits
