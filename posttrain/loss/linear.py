"""The head: hidden states + weight → per-token scores, in chunks. The whole logits are never in memory.

Letters: N read-outs, n read-outs of a chunk, H hidden, V vocabulary.

With logits z = softcap(scale · (h Wᵀ + b)) / temperature, the score of target t is log p_t = z_t − logsumexp(z), and a
loss ℓ(log p_t) has dℓ/dz = ℓ'(log p_t) · (1[j = t] − p_j). When ℓ is known before the forward pass, dh = dz W and
dW = dzᵀ h are formed while the chunk's logits are at hand: three V×H products a token, none repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.types import ScoreRequest, TokenObjective, TokenScores


@dataclass(frozen=True)
class HeadSpec:
    """What follows the product, and how much memory the head may take: logits of a chunk and the weight gradient.

    e.g. HeadSpec(scale=0.0625) for a Cohere model, HeadSpec(softcap=30.0) for Gemma 2
    """

    scale: float = 1.0
    softcap: float | None = None
    chunk_tokens: int | None = None
    memory_bytes: int = 1 << 30


@dataclass(frozen=True)
class _Plan:
    """Everything about a call that is not a tensor."""

    spec: HeadSpec
    request: ScoreRequest
    dtype: torch.dtype  # of the products
    chunk: int
    hidden_grad: bool
    weight_grad: bool
    bias_grad: bool
    early: bool  # the weight gradient is formed in the forward pass, and lives through the body's backward


def linear_scores(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, spec: HeadSpec, request: ScoreRequest
) -> TokenScores:
    """Score the targets: hidden [N, H], weight [V, H], targets [N], bias [V] → fp32 scores [N].

    With `request.objective` the gradient is formed here and `total` carries it; `logps` is then detached. Without,
    `logps` carries it, and the chunk's logits are kept for the backward pass when they fit in `spec.memory_bytes`,
    else computed again. Products run in the autocast dtype, or the weight's; the softmax in fp32.
    """
    grad = torch.is_grad_enabled()
    weight_grad = grad and weight.requires_grad
    early = weight_grad and request.objective is not None and 4 * weight.numel() <= spec.memory_bytes * 3 // 4
    plan = _Plan(
        spec=spec,
        request=request,
        dtype=product_dtype(weight),
        chunk=spec.chunk_tokens or _chunk_tokens(weight, spec.memory_bytes - 4 * weight.numel() * early),
        hidden_grad=grad and hidden.requires_grad,
        weight_grad=weight_grad,
        bias_grad=grad and bias is not None and bias.requires_grad,
        early=early,
    )
    function = _Deferred if request.objective is None else _Planned
    with torch.autocast(hidden.device.type, enabled=False):
        first, *rest = function.apply(hidden, weight, bias, targets, plan)  # pyright: ignore[reportGeneralTypeIssues]
    logps, entropy, top1, mean_logit = rest if request.objective is not None else (first, *rest)
    return TokenScores(
        logps=logps,
        total=first if request.objective is not None else None,
        entropy=entropy if request.entropy else None,
        top1=top1 if request.top1 else None,
        mean_logit=mean_logit if request.mean_logit else None,
    )


def product_dtype(weight: Tensor) -> torch.dtype:
    """Dtype of the head's products: what autocast says, else the weight's own; fp32 where a CPU only emulates bf16."""
    device = weight.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    if device == "cpu" and dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.float32  # emulated products are up to 70 times slower, and less exact
    return dtype


CPU_CHUNK_BYTES = 48 << 20
"""Logits a CPU projects at once: products of more rows are no faster there."""


WEIGHT_BLOCK_BYTES = 2 << 20
"""Rows of the weight gradient whose summand is formed at once, in fp32: products of more rows are no faster."""


def _chunk_tokens(weight: Tensor, memory_bytes: int) -> int:
    """Read-outs whose logits fit in the budget; off the CPU, where the softmax is not blocked, with two fp32 copies."""
    each = product_dtype(weight).itemsize * weight.shape[0]
    if weight.device.type == "cpu":
        return max(16, min(memory_bytes, CPU_CHUNK_BYTES) // each)
    return max(16, memory_bytes // (each + 8 * weight.shape[0]))


def _chunks(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


class _Planned(torch.autograd.Function):
    """Objective known: gradients formed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, plan: _Plan) -> Any:
        objective = plan.request.objective
        assert objective is not None
        N = hidden.shape[0]
        w = weight.to(plan.dtype)
        scores = _empty_scores(N, hidden.device)
        total = torch.zeros((), device=hidden.device)
        grads = _Gradients(hidden, weight, w, plan.hidden_grad, plan.early, plan.bias_grad)
        slopes = torch.empty(N, device=hidden.device)
        for part in _chunks(N, plan.chunk):
            h = hidden[part].to(plan.dtype)
            logits = _logits(h, w, bias)
            _score_chunk(logits, targets[part], plan, part, scores)
            loss, slopes[part] = _slope(objective, scores[0][part], part)
            total += loss
            if plan.hidden_grad or plan.early or plan.bias_grad:
                grads.add(part, h, _logit_gradient(logits, targets[part], slopes[part], plan))
        late = plan.weight_grad and not plan.early
        ctx.plan, ctx.late = plan, late
        ctx.save_for_backward(
            grads.hidden, grads.weight, grads.bias, *((hidden, weight, bias, targets, slopes) if late else (None,) * 5)
        )
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, bias.dtype if bias is not None else None
        ctx.mark_non_differentiable(*scores)
        return total, *scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        d_hidden, d_weight, d_bias, hidden, weight, bias, targets, slopes = ctx.saved_tensors
        if ctx.late:
            d_weight = _weight_gradient(hidden, weight, bias, targets, slopes, ctx.plan)
        return (
            None if d_hidden is None else (d_hidden.float() * grad).to(d_hidden.dtype),
            None if d_weight is None else _scaled(d_weight, grad, ctx.weight_dtype),
            None if d_bias is None else (d_bias * grad).to(ctx.bias_dtype),
            None,
            None,
        )


