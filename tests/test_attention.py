"""Forest attention against separate rows: hidden states, log-probabilities and gradients of every parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forests import close, forest, forest_gradients, padded_left, separate_gradients
from tiny import tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import posttrain.model.attention as attention
import posttrain.model.attention_math as attention_math
from posttrain.data.forest import build_forest
from posttrain.errors import LayoutError
from posttrain.model.attention import FOREST, forest_attention
from posttrain.model.probe import take_forests
from posttrain.model.scoring import Scoring, bind_head
from posttrain.types import Row, Segments

FAMILIES = ["llama", "qwen2", "qwen3", "gemma3"]


def bound(family: str, **overrides: Any) -> Any:
    """A tiny model that scores packed batches."""
    model = tiny_model(family, **overrides)
    take_forests(model)
    bind_head(model, Scoring("packed"))
    return model


def assert_equals_separate_rows(model: Any, family: str, **overrides: Any) -> None:
    got, got_gradients = forest_gradients(model)
    want, want_gradients = separate_gradients(tiny_model(family, **overrides))
    close(got, want, "logps")
    assert got_gradients.keys() == want_gradients.keys()
    for name, gradient in want_gradients.items():
        close(got_gradients[name], gradient, name)


def test_the_tree_is_the_one_meant():
    batch = forest()
    assert batch.segments.parent == (-1, 0, 0, 2, 3, 3, -1)
    assert batch.num_tokens == 34 + 20 + 4 + 3 + 14 + 4 + 31
    assert batch.unshared_tokens == 54 + 55 + 45 + 38 + 31
    assert batch.leaf == (1, 4, 5, 2, 6)


@pytest.mark.parametrize("family", FAMILIES)
def test_forest_equals_separate_rows(family):
    assert_equals_separate_rows(bound(family), family)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_query_blocks(family, monkeypatch):
    monkeypatch.setattr(attention_math, "QUERY_BLOCK", 5)
    assert_equals_separate_rows(bound(family), family)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_activations_recomputed(family):
    model = bound(family).train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    assert_equals_separate_rows(model, family)


def test_windows_of_any_size():
    for window in (2, 5, 40):
        assert_equals_separate_rows(bound("gemma3", sliding_window=window), "gemma3", sliding_window=window)


@pytest.mark.parametrize("family", FAMILIES)
def test_c01_hidden_states_do_not_see_other_sequences(family):
    """C01: rows of 5 and 4 tokens packed in one of 9: each as alone, and B does not change when A does."""
    model = bound(family)
    a, b, other = [5, 6, 7, 8, 9], [11, 12, 13, 14], [21, 22, 23, 24, 25]

    def logps(*rows: list[int]) -> Tensor:
        batch = build_forest([Row(ids, [1.0] * len(ids)) for ids in rows])
        with torch.no_grad():
            return model(token_batch=batch).logps

    batch = build_forest([Row(a, [1.0] * 5), Row(b, [1.0] * 4)])
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    close(logps(a, b), torch.cat([logps(a), logps(b)]))
    assert torch.equal(logps(a, b)[4:], logps(other, b)[4:])


# ---- mutants: the comparison above tells them apart ------------------------------------------------------------------


def top_left(q: Tensor, k: Tensor, v: Tensor, dropout: float, scaling: float | None, window: int | None) -> Tensor:
    """SDPA's own causal flag where the keys hold ancestors too."""
    options: dict[str, Any] = {"scale": scaling, "enable_gqa": True}
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, **options)


def test_mutant_top_left_causal_fails(monkeypatch):
    monkeypatch.setattr(attention, "causal", top_left)
    with pytest.raises(AssertionError):
        assert_equals_separate_rows(bound("qwen3"), "qwen3")


def test_mutant_window_ignored_fails(monkeypatch):
    own = attention.causal
    monkeypatch.setattr(attention, "causal", lambda *args: own(*args[:-1], None))
    assert_equals_separate_rows(bound("qwen3"), "qwen3")
    with pytest.raises(AssertionError):
        assert_equals_separate_rows(bound("gemma3"), "gemma3")


def test_mutant_window_off_by_one_fails(monkeypatch):
    own = attention.causal
    monkeypatch.setattr(attention, "causal", lambda *args: own(*args[:-1], args[-1] and args[-1] + 1))
    with pytest.raises(AssertionError):
        assert_equals_separate_rows(bound("gemma3"), "gemma3")


