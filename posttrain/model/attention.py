"""Forest attention: a token sees its ancestors and itself.

Registered with transformers under `FOREST`. Called with `forest=Segments` (it travels as a keyword through the model,
so that recomputation under checkpointing finds it), the keys of a segment are its ancestors' tokens followed by its
own; called without, it is transformers' sdpa, masks included, so that `generate` and padded batches are what they were.

Letters: T tokens, L own tokens of a segment, A tokens of its ancestors, D head size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from posttrain.errors import LayoutError
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


AttentionInterface.register(FOREST, forest_attention)
AttentionMaskInterface.register(FOREST, forest_mask)
