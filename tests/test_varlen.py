"""The CUDA back end's plan, run on the CPU with a plain reading of what torch's `varlen_attn` documents."""

import pytest
import torch
from torch.nn import functional as F

from posttrain.data.forest import build_forest
from posttrain.model import attention
from posttrain.types import Row


def documented(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """q [Tq, heads, D], k and v [Tk, kv_heads, D]; causal at the bottom right, `left` tokens back."""
    assert window_size[1] == 0 and max_q == int(cu_q.diff().max()) and max_k == int(cu_k.diff().max())
    outputs = []
    for i in range(len(cu_q) - 1):
        one_q, one_k, one_v = (x[c[i] : c[i + 1]].transpose(0, 1) for x, c in ((q, cu_q), (k, cu_k), (v, cu_k)))
        lag = torch.arange(one_k.shape[1])[None] - torch.arange(one_q.shape[1])[:, None]
        lag = lag - (one_k.shape[1] - one_q.shape[1])
        mask = (lag <= 0) & ((lag >= -window_size[0]) if window_size[0] >= 0 else True)
        out = F.scaled_dot_product_attention(one_q, one_k, one_v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("values", [8, 6])
def test_one_call_equals_sdpa_segment_by_segment(monkeypatch, window, share, values):
    rows = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 9, 8], [1, 2, 5], [7, 7]]
    batch = build_forest([Row(x, [1.0] * len(x)) for x in rows], share=share, min_shared=1)
    T = batch.num_tokens
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, T, size, generator=g) for heads, size in ((4, 8), (2, 8), (2, values)))
    module = torch.nn.Module()
    want, _ = attention.forest_attention(
        module, q, k, v, None, scaling=0.3, forest=batch.segments, sliding_window=window
    )
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", documented)
    monkeypatch.setattr(attention, "_can_use_varlen", lambda query, value, dropout: True)
    got, _ = attention.forest_attention(
        module, q, k, v, None, scaling=0.3, forest=batch.segments, sliding_window=window
    )
    assert torch.allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("term", [{"softcap": 30.0}, {"s_aux": torch.zeros(2)}])
def test_soft_caps_and_sinks_never_take_it(monkeypatch, term):
    """It has neither, and would leave them out."""
    monkeypatch.setattr(attention, "_can_use_varlen", lambda query, value, dropout: True)
    monkeypatch.setattr(attention, "_varlen", lambda *args: pytest.fail("one call of varlen_attn"))
    q = torch.randn(1, 2, 4, 8)
    forest = build_forest([Row([1, 2, 3, 4], [1.0] * 4)]).segments
    attention.forest_attention(torch.nn.Module(), q, q, q, None, forest=forest, **term)


def test_only_where_it_is_exact():
    q = torch.randn(1, 2, 4, 8)
    assert not attention._can_use_varlen(q, q, 0.0)  # not on the GPU
