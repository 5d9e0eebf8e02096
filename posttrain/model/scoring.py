"""The head inside the model's forward: `model(token_batch=…, score_request=…)` → TokenScores.

Bound once on the base model, under PEFT, DDP, FSDP2 and DeepSpeed. Hidden states never leave the wrapped forward, where
autocast or mixed precision would round them; and the product goes through the lm_head *module*, whose hooks gather its
weight.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from posttrain.loss.softmax import HeadSpec
from posttrain.model.body import packed_hidden, padded_hidden
from posttrain.model.head import check_head, label_head, label_values, score_hidden
from posttrain.types import Distinct, Layout, ScoreRequest, TokenBatch, TokenScores


@dataclass(frozen=True)
class Scoring:
    """How a model scores a batch: its layout, its head and its padding."""

    layout: Layout
    spec: HeadSpec = field(default_factory=HeadSpec)
    padding_side: str = "right"
    pad_to_multiple_of: int | None = None


def bind_head(model: PreTrainedModel, scoring: Scoring) -> None:
    """Teach a causal language model, or one with a head of labels, to score token batches. Other calls go to its own
    forward; binding again replaces the settings. Raises `ModelError` for a model without an output projection."""
    check_head(model)
    object.__setattr__(model, "_posttrain_scoring", scoring)
    _bind(model)


def _bind(model: Any) -> None:
    own_forward = type(model).forward

    def forward(self: Any, *args: Any, token_batch: Any = None, score_request: Any = None, **kwargs: Any) -> Any:
        if token_batch is None:
            return own_forward(self, *args, **kwargs)
        return _score(self, token_batch, score_request or ScoreRequest())

    # `generate` reads the signature. Not functools.wraps: accelerate would unwrap past our forward.
    forward.__signature__ = inspect.signature(own_forward)  # pyright: ignore[reportFunctionMemberAccess]
    # Bound anew each time: accelerate leaves its autocast in a forward it has wrapped.
    model.__dict__.pop("_original_forward", None)
    model.forward = MethodType(forward, model)


def _score(model: Any, batch: TokenBatch, request: ScoreRequest) -> TokenScores:
    scoring: Scoring = model._posttrain_scoring
    if scoring.layout == "padded":
        side, multiple = scoring.padding_side, scoring.pad_to_multiple_of
        found = padded_hidden(model, batch, side, multiple, request.aux_loss)
    else:
        found = packed_hidden(model, batch, request.aux_loss)
    if label_head(model) is not None:
        values = label_values(model, found.states)
        return TokenScores(values[:, 0], aux_loss=found.aux_loss, values=values)
    hidden, targets = found.states, batch.targets
    distinct = None if found.parted else batch.distinct
    if distinct is not None:
        hidden, targets, request = hidden[distinct.first], targets[distinct.first], _once(request, distinct)
    scores = score_hidden(model.get_output_embeddings(), hidden, targets, scoring.spec, request)
    scores = scores._replace(aux_loss=found.aux_loss)
    return scores if distinct is None else _scatter(scores, distinct)


def _once(request: ScoreRequest, distinct: Distinct) -> ScoreRequest:
    """The same request, asked of distinct pairs: each pair's objective is the sum over its read-outs."""
    objective = request.objective
    if objective is None:
        return request

    def summed(logps: Tensor, index: Tensor | slice) -> Tensor:
        assert isinstance(index, slice)
        members = distinct.members[distinct.bounds[index.start] : distinct.bounds[index.stop]]
        return objective(logps[distinct.slot[members] - index.start], members)

    return replace(request, objective=summed)


def _scatter(scores: TokenScores, distinct: Distinct) -> TokenScores:
    def spread(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[distinct.slot]

    return scores._replace(
        logps=scores.logps[distinct.slot],
        entropy=spread(scores.entropy),
        top1=spread(scores.top1),
        mean_logit=spread(scores.mean_logit),
        log_collision=spread(scores.log_collision),
    )
