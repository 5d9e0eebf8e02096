"""Building a trainer leaves the process as it was: its generators and its environment."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers.trainer_utils import set_seed


def rng_state() -> tuple[Any, ...]:
    """The state of every global generator: python's, numpy's, torch's on the host and on this rank's device."""
    device = torch.accelerator.is_available()
    kind = torch.accelerator.current_accelerator() if device else None
    own = getattr(torch, kind.type).get_rng_state() if kind is not None else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), own


def restore_rng(state: tuple[Any, ...]) -> None:
    """Set every global generator to what `rng_state` returned."""
    python, legacy, host, own = state
    random.setstate(python)
    np.random.set_state(legacy)
    torch.set_rng_state(host)
    kind = torch.accelerator.current_accelerator() if own is not None else None
    if kind is not None:
        getattr(torch, kind.type).set_rng_state(own)


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Give every global generator back the state it had."""
    python, legacy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from `seed` inside, as if nothing had been drawn outside."""
    with preserved_rng():
        set_seed(seed)
        yield


@contextlib.contextmanager
def preserved_environment() -> Iterator[None]:
    """Take back what accelerate writes to the environment: the next trainer would be asked for the same strategy."""
    before = {name: os.environ.get(name) for name in _STRATEGY}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


_STRATEGY = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_MIXED_PRECISION")
