"""What goes through the engine's two halves, and what a step knows of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from posttrain.data.forest import build_forest, select, split_sequences
from posttrain.types import TokenBatch


@dataclass(frozen=True)
class Experience:
    """What `loss_step` gets: a batch, and in subclasses what `experience` found. `per_sequence` names the fields that
    are aligned to the batch's sequences; they are split and moved with it."""

    batch: TokenBatch
    per_sequence: ClassVar[tuple[str, ...]] = ()

    def split(self, max_tokens: int) -> Sequence[Experience]:
        """Pieces of at most `max_tokens` tokens, cut between units."""
        parts = split_sequences(self.batch, max_tokens)
        return [self] if len(parts) == 1 else [self.part(sequences) for sequences in parts]

    def part(self, sequences: list[int]) -> Experience:
        """What belongs to some of the sequences, which hold whole units; to none of them, a batch without any."""
        batch = select(self.batch, sequences) if sequences else build_forest([])
        return replace(self, batch=batch, **{name: getattr(self, name)[sequences] for name in self.per_sequence})

    def to(self, device: torch.device) -> Experience:
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in self.per_sequence}
        return replace(self, batch=self.batch.to(device, non_blocking=True), **moved)


@dataclass(frozen=True)
class Window:
    """What one optimizer step uses, over all ranks."""

    units: float
    sequences: float = 0.0
    sources: tuple[int, ...] = ()  # rows of the data set on this rank
    measure: bool = False  # whether this step logs
    training: bool = False  # and not of an evaluation


def tokens_and_sequences(window: list[TokenBatch]) -> Tensor:
    tokens, sequences = (sum(x) for x in ([b.unshared_tokens for b in window], [b.num_sequences for b in window]))
    return torch.tensor([tokens, sequences], dtype=torch.float64)


def shown(sources: tuple[int, ...]) -> str:
    return ", ".join(map(str, sources[:16])) + (f", … ({len(sources)} in all)" if len(sources) > 16 else "")
