"""How many tokens a forward may have, measured where running out of memory cannot be mended: under FSDP2 and ZeRO.

The first two steps run in small pieces, down to one sequence. In the second, when the optimizer's state is there, the
peak of each piece is noted; a line through the peaks says how many tokens fill nine tenths of the memory. The ranks
take the smallest answer. Pieces do not change the result, so nothing is run for the measurement alone.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from posttrain.types import TokenBatch

MEASURED_STEP = 2
SHARE = 0.9
"""Of the memory; the rest is for fragments and for rows that cost more a token than those measured."""


class Memory(Protocol):
    """What the probe asks of a device, in bytes."""

    def reset(self) -> None:
        """A new peak begins."""
        ...

    def peak(self) -> int:
        """The most that was allocated since."""
        ...

    def capacity(self) -> int:
        """What this process holds and could still get."""
        ...


class CudaMemory:
    """`Memory` of this rank's GPU."""

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def capacity(self) -> int:
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()


def device_memory() -> Memory | None:
    """The memory of this rank's device, or None where it cannot be asked."""
    return CudaMemory() if torch.cuda.is_available() else None


class Probe:
    """Peaks of the pieces of one step."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._peaks: dict[int, int] = {}  # largest, by tokens

    def note(self, tokens: int) -> None:
        """A piece of so many tokens ended."""
        self._peaks[tokens] = max(self._peaks.get(tokens, 0), self.memory.peak())

    def budget(self) -> int | None:
        """Tokens that fill the memory, at least as many as were seen to fit. None: pieces were too alike to say.

        e.g. peaks {100: 3 GB, 200: 4 GB} and 20 GB -> (0.9 · 20 − 2) GB / 10 MB = 1600
        """
        tokens = np.array(list(self._peaks), dtype=np.float64)
        if len(tokens) < 2:
            return None
        each, fixed = np.polyfit(tokens, np.array(list(self._peaks.values()), dtype=np.float64), 1)
        if each <= 0:
            return None
        return max(int((SHARE * self.memory.capacity() - fixed) / each + 1e-6), int(tokens.max()))


def first_pieces(window: list[TokenBatch]) -> int:
    """Tokens of a piece while memory is measured: the longest sequence, or an eighth of the largest micro-batch."""
    longest = max((len(b.segments.positions(leaf)) for b in window for leaf in b.leaf), default=1)
    return max(longest, *(batch.num_tokens // 8 for batch in window))


def longest_row(items: Any) -> int:
    """Tokens of the longest row of the training set, 0 where it is not known, as of a stream."""
    return max(getattr(items, "row_lengths", None) or [0])
