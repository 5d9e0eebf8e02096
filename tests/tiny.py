"""Tiny random models and rows for tests: 2 layers, fp32, no dropout."""

from __future__ import annotations

import random
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config

SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_model(family: str = "llama", seed: int = 0, **overrides: Any) -> Any:
    """A random model; the global generators are left as they were."""
    shape = SHAPE | overrides
    if family == "gemma3":
        shape = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]} | shape
    config = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "gemma3": Gemma3TextConfig}[family]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config(**shape))


def token_rows(count: int = 12, seed: int = 0, longest: int = 24, prefix: int = 0, masked: bool = True) -> Dataset:
    """Pre-tokenized rows of varied length, the first third of each masked; optionally all with one prefix."""
    draw = random.Random(seed)
    shared = [draw.randrange(3, 300) for _ in range(prefix)]
    rows = []
    for _ in range(count):
        ids = shared + [draw.randrange(3, 300) for _ in range(draw.randint(4, longest))]
        labels = [-100] * (len(ids) // 3) + ids[len(ids) // 3 :] if masked else list(ids)
        rows.append({"input_ids": ids, "labels": labels})
    return Dataset.from_list(rows)
