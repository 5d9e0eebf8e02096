"""Divergences between a teacher's and a student's next-token distributions, over the whole vocabulary.

Letters: n tokens of a chunk, N tokens, V vocabulary, H and G hidden sizes of student and teacher; p_T, p_S.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from posttrain.errors import ConfigError
from posttrain.loss.linear import chunk_tokens, product_dtype
from posttrain.loss.projection import Operands, Projection, scaled
from posttrain.loss.softmax import HeadSpec, chunks, row_blocks


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(p_T ‖ p_S) = Σ_v p_T (log p_T − log p_S): covers what the teacher does. Log-probabilities [n, V] → [n]."""
    return (teacher.exp() * (teacher - student)).sum(-1)


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(p_S ‖ p_T) = Σ_v p_S (log p_S − log p_T): avoids what the teacher does not. [n, V] → [n]."""
    return forward_kl(teacher, student)


def generalized_jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """β KL(p_T ‖ m) + (1−β) KL(p_S ‖ m), m = β p_T + (1−β) p_S (arXiv 2306.13649, section 2; GKD). [n, V] → [n].

    β = 0 and β = 1 are defined as forward and reverse KL, since the value itself tends to 0 there."""
    if beta == 0:
        return forward_kl(student, teacher)
    if beta == 1:
        return reverse_kl(student, teacher)
    middle = log_mixture(student, teacher, beta)
    return beta * forward_kl(middle, teacher) + (1 - beta) * forward_kl(middle, student)


def log_mixture(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """log m [n, V]."""
    share = torch.tensor(beta, dtype=student.dtype, device=student.device)
    return torch.logaddexp(teacher + share.log(), student + torch.log1p(-share))


def jsd_and_gradient(student: Tensor, teacher: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """The generalised JSD [n] and its gradient by the student's logits [n, V], from log-probabilities [n, V].

    For β = 0: p_S − p_T. Else p_S (g − Σ_v p_S g), g = (1−β) (log p_S − log m), and for β = 1 g = log p_S − log p_T:
    the derivatives by m itself cancel.
    """
    p = student.exp()
    if beta == 0:
        q = teacher.exp()
        return torch.linalg.vecdot(q, teacher - student), p - q
    against = teacher if beta == 1 else log_mixture(student, teacher, beta)
    g = student - against
    reverse = torch.linalg.vecdot(p, g)
    loss = reverse if beta == 1 else (1 - beta) * reverse + beta * torch.linalg.vecdot(teacher.exp(), teacher - against)
    d = p.mul_(g.sub_(reverse[:, None]))
    return loss, d if beta == 1 else d.mul_(1 - beta)


@dataclass(frozen=True)
class _Distillation:
    """Everything about a call that is not a tensor. The loss is Σ_n hard·NLL_n + soft·JSD_n."""

    spec: HeadSpec
    beta: float
    temperature: float  # of both distributions in the JSD; the NLL is at 1
    hard: float
    soft: float
    wanted: tuple[bool, ...]


def linear_jsd(
    student: Operands,
    teacher: Operands,
    targets: Tensor,
    spec: HeadSpec,
    beta: float = 0.5,
    temperature: float = 1.0,
    hard: float = 0.0,
    soft: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_n hard · NLL(target_n) + soft · JSD_n, and its two sums unweighted, without gradient: [], [], [].

    Student [N, H], [V, H]; teacher [N, G], [V, G], no gradient; targets [N]. Logits exist in chunks, the student's
    gradient is formed in the forward pass: three products with its weight and one with the teacher's, none repeated.
    Raises ConfigError when the vocabularies differ in size, or β is outside [0, 1].
    """
    widths = student.weight.shape[0], teacher.weight.shape[0]
    if widths[0] != widths[1]:
        raise ConfigError(
            f"student_weight has {widths[0]} rows and teacher_weight {widths[1]}: a divergence over the vocabulary "
            "needs the same tokens. If the larger one only pads the vocabulary, cut it: weight[:vocabulary]."
        )
    if not 0 <= beta <= 1:
        raise ConfigError(f"beta={beta}: it must be in [0, 1]. 0 is the forward KL, 1 the reverse KL.")
    plan = _Distillation(spec, beta, temperature, hard, soft, student.wanted())
    dtypes = product_dtype(student.weight), product_dtype(teacher.weight)  # asks autocast, so before it is switched off
    with torch.autocast(student.weight.device.type, enabled=False):
        detached = Operands(*(None if x is None else x.detach() for x in teacher.tensors()))  # pyright: ignore[reportArgumentType]
        found: Any = _LinearJSD.apply(plan, dtypes, detached, targets, *student.tensors())
    return found


class _LinearJSD(torch.autograd.Function):
    """The objective is known, so all gradients are formed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: _Distillation,
        dtypes: tuple[torch.dtype, torch.dtype],
        teacher: Operands,
        targets: Tensor,
        *x: Any,
    ) -> Any:
        student = Operands(*x)
        N, device = student.hidden.shape[0], student.hidden.device
        hard, soft = torch.zeros((), device=device), torch.zeros((), device=device)
        projection = Projection(student, dtypes[0], plan.wanted)
        guide = Projection(teacher, dtypes[1], (False,) * len(x))
        # Two chunks are alive at once: the student's and the teacher's.
        for part in chunks(
            N, max(1, (plan.spec.chunk_tokens or chunk_tokens(student.weight, plan.spec.memory_bytes // 2)))
        ):
            logits, guides = projection.logits(part), guide.logits(part)
            for rows in row_blocks(logits):
                add = _block(plan, logits[rows], guides[rows], targets[part][rows])
                hard, soft = hard + add[0], soft + add[1]
            if any(plan.wanted):
                projection.add(part, logits)
        ctx.save_for_backward(*projection.gradients())
        ctx.dtypes = [None if t is None else t.dtype for t in x]
        ctx.mark_non_differentiable(hard, soft)
        return plan.hard * hard + plan.soft * soft, hard, soft

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        gradients = (scaled(g, grad, dtype) for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        return None, None, None, None, *gradients


def _block(plan: _Distillation, logits: Tensor, guides: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """NLL and JSD summed over a block of raw logits [b, V], whose gradient is written over them."""
    z = logits.float()
    logp = log_softmax(z / plan.temperature, -1)
    soft, d = jsd_and_gradient(logp, log_softmax(guides.float() / plan.temperature, -1), plan.beta)
    d.mul_(plan.soft / plan.temperature)
    logp = logp if plan.temperature == 1 else log_softmax(z, -1)
    hard = -logp.gather(1, targets[:, None]).sum()
    if plan.hard:
        d.add_(logp.exp_(), alpha=plan.hard)
        d.scatter_add_(1, targets[:, None], torch.full_like(d[:, :1], -plan.hard))
    logits.copy_(d)
    return hard, soft.sum()
