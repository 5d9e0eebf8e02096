"""The head: hidden states + weight → per-token scores, in chunks. The whole logits are never in memory.

Letters: N read-outs, n read-outs of a chunk, H hidden, V vocabulary.

With logits z = softcap(scale · (h Wᵀ + b)) / temperature, the score of target t is log p_t = z_t − logsumexp(z), and a
loss ℓ(log p_t) has dℓ/dz = ℓ'(log p_t) · (1[j = t] − p_j). When ℓ is known before the forward pass, dh = dz W and
dW = dzᵀ h are formed while the chunk's logits are at hand: three V×H products a token, none repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posttrain.loss.projection import Operands, Projection, scaled
from posttrain.loss.softmax import HeadSpec, chunks, empty_scores, final_logits, logit_gradient, score_chunk, slope
from posttrain.types import ScoreRequest, TokenScores


@dataclass(frozen=True)
class _Plan:
    """Everything about a call that is not a tensor."""

    spec: HeadSpec
    request: ScoreRequest
    dtype: torch.dtype  # of the products
    chunk: int
    wanted: tuple[bool, ...]  # which operands need a gradient
    early: bool  # the weight gradient is formed in the forward pass, and lives through the body's backward

    def gradient(self, logits: Tensor, targets: Tensor, slopes: Tensor) -> Tensor:
        return logit_gradient(logits, targets, slopes, self.spec, self.request.temperature)

    @property
    def first(self) -> tuple[bool, ...]:
        """Which gradients are formed in the forward pass: all, but for a weight's that would break the budget."""
        return tuple(want and (self.early or i != _WEIGHT) for i, want in enumerate(self.wanted))


_WEIGHT = 1  # among the operands


def linear_scores(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, spec: HeadSpec, request: ScoreRequest
) -> TokenScores:
    """Score the targets: hidden [N, H], weight [V, H], targets [N], bias [V] → fp32 scores [N].

    With `request.objective` the gradient is formed here and `total` carries it; `logps` is then detached. Without,
    `logps` carries it, and the chunk's logits are kept for the backward pass when they fit in `spec.memory_bytes`,
    else computed again. Products run in the autocast dtype, or the weight's; the softmax in fp32.
    """
    return head_scores(Operands(hidden, weight, bias), targets, spec, request)


def head_scores(given: Operands, targets: Tensor, spec: HeadSpec, request: ScoreRequest) -> TokenScores:
    """As `linear_scores`, for a weight that adapters add to: see `Operands`."""
    weight, wanted = given.weight, given.wanted()
    early = wanted[_WEIGHT] and request.objective is not None and 4 * weight.numel() <= spec.memory_bytes * 3 // 4
    plan = _Plan(
        spec=spec,
        request=request,
        dtype=product_dtype(weight),
        chunk=spec.chunk_tokens or chunk_tokens(weight, spec.memory_bytes - 4 * weight.numel() * early),
        wanted=wanted,
        early=early,
    )
    function = _Deferred if request.objective is None else _Planned
    with torch.autocast(weight.device.type, enabled=False):
        found: Any = function.apply(plan, targets, *given.tensors())
    total, scores = (None, found) if request.objective is None else (found[0], found[1:])
    return _answer(request, total, *scores)


