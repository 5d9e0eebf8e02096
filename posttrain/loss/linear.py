"""The head: hidden states + weight → per-token scores, in chunks."""
from __future__ import annotations
from dataclasses import dataclass
from torch import Tensor
from posttrain.types import ScoreRequest, TokenScores

@dataclass(frozen=True)
class HeadSpec:
    """What follows the product: logits = softcap(scale * (h W^T + b))."""
    scale: float = 1.0
    softcap: float | None = None
    chunk_tokens: int | None = None
    memory_bytes: int = 256 << 20

def linear_scores(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, spec: HeadSpec, request: ScoreRequest) -> TokenScores:
    """hidden [N, H], weight [V, H], targets [N], bias [V] -> scores [N]"""
    ...
