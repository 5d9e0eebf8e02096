"""Building a trainer leaves the process as it was: its generators and its environment."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator

import numpy as np
import torch
from transformers.trainer_utils import set_seed


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