class _Deferred(torch.autograd.Function):
    """Gradient of each log-probability known only in the backward pass: chunks kept within the budget, else
    recomputed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, plan: _Plan) -> Any:
        N, V = hidden.shape[0], weight.shape[0]
        w = weight.to(plan.dtype)
        scores = _empty_scores(N, hidden.device)
        any_grad = plan.hidden_grad or plan.weight_grad or plan.bias_grad
        keep = any_grad and N * V * plan.dtype.itemsize <= plan.spec.memory_bytes
        kept = []
        for part in _chunks(N, plan.chunk):
            logits = _logits(hidden[part].to(plan.dtype), w, bias)
            _score_chunk(logits, targets[part], plan, part, scores)
            if keep:
                kept.append(logits)
        if any_grad:
            ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.plan, ctx.kept = plan, kept
        ctx.mark_non_differentiable(*scores[1:])
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        hidden, weight, bias, targets = ctx.saved_tensors
        plan: _Plan = ctx.plan
        w = weight.to(plan.dtype)
        grads = _Gradients(hidden, weight, w, plan.hidden_grad, plan.weight_grad, plan.bias_grad)
        for i, part in enumerate(_chunks(hidden.shape[0], plan.chunk)):
            h = hidden[part].to(plan.dtype)
            logits = ctx.kept[i].clone() if ctx.kept else _logits(h, w, bias)
            grads.add(part, h, _logit_gradient(logits, targets[part], grad[part], plan))
        return (
            grads.hidden,
            None if grads.weight is None else grads.weight.to(weight.dtype),
            None if grads.bias is None or bias is None else grads.bias.to(bias.dtype),
            None,
            None,
        )


class _Gradients:
    """Gradients of the hidden states [N, H], the weight [V, H] and the bias [V], those that are wanted, added up chunk
    by chunk from the gradient of each chunk's logits."""

    def __init__(self, hidden: Tensor, weight: Tensor, w: Tensor, of_hidden: bool, of_weight: bool, of_bias: bool):
        self._like, self._w, self._of_weight = weight, w, of_weight
        self.hidden = torch.empty_like(hidden) if of_hidden else None
        self.bias = torch.zeros(weight.shape[0], device=hidden.device) if of_bias else None
        self._weight: Tensor | None = None

    def add(self, part: slice, h: Tensor, d_logits: Tensor) -> None:
        if self.hidden is not None:
            self.hidden[part] = (d_logits @ self._w).to(self.hidden.dtype)
        if self._of_weight:
            self._weight = _accumulate_product(self._weight, d_logits, h)
        if self.bias is not None:
            self.bias += d_logits.sum(0, dtype=torch.float32)

    @property
    def weight(self) -> Tensor | None:
        """None when it is not wanted; 0 when there was no chunk."""
        return torch.zeros_like(self._like) if self._of_weight and self._weight is None else self._weight


def _weight_gradient(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, slopes: Tensor, plan: _Plan
) -> Tensor | None:
    """dW [V, H] formed in the backward pass, when keeping it through the body's backward would break the budget."""
    w = weight.to(plan.dtype)
    grads = _Gradients(hidden, weight, w, of_hidden=False, of_weight=True, of_bias=False)
    for part in _chunks(hidden.shape[0], plan.chunk):
        h = hidden[part].to(plan.dtype)
        grads.add(part, h, _logit_gradient(_logits(h, w, bias), targets[part], slopes[part], plan))
    return grads.weight


