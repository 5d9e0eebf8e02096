"""What a data set was made of: the sources asked for and their files as they are, so that going on with others is seen.

Rows in memory are hashed whole; of a stream only the first are read, and this is what is known of the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import xxhash

from posttrain.data.config import DatasetConfig, DatasetMixtureConfig
from posttrain.data.joining import is_stream

_WHOLE = 64 << 20  # bytes of a file that are read in full; of a larger one, as many, spread over it
_PART = 1 << 20
_KNOWN: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


def remember(rows: Any, mixture: DatasetMixtureConfig, files: Sequence[Sequence[Path]]) -> None:
    """Keep what `rows` were made of, while they live. `files`: those of each source, none of one on the hub."""
    found: dict[str, Any] = {}
    for number, (source, paths) in enumerate(zip(mixture.datasets, files, strict=True), 1):
        found |= {f"source {number}, {name}": value for name, value in _asked(source, bool(paths)).items()}
        if paths:
            found[f"source {number}, files"] = fingerprint(paths)
    if len(mixture.datasets) > 1:
        found["mixing"] = mixture.mixing
        if mixture.mixing == "interleave":
            found |= {"mixing_seed": mixture.mixing_seed, "stopping_strategy": mixture.stopping_strategy}
    _KNOWN[rows] = found


def origin(rows: Any) -> dict[str, Any]:
    """What `rows` were made of, as far as `get_dataset` made them; else nothing. e.g. {"mixing_seed": 0, …}"""
    return dict(_KNOWN.get(rows, {})) if is_stream(rows) else {}


def _asked(source: DatasetConfig, local: bool) -> dict[str, Any]:
    """The fields of a source that were set. Local files are told by what is in them: they may have moved."""
    fields = {name: value for name, value in asdict(source).items() if value is not None}
    return {name: value for name, value in fields.items() if not (local and name in ("path", "data_dir"))}


def fingerprint(paths: Sequence[Path]) -> str:
    """A hash of the names, sizes and contents of files; of one above 64 MiB, of 64 parts spread over it."""
    found = xxhash.xxh3_128()
    for path in paths:
        size = path.stat().st_size
        found.update(f"{path.name} {size}\n".encode())
        for part in _parts(path, size):
            found.update(part)
    return found.hexdigest()


def _parts(path: Path, size: int) -> Iterator[bytes]:
    count = -(-min(size, _WHOLE) // _PART)
    with path.open("rb") as file:
        for number in range(count):
            file.seek(number * _PART if size <= _WHOLE else number * (size - _PART) // (count - 1))
            yield file.read(_PART)
