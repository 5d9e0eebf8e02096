"""Causal attention in bfloat16 on a CPU with native bf16 products: torch's flash forward pass, and a backward pass of
our own. Torch's spends most of its time outside the products when a sequence is short.

Letters: H query heads, K key heads, G = H / K query heads a key head, L tokens, D head size, b queries of a block.

With P = exp(scale · Q Kᵀ − lse) and Δ = rowsum(dO ∘ O) (FlashAttention-2, arXiv 2307.08691, algorithm 2):
dV = Pᵀ dO, dS = P ∘ (dO Vᵀ − Δ), dQ = scale · dS K, dK = scale · dSᵀ Q.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posttrain.parallel.device import native_bf16

QUERY_BLOCK = 256
LONGEST = 896
"""Tokens up to which our backward pass is the faster one."""


def fast_on_cpu(query: Tensor, dropout: float) -> bool:
    """Whether `causal_attention` serves the call: bfloat16 on a CPU that multiplies it, short, with gradients."""
    return (
        query.dtype == torch.bfloat16
        and query.device.type == "cpu"
        and query.shape[2] <= LONGEST
        and dropout == 0.0
        and torch.is_grad_enabled()
        and native_bf16()
    )


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """query [1, H, L, D], key and value [1, K, L, D] → [1, H, L, D]. The same numbers as torch's."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _Causal.apply(query, key, value, scale)  # pyright: ignore[reportReturnType]


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors
        H, L, D = q.shape[1:]
        K, G = k.shape[1], H // k.shape[1]
        delta = torch.linalg.vecdot(grad.float(), out.float()).view(K, G, L, 1)
        lse = lse.view(K, G, L, 1)
        q, grad = q.reshape(K, G, L, D), grad.reshape(K, G, L, D)
        k, v = k[0], v[0]
        d_q = torch.empty_like(q)
        d_k, d_v = torch.zeros(K, L, D), torch.zeros(K, L, D)
        for start in range(0, L, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, L)
            rows, seen = slice(start, stop), slice(0, stop)
            q_block, d_out = (x[:, :, rows].reshape(K, G * (stop - start), D) for x in (q, grad))
            p = torch.bmm(q_block, k[:, seen].transpose(1, 2)).view(K, G, stop - start, stop).float()
            p.mul_(ctx.scale).sub_(lse[:, :, rows]).exp_()
            p[..., start:stop].tril_()  # the block on the diagonal; what precedes it is seen whole
            d_v[:, seen] += torch.bmm(p.to(v.dtype).view(K, -1, stop).transpose(1, 2), d_out)
            d_s = torch.bmm(d_out, v[:, seen].transpose(1, 2)).view_as(p).float()
            d_s = d_s.sub_(delta[:, :, rows]).mul_(p).to(k.dtype).view(K, -1, stop)
            d_q[:, :, rows] = torch.bmm(d_s, k[:, seen]).view(K, G, -1, D)
            d_k[:, seen] += torch.bmm(d_s.transpose(1, 2), q_block)
        d_q, d_k = d_q.mul_(ctx.scale), d_k.mul_(ctx.scale)
        return d_q.view(1, H, L, D), d_k[None].to(k.dtype), d_v[None].to(v.dtype), None