def _empty_scores(N: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logps, entropy, top1, mean_logit; [N] each."""
    logps, entropy, top1, mean_logit = torch.empty(4, N, device=device).unbind(0)
    return logps.clone(), entropy.clone(), top1.clone(), mean_logit.clone()


def _logits(h: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """[n, V] in the product dtype, before scale and soft cap."""
    return h @ w.t() if bias is None else torch.addmm(bias.to(h.dtype), h, w.t())


def _accumulate_product(d_weight: Tensor | None, d_logits: Tensor, h: Tensor) -> Tensor:
    """d_weight + d_logitsᵀ h [V, H]. Chunks are summed in fp32; one chunk alone stays in the product dtype."""
    if d_weight is None:
        return d_logits.t() @ h
    if d_logits.dtype == torch.float32:
        return d_weight.addmm_(d_logits.t(), h)
    d_weight = d_weight.float()
    for rows in _weight_blocks(d_weight):
        d_weight[rows] += d_logits[:, rows].t() @ h
    return d_weight


def _scaled(d_weight: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    """d_weight · grad [V, H], in blocks: no second copy in fp32 at the moment when the first one and the gradient
    are both alive."""
    out = torch.empty_like(d_weight, dtype=dtype)
    for rows in _weight_blocks(d_weight):
        out[rows] = d_weight[rows] * grad
    return out


def _weight_blocks(weight: Tensor) -> Iterator[slice]:
    """Rows of a [V, H] matrix, WEIGHT_BLOCK_BYTES in fp32 at once; 128 times that off the CPU."""
    block = WEIGHT_BLOCK_BYTES if weight.device.type == "cpu" else 128 * WEIGHT_BLOCK_BYTES
    return _chunks(weight.shape[0], max(1, block // (4 * weight.shape[1])))


def _slope(objective: TokenObjective, logps: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """Sum of the objective over a chunk, and its derivative at each log-probability [n]."""
    with torch.enable_grad():
        leaf = logps.detach().requires_grad_()
        loss = objective(leaf, part).sum()
        (slope,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), slope


def _row_blocks(logits: Tensor) -> Iterator[slice]:
    """Blocks of rows for the elementwise part: on a CPU small enough to stay in cache, elsewhere the whole chunk."""
    rows = logits.shape[0]
    if logits.device.type != "cpu":
        return _chunks(rows, max(rows, 1))
    return _chunks(rows, max(1, (2 << 20) // (4 * logits.shape[1])))


def _final_logits(block: Tensor, plan: _Plan) -> Tensor:
    """Raw logits [b, V] → fp32 logits after scale, soft cap and temperature."""
    z = block.float()
    if plan.spec.scale != 1.0:
        z = z * plan.spec.scale
    if plan.spec.softcap is not None:
        z = torch.tanh(z / plan.spec.softcap) * plan.spec.softcap
    return z if plan.request.temperature == 1.0 else z / plan.request.temperature


def _score_chunk(logits: Tensor, targets: Tensor, plan: _Plan, part: slice, scores: tuple[Tensor, ...]) -> None:
    """Fill the scores of one chunk from its raw logits [n, V]."""
    logps, entropy, top1, mean_logit = (s[part] for s in scores)
    for rows in _row_blocks(logits):
        z = _final_logits(logits[rows], plan)
        at_target = z.gather(1, targets[rows, None]).squeeze(1)
        log_norm = torch.logsumexp(z, -1)
        logps[rows] = at_target - log_norm
        if plan.request.top1:
            top1[rows] = (at_target >= z.amax(-1)).float()
        if plan.request.mean_logit:
            mean_logit[rows] = z.mean(-1)
        if plan.request.entropy:
            p = (z - log_norm[:, None]).exp_()
            entropy[rows] = log_norm - torch.linalg.vecdot(p, z)


def _logit_gradient(logits: Tensor, targets: Tensor, slopes: Tensor, plan: _Plan) -> Tensor:
    """d loss / d raw logits [n, V], written over the raw logits. dz_j = slope · (1[j = t] − p_j), then the chain rule
    through temperature, soft cap and scale."""
    softcap, temperature = plan.spec.softcap, plan.request.temperature
    for rows in _row_blocks(logits):
        z = _final_logits(logits[rows], plan)
        d = torch.softmax(z, -1).mul_(-slopes[rows, None])
        d.scatter_add_(1, targets[rows, None], slopes[rows, None])
        if softcap is not None:
            d.mul_(1 - (z * (temperature / softcap)).square_())
        if plan.spec.scale != temperature:
            d.mul_(plan.spec.scale / temperature)
        logits[rows].copy_(d)
    return logits
