"""Attention in bfloat16 on the CPU: no further from float64 than torch's own, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.model import cpu_attention
from posttrain.model.cpu_attention import causal_attention, fast_on_cpu


def torchs(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def inputs(length: int, heads: int, key_heads: int, size: int) -> tuple[list[Tensor], Tensor]:
    """Query, key, value [1, heads, L, D] laid out as a model's projections leave them, and a gradient."""
    draw = torch.Generator().manual_seed(length)
    q, k, v, g = (
        torch.randn(1, length, n, size, generator=draw).to(torch.bfloat16).transpose(1, 2)
        for n in (heads, key_heads, key_heads, heads)
    )
    return [q, k, v], g


def gradients(attend: Callable[..., Tensor], values: list[Tensor], grad: Tensor, scale: float | None) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in values]
    out = attend(*leaves, scale)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(("length", "heads", "key_heads"), [(1, 2, 2), (7, 4, 2), (64, 9, 3), (300, 4, 1), (530, 4, 4)])
def test_no_further_from_float64_than_torchs(length: int, heads: int, key_heads: int, scale: float | None) -> None:
    values, grad = inputs(length, heads, key_heads, 16)
    exact = gradients(torchs, [x.double() for x in values], grad.double(), scale)
    ours, theirs = (gradients(f, values, grad, scale) for f in (causal_attention, torchs))
    for want, mine, other in zip(exact, ours, theirs, strict=True):
        size = want.norm() + grad.double().norm()  # of one token alone the gradients of q and k are 0
        error, allowed = ((x.double() - want).norm() / size for x in (mine, other))
        assert mine.dtype == torch.bfloat16
        assert error <= 1.5 * allowed + 4e-3


def test_a_token_does_not_see_the_next_ones() -> None:
    values, grad = inputs(40, 2, 2, 16)
    grad[:, :, 20:] = 0
    _, _, d_k, d_v = gradients(causal_attention, values, grad, None)
    assert not d_k[:, :, 20:].any() and not d_v[:, :, 20:].any()
    assert d_k[:, :, :20].any() and d_v[:, :, :20].any()


def test_is_used_for_what_it_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_attention, "native_bf16", lambda: True)
    q = torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16)
    assert fast_on_cpu(q, 0.0)
    assert not fast_on_cpu(q, 0.1)
    assert not fast_on_cpu(q.float(), 0.0)
    assert not fast_on_cpu(q.expand(1, 2, 8, 16).repeat(1, 1, 400, 1), 0.0)
    with torch.no_grad():
        assert not fast_on_cpu(q, 0.0)
