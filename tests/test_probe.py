"""Which layout each family gets; a layout that is not exact is refused; and a padded step is a plain step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import FAMILIES, build
from tiny import tiny_model
from torch import Tensor

from posttrain.data.forest import build_forest
from posttrain.errors import LayoutError
from posttrain.model.attention import FOREST
from posttrain.model.head import head_spec
from posttrain.model.load import LoadOptions, prepare_model
from posttrain.model.probe import choose_layout, take_forests
from posttrain.model.scoring import Scoring, bind_head
from posttrain.types import Row, ScoreRequest, TokenBatch

PACKED = ["mistral", "cohere", "granite"]
PADDED = ["llama-4", "mamba", "bloom", "stablelm"]
FORCED = ["gemma2", "gpt-oss", "qwen2-moe-sliding", "qwen3.5", "phi3-longrope", "qwen3-dynamic"]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_dense_families_are_packed(family):
    assert choose_layout(tiny_model(family))[0] == "packed"


@pytest.mark.parametrize("family", PACKED)
def test_more_dense_families_are_packed(family):
    assert choose_layout(build(family))[0] == "packed"


@pytest.mark.parametrize("family", PADDED)
def test_families_that_cannot_pack_are_padded(family):
    layout, why = choose_layout(build(family))
    assert layout == "padded"
    assert "packed is not exact" in why


@pytest.mark.parametrize("family", PADDED)
@pytest.mark.parametrize("wanted", ["packed", "packed-unshared"])
def test_a_layout_that_is_not_exact_is_refused(family, wanted):
    model = build(family)
    with pytest.raises(LayoutError, match=f"layout='{wanted}'") as caught:
        choose_layout(model, wanted)
    assert type(model).__name__ in str(caught.value)
    assert "auto" in str(caught.value)


def test_a_layout_that_is_exact_may_be_forced():
    for wanted in ("packed", "packed-unshared", "padded"):
        assert choose_layout(tiny_model("qwen3"), wanted)[0] == wanted


def test_attention_asked_for_by_name_is_kept():
    model = tiny_model("qwen3", attn_implementation="eager")
    prepared = prepare_model(model, LoadOptions())
    assert prepared.layout == "padded"
    assert model.config._attn_implementation == "eager"


def test_probing_leaves_the_model_and_the_generators_alone():
    model = tiny_model("qwen3")
    before = {n: p.clone() for n, p in model.named_parameters()}
    state, config = torch.get_rng_state(), model.config.to_dict()
    choose_layout(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config.to_dict() == config
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_a_probed_model_can_be_prepared_again():
    model = tiny_model("qwen3")
    assert prepare_model(model, LoadOptions()).layout == "packed"
    assert prepare_model(model, LoadOptions()).layout == "packed"
    assert model.config._attn_implementation == FOREST
    assert prepare_model(model, LoadOptions(layout="padded")).layout == "padded"


# ---- a padded step is a plain step -----------------------------------------------------------------------------------

ROWS = [[5, 6, 7, 8, 9, 10, 11], [5, 6, 12, 13], [21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33]]


def batch() -> TokenBatch:
    """Three rows of which the first two tokens are masked."""
    return build_forest([Row(ids, [0.0, 0.0] + [1.0] * (len(ids) - 2)) for ids in ROWS], share=False)


def scored(model: Any, layout: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean loss and gradients through our head."""
    if layout != "padded":
        take_forests(model)
    bind_head(model, Scoring(layout, head_spec(model.config)))
    request = ScoreRequest(objective=lambda logps, index: -logps)
    one = batch()
    loss = model(token_batch=one, score_request=request).total / len(one.targets)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def plain(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The same by transformers' own `labels`, one row at a time."""
    count = sum(len(ids) - 2 for ids in ROWS)
    total = torch.zeros(())
    for ids in ROWS:
        labels = torch.tensor([[-100, -100, *ids[2:]]])
        loss = model(input_ids=torch.tensor([ids]), labels=labels, use_cache=False).loss * (len(ids) - 2) / count
        loss.backward()
        total += loss.detach()
    return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same(got: tuple[Tensor, dict[str, Tensor]], want: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=0)
    for name, gradient in want[1].items():
        scale = max(gradient.abs().max().item(), 1e-3)
        torch.testing.assert_close(got[1][name], gradient, rtol=0, atol=2e-5 * scale, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("family", PADDED + FORCED)
def test_padded_step_equals_plain_loss(family):
    assert_same(scored(build(family), "padded"), plain(build(family)))


@pytest.mark.parametrize("family", PACKED)
def test_c27_logit_multipliers_are_applied(family):
    """C27: Cohere's logit_scale, Granite's logits_scaling; Gemma 2's final soft cap is among the padded."""
    assert_same(scored(build(family), "packed"), plain(build(family)))


def test_c27_multipliers_are_read_from_the_config():
    assert head_spec(FAMILIES["cohere"]()).scale == 0.25
    assert head_spec(FAMILIES["granite"]()).scale == 0.25
    assert head_spec(FAMILIES["gemma2"]()).softcap == 0.5


def test_a_multiplier_that_is_missed_is_found_by_the_probe(monkeypatch):
    """Mutant: the head forgets the scale; the probe's comparison with the model's own logits must refuse it."""
    from posttrain.errors import ModelError
    from posttrain.loss.linear import HeadSpec

    monkeypatch.setattr("posttrain.model.probe.head_spec", lambda config: HeadSpec())
    with pytest.raises(ModelError, match="no layout is exact"):
        choose_layout(build("cohere"))
