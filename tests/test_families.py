"""Every family: its layout against separate rows, in losses and gradients; saved and reloaded; plain calls unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import FAMILIES, build
from forests import close, forest, forest_gradients, padded_left, separate_gradients
from transformers import AutoConfig

from posttrain.model.attention import FOREST, FOREST_EAGER
from posttrain.model.load import LoadOptions, auto_class, prepare_model

PADDED = {"llama-4", "nemotron", "stablelm", "falcon", "bloom", "mamba"}
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


@pytest.mark.parametrize("family", FAMILIES)
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
