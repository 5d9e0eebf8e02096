"""The padded layout: a forest unrolled into one row a sequence, for models that cannot take it packed.

Letters: N read-outs, S sequences, L longest sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from posttrain.types import TokenBatch


@dataclass(frozen=True)
class PaddedRows:
    """A forest unrolled for a model that needs one sequence a row.

    e.g. sequences of 3 and 2 tokens, padded right -> index [[0, 1, 2], [3, 4, -1]]
    """

    index: torch.Tensor  # [S, L] position in the forest of each token, -1 where there is none
    read_row: torch.Tensor  # [N] row of each read-out
    read_column: torch.Tensor  # [N] column of each read-out


def pad_rows(batch: TokenBatch, side: str = "right", multiple: int | None = None) -> PaddedRows:
    """Unroll a forest into one padded row a sequence. A batch without sequences gives one row of its one token."""
    leaves = batch.leaf or (0,)
    positions = [batch.segments.positions(leaf) for leaf in leaves]
    length = padded_length(max(len(p) for p in positions), multiple)
    index = np.full((len(leaves), length), -1, dtype=np.int64)
    column = np.zeros(len(batch.targets), dtype=np.int64)
    sequence, read_from = batch.sequence.cpu().numpy(), batch.read_from.cpu().numpy()
    for s, p in enumerate(positions):
        offset = length - len(p) if side == "left" else 0
        index[s, offset : offset + len(p)] = p
        mine = sequence == s
        column[mine] = offset + np.searchsorted(p, read_from[mine])
    device = batch.input_ids.device
    return PaddedRows(torch.from_numpy(index).to(device), batch.sequence, torch.from_numpy(column).to(device))


def padded_length(longest: int, multiple: int | None) -> int:
    """Columns of padded rows. e.g. 10 tokens, a multiple of 8 -> 16"""
    return -(-longest // multiple) * multiple if multiple else longest
