"""The model below its head: hidden states at the read-outs of a batch, packed or padded, and the router's balance loss.

Letters: T tokens, N read-outs, S sequences, L longest sequence, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.model.attention import forest_active
from posttrain.model.padding import pad_rows
from posttrain.model.rope import forget_lengths, row_groups, varying_rope
from posttrain.model.router import balance_losses, experts_per_token
from posttrain.parallel.params import is_parted
from posttrain.types import Segments, TokenBatch


@dataclass(frozen=True)
class Hidden:
    """What the model below the head found."""

    states: Tensor  # [N, H] at the read-outs
    aux_loss: Tensor | None  # [] sum over sequences of the balance loss, where it was asked for
    parted: bool = False  # sequences went through apart: equal tokens at one position may have unequal states


def backbone(model: Any) -> Any:
    """The model under the head. A few families name it otherwise than they say."""
    body = model.base_model
    return getattr(model, "model", model) if body is model else body


def text_model(model: Any) -> Any:
    """The part that text goes through: the language model of a multimodal one."""
    body = backbone(model)
    return getattr(body, "language_model", body)


def packed_hidden(model: Any, batch: TokenBatch, balance: bool = False) -> Hidden:
    """From one row of T tokens; more where rotary frequencies part the sequences."""
    groups = _groups(model, batch)
    if len(groups) <= 1:
        states, aux = _run_forest(model, batch, None, batch.segments, batch.leaf, balance)
        return Hidden(states.index_select(0, batch.read_from), aux)
    device = batch.input_ids.device
    found, order, aux_losses = [], [], []
    for group in groups:
        index, segments, leaf = _part(batch.segments, [batch.leaf[s] for s in group])
        at = torch.from_numpy(index).to(device)
        states, aux = _run_forest(model, batch, at, segments, leaf, balance)
        mine = torch.isin(batch.sequence, torch.tensor(group, device=device)).nonzero()[:, 0]
        found.append(states[torch.searchsorted(at, batch.read_from[mine])])
        order.append(mine)
        aux_losses.append(aux)
    return Hidden(torch.cat(found)[torch.argsort(torch.cat(order))], _total(aux_losses), parted=True)


def _run_forest(
    model: Any, batch: TokenBatch, at: Tensor | None, segments: Segments, leaf: tuple[int, ...], balance: bool
) -> tuple[Tensor, Tensor | None]:
    """Hidden states [T, H] of the positions `at` of the row, or of all of it."""
    ids, positions = batch.input_ids, batch.position_ids
    if at is not None:
        ids, positions = ids[at], positions[at]
    forget_lengths(model)
    with forest_active():
        output = backbone(model)(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            forest=segments,
            **_wanted(balance),
        )
    states = output.last_hidden_state[0]
    if not balance:
        return states, None
    sizes = torch.tensor(segments.sizes)
    owner = torch.repeat_interleave(sizes)
    paths = torch.zeros(len(leaf), len(sizes))
    for s, k in enumerate(leaf):
        paths[s, segments.path(k)] = 1
    return states, _balance(model, output, owner.to(ids.device), paths.to(ids.device))


def _part(segments: Segments, leaves: list[int]) -> tuple[np.ndarray, Segments, tuple[int, ...]]:
    """The part of a forest that some leaves need: its positions in the whole, its segments, and the leaves in it.

    Of no leaves, one token: the model is run all the same, for the other ranks.
    """
    if not leaves:
        return np.zeros(1, dtype=np.int64), Segments((0,), (1,), (-1,)), ()
    kept = sorted({k for leaf in leaves for k in segments.path(leaf)})
    new, sizes = {k: i for i, k in enumerate(kept)}, segments.sizes
    index = np.concatenate([np.arange(segments.start[k], segments.end[k]) for k in kept])
    ends = np.cumsum([sizes[k] for k in kept]).tolist()
    part = Segments((0, *ends[:-1]), tuple(ends), tuple(new.get(segments.parent[k], -1) for k in kept))
    return index, part, tuple(new[leaf] for leaf in leaves)


def padded_hidden(
    model: Any, batch: TokenBatch, side: str = "right", multiple: int | None = None, balance: bool = False
) -> Hidden:
    """From one padded row a sequence; rows that may not share a forward by groups."""
    rows = pad_rows(batch, side, multiple)
    groups = _groups(model, batch)
    if len(groups) <= 1:
        states, aux = _run_rows(model, batch, rows.index, balance)
        return Hidden(states[rows.read_row, rows.read_column], aux)
    found, aux_losses = [], []
    for group in groups:
        states, aux = _run_rows(model, batch, rows.index[group or [0]][:, : None if group else 1], balance)
        found.append(states)
        aux_losses.append(aux)
    rank = torch.argsort(torch.tensor([s for group in groups for s in group])).to(rows.index.device)
    return Hidden(torch.cat(found)[rank[rows.read_row], rows.read_column], _total(aux_losses), parted=True)


def _run_rows(model: Any, batch: TokenBatch, index: Tensor, balance: bool) -> tuple[Tensor, Tensor | None]:
    """Hidden states [S, L, H] of padded rows, given the position in the forest of each token (−1: padding)."""
    real = index >= 0
    at = index.clamp(min=0)
    forget_lengths(model)
    output = backbone(model)(
        input_ids=batch.input_ids[at].masked_fill(~real, 0),
        attention_mask=real.long(),
        position_ids=batch.position_ids[at].masked_fill(~real, 0),
        use_cache=False,
        **_wanted(balance),
    )
    if not balance:
        return output.last_hidden_state, None
    S = len(index)
    owner = torch.arange(S, device=index.device)[:, None].expand_as(index).masked_fill(~real, S).flatten()
    paths = torch.eye(S, device=index.device)[: S if batch.leaf else 0]
    return output.last_hidden_state, _balance(model, output, owner, paths)


def _wanted(balance: bool) -> dict[str, bool]:
    return {"output_router_logits": True} if balance else {}


def _balance(model: Any, output: Any, owner: Tensor, paths: Tensor) -> Tensor:
    top_k = experts_per_token(model)
    assert top_k is not None
    return balance_losses(output.router_logits, owner, paths, top_k).sum()


def _total(losses: list[Tensor | None]) -> Tensor | None:
    found = [loss for loss in losses if loss is not None]
    return torch.stack(found).sum() if found else None


def _groups(model: Any, batch: TokenBatch) -> list[list[int]]:
    """Sequences that may share a forward; at most one group for nearly every model."""
    if varying_rope(model.config) is None:
        return []
    segments = batch.segments
    sizes = segments.sizes
    lengths = [sum(sizes[k] for k in segments.path(leaf)) for leaf in batch.leaf or (0,)]
    return row_groups(model.config, lengths, batch.input_ids.device if is_parted(model) else None)
