"""The head inside the model's forward: `model(token_batch=…, score_request=…)` → TokenScores.

Bound once on the base model, under PEFT, DDP, FSDP2 and DeepSpeed. Hidden states never leave the wrapped forward, where
autocast or mixed precision would round them; and the product goes through the lm_head *module*, whose hooks gather its
weight.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.errors import ModelError
from posttrain.loss.linear import HeadSpec, linear_scores
from posttrain.model.attention import forest_active
from posttrain.model.padding import pad_rows
from posttrain.types import Distinct, Layout, ScoreRequest, TokenBatch, TokenScores


@dataclass(frozen=True)
class Scoring:
    """How a model scores a batch: its layout, its head and its padding."""

    layout: Layout
    spec: HeadSpec = field(default_factory=HeadSpec)
    padding_side: str = "right"
    pad_to_multiple_of: int | None = None


def head_spec(config: Any, chunk_tokens: int | None = None, memory_bytes: int = 256 << 20) -> HeadSpec:
    """Read from a model's config what follows its output projection.

    Cohere multiplies by `logit_scale`, Granite divides by `logits_scaling`, Gemma caps with `final_logit_softcapping`.
    What is missed here is caught by the probe, which compares with the model's own logits.
    """
    text = config.get_text_config()
    scale = 1.0
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(text, name, None) is not None:
            scale = float(getattr(text, name))
    if getattr(text, "logits_scaling", None) is not None:
        scale = 1.0 / float(text.logits_scaling)
    return HeadSpec(scale, getattr(text, "final_logit_softcapping", None), chunk_tokens, memory_bytes)


def bind_head(model: PreTrainedModel, scoring: Scoring) -> None:
    """Teach a causal language model to score token batches. Other calls go to its own forward; binding again replaces
    the settings. Raises `ModelError` for a model without an output projection."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(
            f"`model` is a {type(model).__name__} whose output projection is {type(head).__name__}, not a linear "
            "layer; load it with AutoModelForCausalLM, and leave the head out of `lora_target_modules`."
        )
    bound = "_posttrain_scoring" in model.__dict__
    object.__setattr__(model, "_posttrain_scoring", scoring)
    if bound:
        return
    own_forward, own_head = type(model).forward, type(head).forward

    @functools.wraps(own_forward)
    def forward(self: Any, *args: Any, token_batch: Any = None, score_request: Any = None, **kwargs: Any) -> Any:
        if token_batch is None:
            return own_forward(self, *args, **kwargs)
        return _score(self, token_batch, score_request or ScoreRequest())

    @functools.wraps(own_head)
    def head_forward(self: Any, hidden: Tensor, *args: Any, call: Any = None) -> Any:
        if call is None:
            return own_head(self, hidden, *args)
        targets, spec, request = call
        return linear_scores(hidden, self.weight, targets, self.bias, spec, request)

    model.forward = MethodType(forward, model)
    head.forward = MethodType(head_forward, head)


def _score(model: Any, batch: TokenBatch, request: ScoreRequest) -> TokenScores:
    scoring: Scoring = model._posttrain_scoring
    hidden = _padded_hidden(model, batch, scoring) if scoring.layout == "padded" else _forest_hidden(model, batch)
    targets = batch.targets
    distinct = batch.distinct
    if distinct is not None:
        hidden, targets, request = hidden[distinct.first], targets[distinct.first], _once(request, distinct)
    scores: TokenScores = model.get_output_embeddings()(hidden, call=(targets, scoring.spec, request))
    return scores if distinct is None else _scatter(scores, distinct)


def _forest_hidden(model: Any, batch: TokenBatch) -> Tensor:
    """Hidden states at the read-outs [N, H], from one row of T tokens."""
    with forest_active():
        output = model.base_model(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            forest=batch.segments,
        )
    return output.last_hidden_state[0].index_select(0, batch.read_from)


def _padded_hidden(model: Any, batch: TokenBatch, scoring: Scoring) -> Tensor:
    """Hidden states at the read-outs [N, H], from one padded row a sequence."""
    rows = pad_rows(batch, scoring.padding_side, scoring.pad_to_multiple_of)
    real = rows.index >= 0
    at = rows.index.clamp(min=0)
    output = model.base_model(
        input_ids=batch.input_ids[at].masked_fill(~real, 0),
        attention_mask=real.long(),
        position_ids=batch.position_ids[at].masked_fill(~real, 0),
        use_cache=False,
    )
    return output.last_hidden_state[rows.read_row, rows.read_column]


def _once(request: ScoreRequest, distinct: Distinct) -> ScoreRequest:
    """The same request, asked of distinct pairs: each pair's objective is the sum over its read-outs."""
    objective = request.objective
    if objective is None:
        return request

    def summed(logps: Tensor, index: Tensor | slice) -> Tensor:
        assert isinstance(index, slice)
        members = distinct.members[distinct.bounds[index.start] : distinct.bounds[index.stop]]
        return objective(logps[distinct.slot[members] - index.start], members)

    return ScoreRequest(summed, request.entropy, request.top1, request.mean_logit, request.temperature)


def _scatter(scores: TokenScores, distinct: Distinct) -> TokenScores:
    def spread(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[distinct.slot]

    return TokenScores(
        scores.logps[distinct.slot],
        scores.total,
        spread(scores.entropy),
        spread(scores.top1),
        spread(scores.mean_logit),
    )
