"""NEFTune: uniform noise on the embeddings in training (Jain et al. 2023, arXiv 2310.05914, algorithm 1).

Letters: L length of a sequence, H hidden, S sequences, T tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from posttrain.model.body import backbone
from posttrain.types import Segments


class EmbeddingNoise:
    """Adds α / √(L · H) · U(−1, 1) to every token's embedding, with L the length of the token's own sequence, padding
    and neighbours in the row left out. Off in evaluation."""

    def __init__(self, model: Any, alpha: float) -> None:
        """`model`: the causal language model under an adapter."""
        self.alpha = alpha
        self._lengths: Tensor | None = None
        body, embedding = backbone(model), model.get_input_embeddings()
        self._handles = [
            body.register_forward_pre_hook(self._read, with_kwargs=True),
            embedding.register_forward_hook(self._add),
            body.register_forward_hook(self._forget, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _read(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._lengths = token_lengths(kwargs.get("forest"), kwargs.get("attention_mask"))

    def _forget(self, *_: Any) -> None:
        self._lengths = None

    def _add(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if not module.training or self._lengths is None:
            return output
        lengths = self._lengths.to(output.device, torch.float32).clamp(min=1)
        scale = self.alpha / (lengths * output.shape[-1]).sqrt()
        noise = torch.empty_like(output, dtype=torch.float32).uniform_(-1, 1)
        return output + (noise * scale[..., None]).to(output.dtype)


def token_lengths(forest: Segments | None, mask: Tensor | None) -> Tensor | None:
    """Length of each token's sequence: [1, T] of a forest without sharing, [S, 1] of padded rows.

    e.g. segments of 3 and 2 tokens -> [[3, 3, 3, 2, 2]]
    """
    if forest is not None:
        sizes = torch.tensor(forest.sizes)
        return torch.repeat_interleave(sizes, sizes)[None]
    return None if mask is None else mask.sum(1, keepdim=True)