def _answer(
    request: ScoreRequest,
    total: Tensor | None,
    logps: Tensor,
    entropy: Tensor,
    top1: Tensor,
    mean_logit: Tensor,
    log_collision: Tensor,
) -> TokenScores:
    return TokenScores(
        logps=logps,
        total=total,
        entropy=entropy if request.entropy else None,
        top1=top1 if request.top1 else None,
        mean_logit=mean_logit if request.mean_logit else None,
        log_collision=log_collision if request.log_collision else None,
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


def chunk_tokens(weight: Tensor, memory_bytes: int) -> int:
    """Read-outs whose logits fit in the budget; off the CPU, where the softmax is not blocked, with two fp32 copies."""
    each = product_dtype(weight).itemsize * weight.shape[0]
    if weight.device.type == "cpu":
        return max(16, min(memory_bytes, CPU_CHUNK_BYTES) // each)
    return max(16, memory_bytes // (each + 8 * weight.shape[0]))


class _Planned(torch.autograd.Function):
    """Objective known: gradients formed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, targets: Tensor, *tensors: Tensor | None) -> Any:
        given, objective = Operands(*tensors), plan.request.objective  # pyright: ignore[reportArgumentType]
        assert objective is not None
        N, device = given.hidden.shape[0], given.hidden.device
        scores, slopes, total = empty_scores(N, device), torch.empty(N, device=device), torch.zeros((), device=device)
        projection = Projection(given, plan.dtype, plan.first)
        for part in chunks(N, plan.chunk):
            logits = projection.logits(part)
            score_chunk(logits, targets[part], plan.spec, plan.request, part, scores)
            loss, slopes[part] = slope(objective, scores[0][part], part)
            total += loss
            if any(plan.first):
                projection.add(part, plan.gradient(logits, targets[part], slopes[part]))
        gradients = projection.gradients()
        ctx.plan, ctx.late = plan, plan.wanted[_WEIGHT] and not plan.early
        ctx.dtypes = [None if x is None else x.dtype for x in tensors]
        ctx.save_for_backward(*gradients, *((slopes, targets, *tensors) if ctx.late else ()))
        ctx.mark_non_differentiable(*scores)
        return total, *scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        count = len(ctx.dtypes)
        gradients, late = list(ctx.saved_tensors[:count]), ctx.saved_tensors[count:]
        if ctx.late:
            gradients[_WEIGHT] = _weight_gradient(ctx.plan, *late)
        return None, None, *(scaled(g, grad, dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True))


def _weight_gradient(plan: _Plan, slopes: Tensor, targets: Tensor, *tensors: Any) -> Tensor | None:
    """dW [V, H] formed in the backward pass, when keeping it through the body's backward would break the budget."""
    projection = Projection(Operands(*tensors), plan.dtype, tuple(i == _WEIGHT for i in range(len(tensors))))
    for part in chunks(slopes.shape[0], plan.chunk):
        projection.add(part, plan.gradient(projection.logits(part), targets[part], slopes[part]))
    return projection.gradients()[_WEIGHT]


_ROWWISE = frozenset({0, 3})  # hidden, narrow: the gradient of a row is that of its own log-probability alone


class _Deferred(torch.autograd.Function):
    """Gradient of each log-probability known only in the backward pass.

    With a frozen head every gradient wanted is a row times the gradient of that row's log-probability, so the row for
    a gradient of 1 is formed while the chunk's logits are at hand: two products a token, nothing kept but [N, H].
    Else the chunks are kept within the budget, or projected again.
    """

    @staticmethod
    def forward(ctx: Any, plan: _Plan, targets: Tensor, *tensors: Tensor | None) -> Any:
        given = Operands(*tensors)  # pyright: ignore[reportArgumentType]
        N, V, grad = given.hidden.shape[0], given.weight.shape[0], any(plan.wanted)
        rowwise = grad and all(i in _ROWWISE for i, want in enumerate(plan.wanted) if want)
        scores = empty_scores(N, given.hidden.device)
        projection = Projection(given, plan.dtype, plan.wanted if rowwise else (False,) * len(tensors))
        ones = torch.ones(N, device=given.hidden.device)
        keep = grad and not rowwise and N * V * plan.dtype.itemsize <= plan.spec.memory_bytes
        kept = []
        for part in chunks(N, plan.chunk):
            logits = projection.logits(part)
            score_chunk(logits, targets[part], plan.spec, plan.request, part, scores)
            if rowwise:
                projection.add(part, plan.gradient(logits, targets[part], ones[part]))
            elif keep:
                kept.append(logits)
        if rowwise:
            ctx.save_for_backward(*projection.gradients())
        elif grad:
            ctx.save_for_backward(targets, *tensors)
        ctx.plan, ctx.kept, ctx.rowwise = plan, kept, rowwise
        ctx.mark_non_differentiable(*scores[1:])
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        if ctx.rowwise:
            units = ctx.saved_tensors
            return None, None, *(None if u is None else (u.float() * grad[:, None]).to(u.dtype) for u in units)
        targets, *tensors = ctx.saved_tensors
        plan: _Plan = ctx.plan
        projection = Projection(Operands(*tensors), plan.dtype, plan.wanted)
        for i, part in enumerate(chunks(grad.shape[0], plan.chunk)):
            logits = ctx.kept[i].clone() if ctx.kept else projection.logits(part)
            projection.add(part, plan.gradient(logits, targets[part], grad[part]))
        gradients = projection.gradients()
        return None, None, *(None if g is None else g.to(x.dtype) for g, x in zip(gradients, tensors, strict=True))


# ---- any other head --------------------------------------------------------------------------------------------------


def module_scores(
    project: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    vocabulary: int,
    spec: HeadSpec,
    request: ScoreRequest,
) -> TokenScores:
    """The same answers for a head of which only its forward is known: hidden [n, H] → raw logits [n, V].

    Autograd differentiates `project`, chunk by chunk. A chunk's logits live for its forward and, projected again, for
    its backward: one product more than where the operands are known.
    """
    grad = torch.is_grad_enabled()
    each = 16 * vocabulary  # the logits in the products' dtype, in fp32, their softmax and its gradient
    size = spec.chunk_tokens or max(16, min(spec.memory_bytes, 4 * CPU_CHUNK_BYTES) // each)

    def score(h: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        logits = project(h)
        rest = empty_scores(h.shape[0], h.device)
        with torch.no_grad():
            score_chunk(logits, t, spec, request, slice(None), rest)
        z = final_logits(logits, spec, request.temperature)
        return z.gather(1, t[:, None]).squeeze(1) - torch.logsumexp(z, -1), *rest[1:]

    def run(*args: Tensor) -> Any:
        return checkpoint(score, *args, use_reentrant=False) if grad else score(*args)

    parts = list(chunks(hidden.shape[0], size)) or [slice(0, 0)]  # an empty one still has a graph
    found = [run(hidden[part], targets[part]) for part in parts]
    logps, *rest = (torch.cat(each) for each in zip(*found, strict=True))
    if request.objective is None:
        return _answer(request, None, logps, *rest)
    objective = request.objective
    total = torch.stack([objective(scores[0], part).sum() for scores, part in zip(found, parts, strict=True)]).sum()
    return _answer(request, total, logps.detach(), *rest)
