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

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.loss.softmax import HeadSpec
from posttrain.model.attention import forest_active
from posttrain.model.head import check_head, score_hidden
from posttrain.model.padding import pad_rows
from posttrain.types import Distinct, Layout, ScoreRequest, TokenBatch, TokenScores


@dataclass(frozen=True)
class Scoring:
    """How a model scores a batch: its layout, its head and its padding."""

    layout: Layout
    spec: HeadSpec = field(default_factory=HeadSpec)
    padding_side: str = "right"
    pad_to_multiple_of: int | None = None
    one_by_one: bool = False  # one sequence a forward, where rows of other lengths would change its positions


def varying_rope(config: Any) -> str | None:
    """The kind of rotary embedding whose frequencies follow from the longest position of a forward, if it is one."""
    rope: Any = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = {rope.get("rope_type")} | {v.get("rope_type") for v in rope.values() if isinstance(v, dict)}
    return min({"longrope", "dynamic"} & kinds, default=None)


def bind_head(model: PreTrainedModel, scoring: Scoring) -> None:
    """Teach a causal language model to score token batches. Other calls go to its own forward; binding again replaces
    the settings. Raises `ModelError` for a model without an output projection."""
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
    hidden = _padded_hidden(model, batch, scoring) if scoring.layout == "padded" else _forest_hidden(model, batch)
    targets = batch.targets
    distinct = batch.distinct
    if distinct is not None:
        hidden, targets, request = hidden[distinct.first], targets[distinct.first], _once(request, distinct)
    scores = score_hidden(model.get_output_embeddings(), hidden, targets, scoring.spec, request)
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
    if not scoring.one_by_one:
        return _rows_hidden(model, batch, rows.index)[rows.read_row, rows.read_column]
    found, order = [], []
    for s, leaf in enumerate(batch.leaf or (0,)):
        positions = torch.from_numpy(batch.segments.positions(leaf)).to(rows.index.device)
        states = _rows_hidden(model, batch, positions[None])[0]
        mine = torch.nonzero(rows.read_row == s)[:, 0]
        shift = (rows.index[s] < 0).sum() if scoring.padding_side == "left" else 0
        found.append(states[rows.read_column[mine] - shift])
        order.append(mine)
    return torch.cat(found)[torch.argsort(torch.cat(order))]


def _rows_hidden(model: Any, batch: TokenBatch, index: Tensor) -> Tensor:
    """Hidden states [S, L, H] of padded rows, given the position in the forest of each token (−1: padding)."""
    real = index >= 0
    at = index.clamp(min=0)
    return model.base_model(
        input_ids=batch.input_ids[at].masked_fill(~real, 0),
        attention_mask=real.long(),
        position_ids=batch.position_ids[at].masked_fill(~real, 0),
        use_cache=False,
    ).last_hidden_state


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

    return replace(
        scores,
        logps=scores.logps[distinct.slot],
        entropy=spread(scores.entropy),
        top1=spread(scores.top1),
        mean_logit=spread(scores.mean_logit),
    )
