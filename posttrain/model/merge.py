"""An adapter merged into its base: one model that loads without peft."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.errors import ModelError
from posttrain.model.adapters import is_adapted
from posttrain.model.body import backbone
from posttrain.model.head import label_head
from posttrain.model.saved import inner_layer

TOLERANCE = 1e-3
"""Largest difference of a logit between a merged model and its adapter in float32, as a share of the largest logit."""

HALF_TOLERANCE = 0.2
"""The same once the weights are rounded to 16 bits: what rounding does, far below what a lost weight does."""


def merge_adapter(model: Any) -> Any:
    """The base of a peft model with the active adapter's product in its weights.

    A head tied to the embedding is untied where an adapter moves one of them alone: peft would add to both. It stays
    tied where both end up equal. Raises `ModelError` for an adapter that cannot be merged.
    """
    base = model.get_base_model()
    tied = bool(getattr(base.config.get_text_config(), "tie_word_embeddings", False))
    head, embedding = inner_layer(base.get_output_embeddings()), inner_layer(base.get_input_embeddings())
    if head is not None and head.weight is embedding.weight:
        head.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        warnings.filterwarnings("ignore", message=".*no longer tied.*")
        try:
            merged = model.merge_and_unload(safe_merge=True)
        except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
            kind = type(model.active_peft_config).__name__
            raise ModelError(f"a {kind} adapter cannot be merged into its base: {error}") from error
    head, embedding = merged.get_output_embeddings(), merged.get_input_embeddings()
    if head is not None:
        equal = head.weight.shape == embedding.weight.shape and torch.equal(head.weight, embedding.weight)
        if tied and equal:
            head.weight = embedding.weight
        for config in {id(c): c for c in (merged.config, merged.config.get_text_config())}.values():
            config.tie_word_embeddings = tied and equal
    return merged


def probe_logits(model: Any, ids: list[int]) -> Tensor:
    """Logits [L, V] of one row, in float32, without dropout; of a head of labels, what it gives at every token."""
    model.eval()
    device = next(model.parameters()).device
    base = model.get_base_model() if is_adapted(model) else model
    head = label_head(base)
    with torch.no_grad():
        if head is not None:
            states = backbone(base)(input_ids=torch.tensor([ids], device=device), use_cache=False).last_hidden_state
            return head(states)[0].float().cpu()
        return model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0].float().cpu()


def difference(got: Tensor, want: Tensor) -> float:
    """Largest difference of a logit, as a share of the largest logit."""
    if got.shape != want.shape:
        return float("inf")
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-12))


def first_difference(saved: Any, model: Any) -> str | None:
    """Name of the first weight of `saved` that is not the one of `model`, bit for bit; None when all are."""
    wanted = dict(model.named_parameters(remove_duplicate=False))
    for name, got in saved.named_parameters(remove_duplicate=False):
        if name not in wanted or not torch.equal(got, wanted[name].to(got.dtype)):
            return name
    return next((name for name in wanted if name not in dict(saved.named_parameters(remove_duplicate=False))), None)
