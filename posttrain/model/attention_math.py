"""Attention of one segment: its queries against its ancestors' keys and its own.

Letters: L own tokens, A ancestors' tokens, K = A + L keys, D head size, G query heads a key head, B queries of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posttrain.model.cpu_attention import causal_attention, fast_on_cpu

QUERY_BLOCK = 512
"""Queries of one call where a mask is needed: bounds the mask at QUERY_BLOCK × keys."""


def causal(q: Tensor, k: Tensor, v: Tensor, dropout: float, scaling: float | None, window: int | None) -> Tensor:
    """Attention of the last L of K positions to all up to themselves: the causal mask is aligned at the bottom right,
    where SDPA's own flag aligns it at the top left. q [1, heads, L, D], k and v [1, kv_heads, K, D] → like q."""
    L, K = q.shape[2], k.shape[2]
    options: dict[str, Any] = {"dropout_p": dropout, "scale": scaling, "enable_gqa": q.shape[1] != k.shape[1]}
    if K == L and (window is None or window >= L):
        if fast_on_cpu(q, dropout) and v.shape[3] == q.shape[3]:
            return causal_attention(q, k, v, scaling)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
    found = [
        F.scaled_dot_product_attention(
            q[:, :, rows], k[:, :, keys], v[:, :, keys], attn_mask=_mask(rows, keys, K - L, window, q.device), **options
        )
        for rows, keys in _blocks(L, K, window)
    ]
    return found[0] if len(found) == 1 else torch.cat(found, dim=2)


def capped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """As `causal`, with scores s = c·tanh(qk·scale / c) (Gemma 2, arXiv 2408.00118, section 2) and an attention sink:
    p_j = exp(s_j) / (Σ exp(s) + exp(sink)) (gpt-oss; one learned logit a head, sinks [heads]).

    In blocks of queries, each computed again in the backward pass: at no time are L × K scores in memory.
    """
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    L, K = q.shape[2], k.shape[2]
    found = []
    for rows, keys in _blocks(L, K, window):
        # The mask is made in the block: kept for all blocks, it would be L × K.
        where = (rows, keys, K - L, window)
        args = (q[:, :, rows], k[:, :, keys], v[:, :, keys], where, sinks, scale, softcap, dropout)
        if torch.is_grad_enabled():
            found.append(checkpoint(_block, *args, use_reentrant=False, preserve_rng_state=dropout > 0))
        else:
            found.append(_block(*args))
    return found[0] if len(found) == 1 else torch.cat(found, dim=2)


def _block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    where: tuple[slice, slice, int, int | None],
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    """q [1, heads, B, D] → [1, heads, B, D]. Softmax in fp32."""
    heads, B = q.shape[1:3]
    groups = k.shape[1]
    # Heads that share a key are rows of one product, so that keys are not repeated.
    scores = (q * scale).reshape(1, groups, -1, q.shape[-1]) @ k.transpose(2, 3)
    scores = scores.view(1, heads, B, -1).float()
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~_mask(*where, q.device), float("-inf"))
    total = scores.logsumexp(-1, keepdim=True)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.float().view(1, heads, 1, 1))
    p = F.dropout((scores - total).exp(), dropout).to(v.dtype)
    return (p.view(1, groups, -1, p.shape[-1]) @ v).view(1, heads, B, -1)


def _blocks(L: int, K: int, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Queries of each block, and the keys that any of them sees."""
    offset = K - L
    for start in range(0, L, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, L)
        first = 0 if window is None else max(0, offset + start - window + 1)
        yield slice(start, stop), slice(first, offset + stop)


def _mask(rows: slice, keys: slice, offset: int, window: int | None, device: torch.device) -> Tensor:
    """[queries, keys] whether a query sees a key."""
    at = torch.arange(offset + rows.start, offset + rows.stop, device=device)[:, None]
    to = torch.arange(keys.start, keys.stop, device=device)[None]
    mask = to <= at
    if window is not None:
        mask &= to > at - window
    return mask
