"""The rows every side trains on, and what a token of them costs. Standard library only."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from statistics import NormalDist
from typing import Any


def lengths(count: int, seed: int, median: int = 200, sigma: float = 0.8, longest: int = 1024) -> list[int]:
    """Log-normal, cut at `longest`: evenly spaced quantiles in random order, so that few rows have its shape too."""
    quantiles = [NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]
    out = [max(16, min(longest, round(median * math.exp(sigma * q)))) for q in quantiles]
    random.Random(seed).shuffle(out)
    return out


def varied(count: int, seed: int, median: int = 200, longest: int = 1024) -> list[list[int]]:
    return _tokens(lengths(count, seed, median=median, longest=longest), seed)


def tools(count: int, seed: int, schema: int = 300) -> list[list[int]]:
    """Every row begins with the same tool schema; what follows has a median of 100 tokens."""
    prefix = _tokens([schema], seed + 1)[0]
    return [prefix + row for row in _tokens(lengths(count, seed, median=100, longest=1024 - schema), seed)]


def _tokens(sizes: list[int], seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(100, 49000) for _ in range(size)] for size in sizes]


def train_flops(model: str, rows: list[list[int]], lora: bool) -> float:
    """Of one pass over the rows: forward, gradient of activations, gradient of weights (not with frozen weights).
    Useful work only: no padding, no recomputation, nothing saved by sharing."""
    c: dict[str, Any] = json.loads((Path(model) / "config.json").read_text())
    heads, size = c["num_attention_heads"], c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    attention = c["hidden_size"] * size * (2 * heads + 2 * c["num_key_value_heads"])
    layer = attention + 3 * c["hidden_size"] * c["intermediate_size"]
    weights = c["num_hidden_layers"] * layer + c["vocab_size"] * c["hidden_size"]
    products = 2.0 * weights * sum(map(len, rows))
    scores = 2.0 * c["num_hidden_layers"] * heads * size * sum(len(row) ** 2 for row in rows)  # causal: half of 4
    return (2 if lora else 3) * products + 3 * scores
