"""Who am I among the processes, and the few collectives the engine needs. In one process each is the identity."""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


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


def on_every_rank(act: Callable[[], T], caught: type[Exception] = Exception) -> T:
    """Call on every rank; this rank's value. When one raises `caught`, all raise the error of the first that did: a
    rank that raised alone would leave the others waiting in the next collective.

    Where `act` itself holds collectives, catch only what cannot come between two of them: any other error is raised
    at once, on its rank alone.
    """
    value, error = None, None
    try:
        value = act()
    except caught as raised:
        error = raised
    if error is not None and world_size() == 1:
        raise error
    told = [each for each in gather_objects(_portable(error)) if each is not None]
    if told:
        raise told[0] from error
    return value  # pyright: ignore[reportReturnType]


def _portable(error: Exception | None) -> Exception | None:
    """The error itself where it survives the way to another process, else its name and text."""
    with contextlib.suppress(Exception):
        pickle.loads(pickle.dumps(error))
        return error
    return RuntimeError(f"rank {rank()}: {type(error).__name__}: {error}")


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
