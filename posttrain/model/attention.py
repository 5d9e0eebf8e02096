"""Forest attention: a token sees its ancestors and itself.

Registered with transformers' attention interface. Called with `forest=Segments` (it travels as a keyword through the
model, so that recomputation under checkpointing finds it), the keys of a segment are its ancestors' tokens followed by
its own. Called without, it is what the family has by default, masks included, so that `generate` and padded batches are
what they were: under `FOREST` sdpa; under `FOREST_EAGER`, for families that sdpa cannot serve (soft caps, sinks), their
own eager function.

Letters: T tokens, D head size.
"""

from __future__ import annotations

import contextlib
import functools
import sys
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
from transformers.masking_utils import eager_mask, sdpa_mask

from posttrain.errors import LayoutError
from posttrain.model.attention_math import capped, causal
from posttrain.types import Segments

FOREST = "posttrain_forest"
FOREST_EAGER = "posttrain_forest_eager"
NAMES = (FOREST, FOREST_EAGER)

_active: ContextVar[bool] = ContextVar("posttrain_forest_active", default=False)
_UNSAID = -1


class Calls:
    """How often a model's attention received its segments; the probe compares it with the number of layers."""

    forest = 0


def forest_name(model: Any) -> str:
    """Name under which a model takes forest attention; without a forest it then does what it does by default."""
    return FOREST if getattr(model, "_supports_sdpa", False) else FOREST_EAGER


def default_name(model: Any) -> str:
    """Attention that transformers gives the model when none is asked for."""
    return "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"


@contextlib.contextmanager
def forest_active() -> Iterator[None]:
    """While entered, no attention mask is built: the segments say who sees whom."""
    token = _active.set(True)
    try:
        yield
    finally:
        _active.reset(token)


def is_forest_active() -> bool:
    return _active.get()


def forest_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """None while a forest is active, else sdpa's mask."""
    return None if _active.get() else sdpa_mask(*args, **kwargs)


def forest_eager_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """None while a forest is active, else eager attention's mask."""
    return None if _active.get() else eager_mask(*args, **kwargs)


def forest_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    forest: Segments | None = None,
    sliding_window: int | None = _UNSAID,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """query [1, heads, T, D], key and value [1, kv_heads, T, D] → [1, T, heads, D].

    Raises `LayoutError` for what this back end cannot compute exactly: position biases, bidirectional layers.
    """
    if forest is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    window = _window(module) if sliding_window == _UNSAID else sliding_window
    return _attend(module, query, key, value, attention_mask, forest, dropout, scaling, window, **kwargs), None


def forest_eager_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    forest: Segments | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """As `forest_attention`; without a forest, the eager function of the module's own modelling file."""
    if forest is None:
        own = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
        return own(module, query, key, value, attention_mask, **kwargs)
    return forest_attention(module, query, key, value, attention_mask, forest=forest, **kwargs)


def _window(module: Any) -> int | None:
    """The window of a layer that builds it into its mask and does not pass it on (Qwen2-MoE, PhiMoE)."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    if kinds and kinds[module.layer_idx] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None) or None


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    forest: Segments,
    dropout: float,
    scaling: float | None,
    window: int | None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """[1, T, heads, D]"""
    for name, given in (("position_bias", position_bias), ("attention_mask", attention_mask)):
        if given is not None:  # while a forest is active no mask is made, so this one is the layer's own
            raise LayoutError(f"`layout='packed'`: this model's attention has a `{name}`; set `layout='padded'`.")
    if query.shape[0] != 1 or query.shape[2] != forest.end[-1] or not getattr(module, "is_causal", True):
        raise LayoutError(
            "`layout='packed'`: this model's attention is not causal over one row; set `layout='padded'`."
        )
    Calls.forest += 1
    size = value.shape[-1]
    if size < query.shape[-1]:  # DeepSeek's: zeros change nothing, and fused kernels want equal sizes
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        value = F.pad(value, (0, query.shape[-1] - size))
    plain = softcap is None and s_aux is None
    if plain and _can_use_varlen(query, value, dropout):
        return _varlen(query, key, value, forest, scaling, window)[..., :size].contiguous()
    lengths = forest.sizes
    queries, keys, values = (x.split(lengths, dim=2) for x in (query, key, value))
    outputs = []
    for k in range(len(lengths)):
        seen = forest.path(k)
        ks = keys[k] if len(seen) == 1 else torch.cat([keys[i] for i in seen], dim=2)
        vs = values[k] if len(seen) == 1 else torch.cat([values[i] for i in seen], dim=2)
        if plain:
            outputs.append(causal(queries[k], ks, vs, dropout, scaling, window))
        else:
            outputs.append(capped(queries[k], ks, vs, dropout, scaling, window, softcap, s_aux))
    # Laid out as SDPA's callers expect it; some look at it as [1, T, heads · D] without a copy.
    return torch.cat([x.transpose(1, 2)[..., :size] for x in outputs], dim=1)


def _can_use_varlen(query: Tensor, value: Tensor, dropout: float) -> bool:
    """torch's variable-length flash attention: CUDA, half precision, no dropout, one head size of at most 256."""
    size = query.shape[-1]
    half = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and half and dropout == 0.0 and size == value.shape[-1] and size <= 256 and size % 8 == 0


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
    own = forest.sizes
    lengths = [len(positions) for positions in seen]
    shared = any(up >= 0 for up in forest.parent)
    keys = torch.from_numpy(np.concatenate(seen)).to(device) if shared else None
    cu_q, cu_k = (torch.from_numpy(np.cumsum([0, *n]).astype(np.int32)).to(device) for n in (own, lengths))
    return _VarlenPlan(keys, cu_q, cu_k, max(own), max(lengths))


AttentionInterface.register(FOREST, forest_attention)
AttentionMaskInterface.register(FOREST, forest_mask)
AttentionInterface.register(FOREST_EAGER, forest_eager_attention)
AttentionMaskInterface.register(FOREST_EAGER, forest_eager_mask)
