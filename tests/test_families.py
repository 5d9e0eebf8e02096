"""Every family: its layout against separate rows, losses and gradients; saved and reloaded; plain calls as before."""

from __future__ import annotations

from typing import Any

import models_page
import pytest
import torch
from data_fixtures import byte_tokenizer
from datasets import Dataset
from families import EVERY, FAMILIES, build
from forests import close, forest, forest_gradients, padded_left, separate_gradients
from laws.runs import FIELDS, run, scratch, sft
from peft import LoraConfig
from transformers import AutoConfig

import posttrain.model.attention as attention
import posttrain.model.attention_math as attention_math
import posttrain.model.body as body
import posttrain.model.recurrent as recurrent
from posttrain import SFTConfig, SFTTrainer
from posttrain.errors import DataError, ModelError
from posttrain.model.attention import FOREST, FOREST_EAGER
from posttrain.model.load import LoadOptions, auto_class, learned_positions, prepare_model

PADDED = {"llama-4", "nemotron", "stablelm", "falcon", "bloom", "mamba"}
PADDED |= {"gpt-neo", "jamba", "minimax", "falcon-mamba", "mpt", "doge"}
"""Why: docs/models.md."""


def prepared(family: str, **options: Any) -> Any:
    return prepare_model(build(family), LoadOptions(**options))


def assert_equals_separate_rows(model: Any, family: str) -> None:
    got, got_gradients = forest_gradients(model)
    want, want_gradients = separate_gradients(build(family).train())
    close(got, want, "logps")
    assert got_gradients.keys() == want_gradients.keys()
    for name, gradient in want_gradients.items():
        close(got_gradients[name], gradient, name)


