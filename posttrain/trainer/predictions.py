"""What `compute_metrics` needs: padded logits. The only place where whole logits are in memory, and only when asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import EvalPrediction

from posttrain.model.padding import pad_rows
from posttrain.parallel.ranks import gather_objects
from posttrain.types import TokenBatch


class Predictions:
    """Collects the logits [S, L, V] and labels [S, L] (−100 where nothing is trained) of an evaluation."""

    def __init__(self, preprocess: Callable[..., Any] | None) -> None:
        self.preprocess = preprocess
        self.parts: list[tuple[np.ndarray, np.ndarray, tuple[int, ...]]] = []

    def add(self, model: Any, batch: TokenBatch) -> None:
        if not batch.num_sequences:
            model(input_ids=batch.input_ids[None, :1], use_cache=False)  # where weights are sharded, all ranks gather
            return
        rows = pad_rows(batch)
        real = rows.index >= 0
        at = rows.index.clamp(min=0)
        labels = torch.full_like(rows.index, -100)
        labels[rows.read_row, rows.read_column + 1] = batch.targets
        logits = model(input_ids=batch.input_ids[at], attention_mask=real.long(), use_cache=False).logits
        if self.preprocess is not None:
            logits = self.preprocess(logits, labels)
        logits = logits[0] if isinstance(logits, tuple) else logits
        found = (logits.float() if logits.is_floating_point() else logits).cpu().numpy()
        self.parts.append((found, labels.cpu().numpy(), batch.source))

    def compute(
        self, compute_metrics: Callable[[EvalPrediction], dict[str, float]]
    ) -> tuple[np.ndarray, np.ndarray, dict]:
        """Predictions and labels of all ranks in the order of the data set, and the user's metrics over them."""
        parts = [part for rank in gather_objects(self.parts) for part in rank]
        length = max(labels.shape[1] for _, labels, _ in parts)
        order = np.argsort([source for *_, sources in parts for source in sources], kind="stable")
        predictions = np.concatenate([_widen(p, length, -100) for p, *_ in parts])[order]
        labels = np.concatenate([_widen(x, length, -100) for _, x, _ in parts])[order]
        return predictions, labels, compute_metrics(EvalPrediction(predictions=predictions, label_ids=labels))


def _widen(x: np.ndarray, length: int, fill: float) -> np.ndarray:
    if x.ndim < 2:
        return x
    return np.pad(x, [(0, 0), (0, length - x.shape[1]), *[(0, 0)] * (x.ndim - 2)], constant_values=fill)
