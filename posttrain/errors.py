"""The errors posttrain raises. A message names the field, the value seen and the fix.

PosttrainError
├── ConfigError       a field, a flag or a combination of them    (also a ValueError)
├── DataError         a row, a column, a file                     (also a ValueError)
│   └── EmptyDataError    nothing is left to train or to evaluate
├── ModelError        weights, tokenizers, adapters               (also a ValueError)
│   └── LayoutError       the model cannot take the layout asked for
├── MissingExtraError an optional package that was asked for      (also an ImportError)
└── TrainingError     a run that must stop                        (also a RuntimeError)
    ├── NonFiniteError    a loss or a gradient that is NaN or infinite
    ├── OutOfMemoryError  a batch that does not fit
    └── SelfCheckError    a run that would not train what it says
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PosttrainError(Exception):
    """Base of every error raised on purpose. The command line prints its text without a traceback."""


class ConfigError(PosttrainError, ValueError):
    """A field, a flag or a combination of them that cannot be run."""


class DataError(PosttrainError, ValueError):
    """A row, a column or a file that cannot be used."""


class EmptyDataError(DataError):
    """Nothing is left to train or to evaluate."""


class ModelError(PosttrainError, ValueError):
    """Weights, a tokenizer or an adapter that cannot be used."""


class LayoutError(ModelError):
    """The model cannot take the layout that was asked for."""


class MissingExtraError(PosttrainError, ImportError):
    """An optional package is needed for what was asked."""


class TrainingError(PosttrainError, RuntimeError):
    """A run that must stop."""


class NonFiniteError(TrainingError):
    """A loss or a gradient norm is NaN or infinite."""


class OutOfMemoryError(TrainingError):
    """A batch does not fit in memory, and smaller pieces are no way on."""


class SelfCheckError(TrainingError):
    """A self-check failed before the first step."""


def suggest(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the name in `known` nearest to `name`, or an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""
