"""What travels between rooms.

Letters: T tokens, N read-outs, S sequences, K segments, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

Layout = Literal["packed", "packed-unshared", "padded"]


@dataclass(frozen=True)
class Row:
    """One tokenized sequence. `weights[i]` is the loss weight of token i *as a target*; token 0 has no context, so
    its weight is never read.

    e.g. prompt [5, 6], completion [7, 2] -> Row([5, 6, 7, 2], [0.0, 0.0, 1.0, 1.0])
    """

    input_ids: list[int]
    weights: list[float]
    values: tuple[float, ...] = ()  # what else the loss needs of the sequence, in an order the trainer knows


@dataclass(frozen=True)
class Segments:
    """Nodes of the forest, in the order they lie in the row. A parent comes before its children.

    e.g. prompt of 3 tokens, answers of 2 and 4 -> start [0, 3, 5], end [3, 5, 9], parent [-1, 0, 0]
    """

    start: tuple[int, ...]  # [K] first position in the row
    end: tuple[int, ...]  # [K] one past the last position
    parent: tuple[int, ...]  # [K] index of the parent segment, -1 for a root

    @property
    def sizes(self) -> list[int]:
        """[K] own tokens of each segment."""
        return [end - start for start, end in zip(self.start, self.end, strict=True)]

    def path(self, leaf: int) -> list[int]:
        """Segments from the root to `leaf`."""
        found = []
        while leaf >= 0:
            found.append(leaf)
            leaf = self.parent[leaf]
        return found[::-1]

    def positions(self, leaf: int) -> np.ndarray:
        """Positions in the row of the tokens of the sequence that ends with `leaf`; they increase."""
        return np.concatenate([np.arange(self.start[k], self.end[k]) for k in self.path(leaf)])


@dataclass(frozen=True)
class Distinct:
    """The different (position, target) pairs among the read-outs: the head scores each once.

    e.g. pairs (0, 7), (1, 8), (0, 7) -> first [0, 1], slot [0, 1, 0], members [0, 2, 1], bounds [0, 2, 3]
    """

    first: Tensor  # [U]   a read-out of each pair
    slot: Tensor  # [N]   pair of each read-out
    members: Tensor  # [N]   read-outs, sorted by pair
    bounds: tuple[int, ...]  # [U + 1]   the members of pair u are members[bounds[u]:bounds[u + 1]]


@dataclass(frozen=True)
class TokenBatch:
    """One micro-batch: a packed forest of tokens and the read-outs a loss wants.

    T tokens, N read-outs, S sequences, K segments.   e.g. a DPO pair: prompt, chosen, rejected -> K = 3, S = 2

    The segments stay on the host as integers: attention slices with them, so no layer waits for the device.
    """

    input_ids: Tensor  # [T]
    position_ids: Tensor  # [T]   goes on from the parent segment
    segments: Segments
    read_from: Tensor  # [N]   position whose hidden state predicts targets[n]
    targets: Tensor  # [N]
    weights: Tensor  # [N]   fp32 loss weight of the token
    sequence: Tensor  # [N]   which sequence the read-out belongs to
    leaf: tuple[int, ...]  # [S]   segment in which the sequence ends
    source: tuple[int, ...]  # [S]   row of the data set the sequence came from, -1 if none
    unshared_tokens: int = 0  # what T would be had nothing been shared
    distinct: Distinct | None = None  # None when no read-out repeats another
    unit: tuple[int, ...] = ()  # [S]   which pair or group a sequence belongs to; empty: each is its own
    values: Tensor | None = None  # [S, M]   the rows' values
    own: bool = False  # read-outs lie at their targets, for heads that judge what they have read

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_sequences(self) -> int:
        return len(self.leaf)

    @property
    def num_units(self) -> int:
        """Pairs or groups; sequences where each is its own."""
        return len(set(self.unit)) if self.unit else self.num_sequences

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TokenBatch:
        return _map_tensors(self, lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> TokenBatch:
        return _map_tensors(self, lambda t: t.pin_memory())


_Moved = TypeVar("_Moved", TokenBatch, Distinct)


def _map_tensors(value: _Moved, fn: Callable[[Tensor], Tensor]) -> _Moved:
    moved = {}
    for f in fields(value):
        v = getattr(value, f.name)
        moved[f.name] = fn(v) if isinstance(v, Tensor) else _map_tensors(v, fn) if isinstance(v, Distinct) else v
    return type(value)(**moved)


class TokenObjective(Protocol):
    """A loss that is a sum over read-outs of a function of each one's own log-probability.

    Given logps [n] (fp32, with grad) and what picks those read-outs out of a tensor [N], return the loss of each [n].
    The head differentiates it chunk by chunk, so its gradient is formed in the forward pass.

    e.g. lambda logps, index: -weights[index] * logps
    """

    def __call__(self, logps: Tensor, index: Tensor | slice) -> Tensor: ...


@dataclass(frozen=True)
class ScoreRequest:
    """What is asked of the head. Without an objective the log-probabilities carry the gradient; with one, `total`
    does."""

    objective: TokenObjective | None = None
    entropy: bool = False
    top1: bool = False
    mean_logit: bool = False
    log_collision: bool = False
    temperature: float = 1.0
    aux_loss: bool = False  # the router's balance loss, of a model that has one


class TokenScores(NamedTuple):
    """Per-token scores at the read-outs, in fp32, and the objective's sum when one was asked for.

    A tuple: FSDP2 and DeepSpeed put their backward hooks on the tensors they find in a module's output, and look into
    tuples, not into dataclasses.
    """

    logps: Tensor  # [N] log-probability of targets[n]
    total: Tensor | None = None  # [] sum of the objective
    entropy: Tensor | None = None  # [N] nats, no grad
    top1: Tensor | None = None  # [N] 1.0 where the target is the most likely token, no grad
    mean_logit: Tensor | None = None  # [N] no grad
    aux_loss: Tensor | None = None  # [] sum over sequences of the router's balance loss
    log_collision: Tensor | None = None  # [N] log Σ_v p_v², no grad
    values: Tensor | None = None  # [N, L] what a head of L labels gives; `logps` is its first column then


@dataclass(frozen=True)
class Mean:
    """A mean that adds: (sum, weight). e.g. Mean(3., 4.) + Mean(0., 1.) -> value 0.6"""

    total: Tensor | float
    weight: Tensor | float

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)


@dataclass
class LossOutput:
    """What `loss_step` returns: a *sum* over units (never a mean) and metrics that add."""

    total: Tensor  # []
    metrics: dict[str, Mean] = field(default_factory=dict)
    aux_loss: Tensor | None = None  # [] sum over sequences of the router's balance loss