@pytest.mark.parametrize("family", EVERY)
def test_equals_separate_rows(family):
    found = prepared(family)
    assert found.layout == ("padded" if family in PADDED else "packed")
    assert_equals_separate_rows(found.model.train(), family)


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_and_reloaded(family, tmp_path):
    """The model as trained is the model as loaded by anyone."""
    model = prepared(family).model.eval()
    model.save_pretrained(tmp_path)
    assert "posttrain" not in (tmp_path / "config.json").read_text()
    config = AutoConfig.from_pretrained(tmp_path)
    loaded = auto_class(config).from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(loaded(**padded_left()).logits, build(family).eval()(**padded_left()).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_calls_are_unchanged(family):
    """Left-padded batches before and after a forest went through, and `generate`."""
    plain, model = build(family).eval(), prepared(family).model.eval()
    batch = padded_left()
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        before = model(**batch)
        assert torch.equal(plain(**batch).logits[real], before.logits[real])
        model(token_batch=forest())
        assert torch.equal(before.logits[real], model(**batch).logits[real])
        assert torch.equal(plain.generate(**batch, **options), model.generate(**batch, **options))
    if family not in PADDED:
        assert model.config._attn_implementation in (FOREST, FOREST_EAGER)


def test_the_table_of_models_is_current():
    """docs/models.md says what the probe finds; `make models` writes it."""
    assert models_page.PAGE.read_text(encoding="utf-8") == models_page.page()


SPECIAL = ["gemma2", "gpt-oss", "deepseek-v3", "qwen2-moe-sliding", "qwen3.5-moe", "granite-hybrid", "phi3-longrope"]


@pytest.mark.parametrize("family", SPECIAL)
def test_with_activations_recomputed(family):
    model = prepared(family).model.train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    assert_equals_separate_rows(model, family)


@pytest.mark.parametrize("family", ["gemma2", "gpt-oss", "deepseek-v3"])
def test_in_query_blocks(family, monkeypatch):
    monkeypatch.setattr(attention_math, "QUERY_BLOCK", 5)
    assert_equals_separate_rows(prepared(family).model.train(), family)


@pytest.mark.parametrize("family", ["gemma2", "qwen3.5", "phi3-longrope"])
def test_packed_without_sharing(family):
    assert_equals_separate_rows(prepared(family, layout="packed-unshared").model.train(), family)


@pytest.mark.parametrize("family", SPECIAL)
def test_padded_is_as_good(family):
    assert_equals_separate_rows(prepared(family, layout="padded").model.train(), family)


@pytest.mark.parametrize("family", ["gemma3-multimodal", "mistral3", "qwen3.5-moe", "gpt-oss"])
def test_loaded_by_name(family, tmp_path):
    """From a checkpoint, as a user does."""
    build(family).save_pretrained(tmp_path)
    found = prepare_model(str(tmp_path), LoadOptions())
    assert found.layout == "packed"
    assert_equals_separate_rows(found.model.train(), family)


def test_attention_asked_for_by_name_is_kept(tmp_path):
    build("gemma2").save_pretrained(tmp_path)
    asked = LoadOptions(init_kwargs={"attn_implementation": "eager"})
    assert prepare_model(str(tmp_path), asked).layout == "padded"
    assert prepare_model(str(tmp_path), LoadOptions()).layout == "packed"


# ---- mutants: the probe must see each, and take the padded layout ----------------------------------------------------


def without(position: int) -> Any:
    own = attention_math.capped
    return lambda *args: own(*(None if i == position else arg for i, arg in enumerate(args)))


@pytest.mark.parametrize(("family", "position"), [("gemma2", 6), ("gpt-oss", 7), ("gpt-oss", 5), ("gemma2", 5)])
def test_mutant_no_cap_no_sink_or_no_window(family, position, monkeypatch):
    monkeypatch.setattr(attention, "capped", without(position))
    assert prepared(family).layout == "padded"


@pytest.mark.parametrize("family", ["qwen2-moe-sliding", "phimoe-sliding"])
def test_mutant_hidden_window_forgotten(family, monkeypatch):
    monkeypatch.setattr(attention, "_window", lambda module: None)
    assert prepared(family).layout == "padded"


@pytest.mark.parametrize("family", ["qwen3.5", "granite-hybrid", "mamba2", "lfm2"])
def test_mutant_states_leak_between_sequences(family, monkeypatch):
    own = recurrent._plan
    monkeypatch.setattr(
        recurrent, "_plan", lambda forest, device: own(type(forest)((0,), (forest.end[-1],), (-1,)), device)
    )
    assert prepared(family).layout == "padded"


@pytest.mark.parametrize("family", ["phi3-longrope", "qwen3-dynamic"])
def test_mutant_one_regime_for_all(family, monkeypatch):
    monkeypatch.setattr(body, "row_groups", lambda config, lengths: [list(range(len(lengths)))])
    with pytest.raises(ModelError, match="no layout is exact"):
        prepared(family)


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_trains(family):
    """Three steps by the trainer, with activations recomputed: the loss is finite and the weights move."""
    before = {n: p.detach().clone() for n, p in build(family).named_parameters()}
    recompute = build(family).supports_gradient_checkpointing
    found = run(sft(model=build(family), learning_rate=0.05, gradient_checkpointing=recompute))
    assert all(torch.isfinite(torch.tensor(found.losses)))
    moved = {name for name, value in found.weights.items() if not torch.equal(value, before[name])}
    assert moved


@pytest.mark.parametrize("family", ["gemma3-multimodal", "mistral3"])
def test_what_text_does_not_meet_is_frozen(family, capsys):
    model = prepared(family).model
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert "beside the language model are kept" in capsys.readouterr().err
    assert trained == {n for n in dict(model.named_parameters()) if "language_model" in n or "lm_head" in n}
    assert trained != set(dict(model.named_parameters()))


def test_an_adapter_on_what_text_does_not_meet_is_refused():
    vision = LoraConfig(target_modules=r".*vision_tower.*q_proj")
    with pytest.raises(ModelError, match="nothing would be trained"):
        prepare_model(build("gemma3-multimodal"), LoadOptions(), vision)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_rows_longer_than_the_table_of_positions_are_refused(family):
    """At the start, naming the field and the number of rows; packing cuts rows to fit."""
    rows = Dataset.from_list([{"input_ids": [5] * n} for n in (20, 300, 257, 256)])
    settings: dict[str, Any] = {**FIELDS, "output_dir": scratch(), "train_sampling_strategy": "sequential"}
    with pytest.raises(DataError, match=r"2 of 4 rows .* 256 positions .* 300 tokens; set `max_length` to 256"):
        trainer(build(family), rows, max_length=None, **settings)
    trainer(build(family), rows, max_length=256, **settings)
    trainer(build(family), rows, max_length=128, packing=True, packing_strategy="bfd_split", **settings)
    with pytest.raises(DataError, match=r"row 1: 1 of 1 rows .*`max_length`"):
        next(
            iter(trainer(build(family), rows.to_iterable_dataset(), max_length=None, **settings).get_train_dataloader())
        )


def trainer(model: Any, rows: Any, **settings: Any) -> SFTTrainer:
    return SFTTrainer(model, SFTConfig(**settings), train_dataset=rows, processing_class=byte_tokenizer())


@pytest.mark.parametrize("family", ["llama", "gemma3-multimodal", "mamba"])
def test_without_a_table_rows_may_be_long(family):
    assert learned_positions(prepare_model(build(family), LoadOptions())) is None
