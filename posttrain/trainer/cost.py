"""What a step costs: the floating-point operations its model needs, the memory it takes, and what the device could do.

Operations are those of the formulas, not those that run: what checkpointing recomputes is not counted (PaLM,
arXiv 2204.02311, appendix B: model FLOPs utilization).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from posttrain.model.load import base_model
from posttrain.model.router import EXPERT_COUNTS
from posttrain.types import TokenBatch

# Dense bf16 / fp16 tensor-core FLOP/s, from the makers' data sheets, without sparsity. The first name that is part of
# the device's name counts, so longer ones stand first.
PEAK_FLOPS = (
    ("B200", 2250e12),
    ("GH200", 989e12),
    ("H200", 989e12),
    ("H100 PCIE", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("A40", 150e12),
    ("A30", 165e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("RTX 6000 ADA", 364e12),
    ("RTX A6000", 155e12),
    ("RTX 4090", 165e12),
    ("RTX 3090", 71e12),
    ("V100", 125e12),
    ("T4", 65e12),
    ("MI300X", 1307e12),
    ("MI250", 362e12),
)


class ModelCost:
    """Operations of forward and backward over a batch of a model.

    A weight that is trained costs 6 operations a token (2 forward, 4 backward), a frozen one 4 (no gradient of its
    own). The rows of an embedding table are looked up and cost nothing, unless the head multiplies by them. Of E
    experts the k that a token is sent to count. Attention costs 12 · heads · head size a layer for each pair
    of a token and one it sees; mixers without attention are counted by their weights alone.
    """

    def __init__(self, model: nn.Module) -> None:
        config = base_model(model).config.get_text_config()
        self.weights, self.per_token = _weights(model, config)
        heads = _read(config, "num_attention_heads") or 0
        size = _read(config, "head_dim") or (config.hidden_size // heads if heads else 0)
        given = _read(config, "layer_types")
        kinds = given or ["full_attention"] * (_read(config, "num_hidden_layers") or 0)
        window = _read(config, "sliding_window")
        # `sliding_window` without `layer_types` holds for all layers.
        slides = kinds if given else ["sliding_attention"] * len(kinds)
        self.sliding = sum(kind == "sliding_attention" for kind in slides) if window else 0
        self.full = sum("attention" in kind for kind in kinds) - self.sliding
        self.full -= sum("linear" in kind for kind in kinds)
        self.window, self.per_pair = window or 0, 12 * heads * size

    def of(self, batches: Iterable[TokenBatch]) -> float:
        """Operations of the tokens laid, on this rank. Batches are on the host: nothing waits for the device."""
        total = 0.0
        for batch in batches:
            if not batch.num_tokens:
                continue
            total += self.per_token * batch.num_tokens
            seen = batch.position_ids + 1  # a token sees itself and all before it
            total += self.per_pair * self.full * float(seen.sum())
            if self.sliding:
                total += self.per_pair * self.sliding * float(seen.clamp(max=self.window).sum())
        return total


def _read(config: Any, name: str) -> Any:
    """A field, None where there is none; also where layers have their own (Gemma 4), which raises."""
    try:
        return getattr(config, name, None)
    except (RuntimeError, ValueError):
        return None


def _weights(model: nn.Module, config: Any) -> tuple[int, float]:
    """How many weights there are over all ranks, and the operations they cost a token."""
    count = next((n for name in EXPERT_COUNTS if (n := getattr(config, name, None))), None)
    chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None)
    share = chosen / count if count and chosen else 1.0
    base: Any = base_model(model)
    table, head = base.get_input_embeddings(), base.get_output_embeddings()
    looked_up = set() if table is None else {id(p) for p in table.parameters()}
    looked_up -= set() if head is None else {id(p) for p in head.parameters()}
    every, cost = 0, 0.0
    for name, p in model.named_parameters():
        every += (numel := _numel(p))
        if id(p) not in looked_up:
            cost += (6 if p.requires_grad else 4) * numel * (share if ".experts." in name else 1.0)
    return every, cost


def _numel(p: Any) -> int:
    """Also of a weight that ZeRO-3 took away, or that bitsandbytes packed."""
    state = getattr(p, "quant_state", None)
    shape = getattr(state, "shape", None)
    if shape is not None:
        return math.prod(shape)
    return int(getattr(p, "ds_numel", p.numel()))


def peak_flops(device: torch.device, half: bool) -> float | None:
    """Operations a second the device could do in 16 bits. None where it is not in the table, as for every CPU, and for
    a run in 32 bits: a utilization would be a guess."""
    if device.type != "cuda" or not half:
        return None
    name = torch.cuda.get_device_name(device).upper()
    return next((flops for part, flops in PEAK_FLOPS if part in name), None)


def peak_memory(device: torch.device, before: int = 0) -> float:
    """MiB: the most that was allocated on the device since the last call; on a CPU what the process holds now.

    before: bytes of a peak that somebody else has put back to nothing since.
    """
    if device.type == "cuda":
        peak = max(torch.cuda.max_memory_allocated(device), before) / 2**20
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    import psutil

    return psutil.Process().memory_info().rss / 2**20
