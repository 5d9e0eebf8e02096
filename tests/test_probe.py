"""Which layout each family gets; a layout that is not exact is refused; and a padded step is a plain step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import SHAPE, tiny_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GptOssConfig,
    GraniteConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3_5TextConfig,
)

from posttrain.data.forest import build_forest
from posttrain.errors import LayoutError
from posttrain.model.attention import FOREST
from posttrain.model.head import head_spec
from posttrain.model.load import LoadOptions, prepare_model
from posttrain.model.probe import choose_layout
from posttrain.model.scoring import Scoring, bind_head
from posttrain.types import Row, ScoreRequest, TokenBatch

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}


def build(config: Any, seed: int = 0) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config)


def mistral() -> Any:
    return MistralConfig(**SHAPE, sliding_window=8)


def gemma2() -> Any:
    # Caps small enough to bite on a random model.
    return Gemma2Config(**SHAPE, sliding_window=8, final_logit_softcapping=0.5, attn_logit_softcapping=0.5)


def gpt_oss() -> Any:
    return GptOssConfig(**SHAPE, sliding_window=8, num_local_experts=4, num_experts_per_tok=2)


def qwen2_moe() -> Any:
    shape = SHAPE | {"shared_expert_intermediate_size": 16, **MOE}
    return Qwen2MoeConfig(**shape, use_sliding_window=True, sliding_window=8, max_window_layers=2)


def mamba() -> Any:
    return MambaConfig(vocab_size=300, hidden_size=32, state_size=8, num_hidden_layers=2, pad_token_id=0)


def qwen3_5() -> Any:
    return Qwen3_5TextConfig(
        **SHAPE,
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )


def phi3_long() -> Any:
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 10000.0}
    shape = SHAPE | {"original_max_position_embeddings": 128}
    return Phi3Config(**shape, rope_parameters=factors | {"original_max_position_embeddings": 128, "factor": 2.0})


def cohere() -> Any:
    return CohereConfig(**SHAPE, logit_scale=0.25)


def granite() -> Any:
    return GraniteConfig(**SHAPE, logits_scaling=4.0)


PACKED = {"mistral": mistral, "cohere": cohere, "granite": granite}
PADDED = {
    "gemma2": gemma2,
    "gpt-oss": gpt_oss,
    "qwen2-moe": qwen2_moe,
    "mamba": mamba,
    "qwen3.5": qwen3_5,
    "phi3-longrope": phi3_long,
}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_dense_families_are_packed(family):
    assert choose_layout(tiny_model(family))[0] == "packed"


@pytest.mark.parametrize("family", PACKED)
def test_more_dense_families_are_packed(family):
    assert choose_layout(build(PACKED[family]()))[0] == "packed"


@pytest.mark.parametrize("family", PADDED)
def test_families_that_cannot_pack_are_padded(family):
    layout, why = choose_layout(build(PADDED[family]()))
    assert layout == "padded"
    assert "packed is not exact" in why


@pytest.mark.parametrize("family", PADDED)
@pytest.mark.parametrize("wanted", ["packed", "packed-unshared"])
def test_a_layout_that_is_not_exact_is_refused(family, wanted):
    model = build(PADDED[family]())
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
        model.set_attn_implementation(FOREST)
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


@pytest.mark.parametrize("family", PADDED)
def test_padded_step_equals_plain_loss(family):
    assert_same(scored(build(PADDED[family]()), "padded"), plain(build(PADDED[family]())))


@pytest.mark.parametrize("family", PACKED)
def test_c27_logit_multipliers_are_applied(family):
    """C27: Cohere's logit_scale, Granite's logits_scaling; Gemma 2's final soft cap is among the padded."""
    assert_same(scored(build(PACKED[family]()), "packed"), plain(build(PACKED[family]())))


def test_c27_multipliers_are_read_from_the_config():
    assert head_spec(cohere()).scale == 0.25
    assert head_spec(granite()).scale == 0.25
    assert head_spec(gemma2()).softcap == 0.5


def test_a_multiplier_that_is_missed_is_found_by_the_probe(monkeypatch):
    """Mutant: the head forgets the scale; the probe's comparison with the model's own logits must refuse it."""
    from posttrain.errors import ModelError
    from posttrain.loss.linear import HeadSpec

    monkeypatch.setattr("posttrain.model.probe.head_spec", lambda config: HeadSpec())
    with pytest.raises(ModelError, match="no layout is exact"):
        choose_layout(build(cohere()))
