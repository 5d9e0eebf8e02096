"""Forest attention: a token sees its ancestors and itself.

Registered with transformers under `FOREST`. Called with `forest=Segments` (it travels as a keyword through the model,
so that recomputation under checkpointing finds it), the keys of a segment are its ancestors' tokens followed by its
own; called without, it is transformers' sdpa, masks included, so that `generate` and padded batches are what they were.

Letters: T tokens, L own tokens of a segment, A tokens of its ancestors, D head size.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from posttrain.errors import LayoutError
from posttrain.model.cpu_attention import causal_attention, fast_on_cpu
from posttrain.types import Segments

FOREST = "posttrain_forest"
QUERY_BLOCK = 512
"""Queries of one call where a mask is needed: bounds the mask at QUERY_BLOCK × keys."""

_active: ContextVar[bool] = ContextVar("posttrain_forest_active", default=False)


class Calls:
    """How often a model's attention received its segments; the probe compares it with the number of layers."""

    forest = 0


@contextlib.contextmanager
def forest_active() -> Iterator[None]:
    """While entered, no attention mask is built: the segments say who sees whom."""
    token = _active.set(True)
    try:
        yield
    finally:
        _active.reset(token)


def forest_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """None while a forest is active, else sdpa's mask."""
    return None if _active.get() else sdpa_mask(*args, **kwargs)


def forest_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    forest: Segments | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, D], key and value [1, kv_heads, T, D] → [1, T, heads, D].

    Raises `LayoutError` for what this back end cannot compute exactly: soft caps, sinks, bidirectional layers.
    """
    if forest is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise LayoutError(f"`layout='packed'`: this model's attention uses `{name}`; set `layout='padded'`.")
    if query.shape[0] != 1 or query.shape[2] != forest.end[-1] or not getattr(module, "is_causal", True):
        raise LayoutError(
            "`layout='packed'`: this model's attention is not causal over one row; set `layout='padded'`."
        )
    Calls.forest += 1
    if _can_use_varlen(query, dropout):
        return _varlen(query, key, value, forest, scaling, sliding_window), None
    sizes = [end - start for start, end in zip(forest.start, forest.end, strict=True)]
    queries, keys, values = (x.split(sizes, dim=2) for x in (query, key, value))
    outputs = []
    for k, up in enumerate(forest.parent):
        ancestors = []
        while up >= 0:
            ancestors.append(up)
            up = forest.parent[up]
        seen = [*reversed(ancestors), k]
        ks = keys[k] if not ancestors else torch.cat([keys[i] for i in seen], dim=2)
        vs = values[k] if not ancestors else torch.cat([values[i] for i in seen], dim=2)
        outputs.append(_causal(queries[k], ks, vs, dropout, scaling, sliding_window))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _causal(q: Tensor, k: Tensor, v: Tensor, dropout: float, scaling: float | None, window: int | None) -> Tensor:
    """Attention of the last L of A + L positions to all up to themselves: the causal mask is aligned at the bottom
    right, where SDPA's own flag aligns it at the top left."""
    L, total = q.shape[2], k.shape[2]
    options: dict[str, Any] = {"dropout_p": dropout, "scale": scaling, "enable_gqa": q.shape[1] != k.shape[1]}
    if total == L and (window is None or window >= L):
        if fast_on_cpu(q, dropout) and v.shape[3] == q.shape[3]:
            return causal_attention(q, k, v, scaling)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
    offset = total - L
    blocks = []
    for start in range(0, L, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, L)
        first = 0 if window is None else max(0, offset + start - window + 1)
        at = torch.arange(offset + start, offset + stop, device=q.device)[:, None]
        to = torch.arange(first, offset + stop, device=q.device)[None]
        mask = to <= at
        if window is not None:
            mask &= to > at - window
        part = slice(first, offset + stop)
        blocks.append(
            F.scaled_dot_product_attention(q[:, :, start:stop], k[:, :, part], v[:, :, part], attn_mask=mask, **options)
        )
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)


def _can_use_varlen(query: Tensor, dropout: float) -> bool:
    """torch's variable-length flash attention: CUDA, half precision, no dropout."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and dropout == 0.0


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, forest: Segments, scaling: float | None, window: int | None
) -> Tensor:
    """All segments in one call → [1, T, heads, D]. Its causal mask is aligned at the bottom right."""
    from torch.nn.attention.varlen import varlen_attn

    plan = _varlen_plan(forest, query.device)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if plan.keys is not None:
        k, v = k.index_select(0, plan.keys), v.index_select(0, plan.keys)
    left = -1 if window is None else window - 1
    out = varlen_attn(
        *(q.contiguous(), k.contiguous(), v.contiguous(), plan.cu_seq_q, plan.cu_seq_k, plan.max_q, plan.max_k),
        scale=scaling,
        window_size=(left, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, Tensor)
    return out[None]


@dataclass(frozen=True)
class _VarlenPlan:
    keys: Tensor | None  # [Tk] positions of all segments' keys, end to end; None when every segment is a root
    cu_seq_q: Tensor  # [K + 1]
    cu_seq_k: Tensor  # [K + 1]
    max_q: int
    max_k: int


@functools.lru_cache(maxsize=8)
def _varlen_plan(forest: Segments, device: torch.device) -> _VarlenPlan:
    """Built once a micro-batch and used by every layer."""
    seen = [forest.positions(k) for k in range(len(forest.start))]
    own = [end - start for start, end in zip(forest.start, forest.end, strict=True)]
    lengths = [len(positions) for positions in seen]
    shared = any(up >= 0 for up in forest.parent)
    keys = torch.from_numpy(np.concatenate(seen)).to(device) if shared else None
    cu_q, cu_k = (torch.from_numpy(np.cumsum([0, *n]).astype(np.int32)).to(device) for n in (own, lengths))
    return _VarlenPlan(keys, cu_q, cu_k, max(own), max(lengths))


AttentionInterface.register(FOREST, forest_attention)
AttentionMaskInterface.register(FOREST, forest_mask)
