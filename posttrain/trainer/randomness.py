"""Building a trainer draws no random numbers from the user's generators."""

from __future__ import annotations

import contextlib
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