# ---- without a forest the model is what it was -----------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_calls_and_generate_are_unchanged(family):
    plain, changed = tiny_model(family).eval(), bound(family).eval()
    batch = padded_left()
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        assert torch.equal(plain(**batch).logits[real], changed(**batch).logits[real])
        want = plain.generate(**batch, max_new_tokens=12, do_sample=False)
        got = changed.generate(**batch, max_new_tokens=12, do_sample=False)
    assert torch.equal(got, want)
    # And after a forest went through: nothing of it stays behind.
    with torch.no_grad():
        changed(token_batch=forest())
        assert torch.equal(changed.generate(**batch, max_new_tokens=12, do_sample=False), want)


def test_without_segments_it_is_sdpa():
    q, k, v = (torch.randn(2, 4, 6, 8) for _ in range(3))
    module = torch.nn.Module()
    module.is_causal = True
    got, _ = forest_attention(module, q, k, v, None)
    want, _ = sdpa_attention_forward(module, q, k, v, None)
    assert torch.equal(got, want)
    assert ALL_ATTENTION_FUNCTIONS[FOREST] is forest_attention


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_model_does_not_name_our_attention(family, tmp_path):
    model = bound(family).eval()
    model.save_pretrained(tmp_path)
    assert FOREST not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(**padded_left()).logits, tiny_model(family).eval()(**padded_left()).logits)


# ---- what it cannot do is refused by name ----------------------------------------------------------------------------


def test_a_position_bias_is_refused():
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(LayoutError, match="position_bias"):
        forest_attention(torch.nn.Module(), q, q, q, None, forest=Segments((0,), (4,), (-1,)), position_bias=q)


def test_bidirectional_layers_and_several_rows_are_refused():
    segments = Segments((0,), (4,), (-1,))
    module = torch.nn.Module()
    module.is_causal = False
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(LayoutError, match="not causal"):
        forest_attention(module, q, q, q, None, forest=segments)
    two = torch.randn(2, 2, 4, 8)
    with pytest.raises(LayoutError, match="not causal over one row"):
        forest_attention(torch.nn.Module(), two, two, two, None, forest=segments)


# ---- soft caps and sinks ---------------------------------------------------------------------------------------------


def whole(q: Tensor, k: Tensor, v: Tensor, window: int | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """All scores at once: heads share keys by repetition, the sink is one more column."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    lag = torch.arange(k.shape[2])[None] - torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None]
    scores = scores.masked_fill((lag > 0) | (lag <= -(window or 10**6)), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(1, -1, q.shape[2], 1)], -1)
    p = torch.softmax(scores, -1)
    return (p if sinks is None else p[..., :-1]) @ v


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("sink", [True, False])
@pytest.mark.parametrize("block", [4, 512])
def test_capped_attention_in_double_precision(window, softcap, sink, block, monkeypatch):
    """13 queries after 8 ancestors, 4 heads on 2 keys: values and gradients, the sinks' too."""
    monkeypatch.setattr(attention_math, "QUERY_BLOCK", block)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, n, 8, generator=g) for h, n in ((4, 13), (2, 21), (2, 21)))
    sinks = torch.randn(4, generator=g) if sink else None
    inputs = [x.requires_grad_() for x in (q, k, v, sinks) if x is not None]
    got = attention_math.capped(q, k, v, 0.0, 0.3, window, softcap, sinks)
    found = torch.autograd.grad(got.cos().sum(), inputs)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    want = whole(*doubles[:3], window, softcap, doubles[3] if sink else None)
    close(got, want.float())
    for one, other in zip(found, torch.autograd.grad(want.cos().sum(), doubles), strict=True):
        close(one, other.float())


def test_capped_attention_never_keeps_all_scores(monkeypatch):
    """What is kept for the backward pass is the inputs."""
    monkeypatch.setattr(attention_math, "QUERY_BLOCK", 16)
    q, k, v = (torch.randn(1, 2, 256, 8, requires_grad=True) for _ in range(3))
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = attention_math.capped(q, k, v, 0.0, None, None, 30.0, torch.zeros(2))
    assert sum(kept.values()) < 256 * 256 * 4 / 2
    out.sum().backward()
    assert q.grad is not None and q.grad.any()


def test_dropout_of_capped_attention_is_drawn_again_alike(monkeypatch):
    """Recomputation in the backward pass meets the same mask: the gradient is that of the values that were returned."""
    q, k = (torch.randn(1, 1, 6, 8) for _ in range(2))
    v = torch.randn(1, 1, 6, 8, requires_grad=True)
    out = attention_math.capped(q, k, v, 0.5, None, None, 30.0, None)
    torch.manual_seed(1)
    (gradient,) = torch.autograd.grad(out.sum(), v)
    # out is linear in v.
    torch.testing.assert_close((gradient * v).sum(), out.sum())
