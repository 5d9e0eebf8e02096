"""Rotary embeddings whose frequencies follow from the longest position of a forward: which rows may share one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from posttrain.parallel.ranks import all_max

KINDS = ("longrope", "dynamic")


def varying_rope(config: Any) -> str | None:
    """The kind of rotary embedding whose frequencies follow from the longest position of a forward, if it is one."""
    kinds = {each.get("rope_type") for each in _parameters(config)}
    return min(set(KINDS) & kinds, default=None)


def row_groups(config: Any, lengths: Sequence[int], device: torch.device | None = None) -> list[list[int]]:
    """Rows that may share a forward, given their lengths.

    Given a device, every rank has as many groups, some of them empty: where weights are sharded, ranks go through a
    model together, and those without long rows must not leave the others waiting. A collective, for LongRoPE alone.

    LongRoPE (arXiv 2402.13753, section 3.4) has two sets of frequencies, for rows up to the original context and for
    longer ones: two groups. Dynamic NTK has a set for every length beyond it: a group each.

    e.g. LongRoPE of original length 32, rows of 20, 40, 30 and 33 tokens -> [[0, 2], [1, 3]]
    """
    kind = varying_rope(config)
    if kind is None:
        return [list(range(len(lengths)))]
    limit = _original_length(config, kind)
    groups: dict[int, list[int]] = {}
    if device is not None:
        mine = [any(length <= limit for length in lengths), any(length > limit for length in lengths)]
        groups = {regime: [] for regime, wanted in enumerate(all_max([int(x) for x in mine], device)) if wanted}
    for row, length in enumerate(lengths):
        regime = 0 if length <= limit else 1 if kind == "longrope" else length
        groups.setdefault(regime, []).append(row)
    return [groups[regime] for regime in sorted(groups)]


def forget_lengths(model: nn.Module) -> None:
    """Dynamic NTK keeps the frequencies of the longest row it has met; start from the original ones."""
    if varying_rope(getattr(model, "config", None)) != "dynamic":
        return
    for module in model.modules():
        original = getattr(module, "original_inv_freq", None)
        if original is not None:
            module.register_buffer("inv_freq", original.to(module.inv_freq.device), persistent=False)
            module.max_seq_len_cached = module.original_max_seq_len


def _parameters(config: Any) -> list[dict[str, Any]]:
    rope: Any = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return [rope, *(each for each in rope.values() if isinstance(each, dict))]


def _original_length(config: Any, kind: str) -> int:
    text = config.get_text_config()
    if kind == "dynamic":
        return int(text.max_position_embeddings)
    found = [each["original_max_position_embeddings"] for each in _parameters(config) if each.get("rope_type") == kind]
    return int(min(found))
