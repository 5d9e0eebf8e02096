"""Token mixers that run along a row (state-space, linear-attention and short-convolution layers) in a packed row.

Their kernels know of no forest, and some only know one sequence a row. So such a layer is given its tokens one sequence
a row: gathered, run, and scattered back. Tokens shared by several sequences pass through it once for each, and the
result of one of them is kept; all are equal. Everything else of the model still runs on the shared row.

Letters: T tokens of the forest, R rows of a call, L columns.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.errors import LayoutError
from posttrain.model.attention import is_forest_active
from posttrain.model.body import text_model
from posttrain.types import Segments

PADDING = 0.25
"""Largest part of a call's columns that may be padding: sequences of like lengths share a call."""


class Calls:
    """How often a mixer received its segments; the probe compares it with the number of mixers."""

    forest = 0


def mixers(model: PreTrainedModel) -> list[nn.Module]:
    """Layers that mix tokens along the row. All of today's hold a causal convolution of their own."""
    return [m for m in text_model(model).modules() if any(isinstance(child, nn.Conv1d) for child in m.children())]


def bind_mixers(model: PreTrainedModel) -> None:
    """Teach a model's mixers to take a forest. Other calls go to their own forward; binding again changes nothing."""
    for mixer in mixers(model):
        mixer.forward = MethodType(_by_sequence(type(mixer).forward), mixer)


def _by_sequence(own: Any) -> Any:
    def forward(self: Any, hidden_states: Tensor, *args: Any, forest: Segments | None = None, **kwargs: Any) -> Any:
        if forest is None:
            if is_forest_active():
                raise LayoutError(f"its {type(self).__name__} layers are not told where sequences begin")
            return own(self, hidden_states, *args, **kwargs)
        Calls.forest += 1
        plan = _plan(forest, hidden_states.device)
        states = hidden_states[0]
        found = [own(self, states[rows], *args, **kwargs).flatten(0, 1) for rows in plan.calls]
        return torch.cat(found).index_select(0, plan.back)[None]

    return forward


@dataclass(frozen=True)
class _Plan:
    """e.g. a prompt of 2 tokens, answers of 3 and 1 -> calls ([[0, 1, 2, 3, 4]], [[0, 1, 5]]),
    back [0, 1, 2, 3, 4, 7] or, since the prompt is in both, [5, 6, 2, 3, 4, 7]"""

    calls: tuple[Tensor, ...]  # [R, L] each: position in the forest of each token of a row
    back: Tensor  # [T] where in the calls' tokens, end to end, a token of the forest is found


@functools.lru_cache(maxsize=8)
def _plan(forest: Segments, device: torch.device) -> _Plan:
    """Built once a micro-batch and used by every layer.

    Padding stands at the end of a row and repeats its last token: what follows a token changes nothing for it.
    """
    leaves = sorted(set(range(len(forest.start))) - set(forest.parent))
    rows = sorted((forest.positions(leaf) for leaf in leaves), key=len, reverse=True)
    calls, back, done = [], np.zeros(forest.end[-1], dtype=np.int64), 0
    while rows:
        longest = len(rows[0])
        group = [row for row in rows if len(row) >= (1 - PADDING) * longest]
        rows = rows[len(group) :]
        index = np.stack([np.pad(row, (0, longest - len(row)), mode="edge") for row in group])
        for r, row in enumerate(group):
            back[row] = done + r * longest + np.arange(len(row))
        done += index.size
        calls.append(torch.from_numpy(index).to(device))
    return _Plan(tuple(calls), torch.from_numpy(back).to(device))
