"""Who am I among the processes, and the few collectives the engine needs. In one process each is the identity."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def say(text: str) -> None:
    """Tell the user, once for all ranks."""
    if rank() == 0:
        print(text, file=sys.stderr, flush=True)


def gather_objects(value: Any) -> list[Any]:
    """The value of every rank, in order."""
    if world_size() == 1:
        return [value]
    found: list[Any] = [None] * world_size()
    dist.all_gather_object(found, value)
    return found


def all_sum(value: Tensor) -> Tensor:
    """Sum over the ranks, on the value's device."""
    if world_size() > 1:
        dist.all_reduce(value)
    return value


def all_max(values: list[int], device: torch.device) -> list[int]:
    """Elementwise maximum over the ranks."""
    if world_size() == 1:
        return values
    tensor = torch.tensor(values, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()
