"""Rows that are the same, and rows that are nearly the same.

Nearly: the Jaccard similarity of their shingles (runs of 5 tokens) is 0.8 or more. Candidates are found with MinHash
(Broder, "On the resemblance and containment of documents", 1997) and banding, then measured exactly. Shingles that
stand in a fifth of all rows are left out, or a system prompt would make all rows alike. Memory: 256 bytes a row, and
4 MiB for the shingles' counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SIMILAR = 0.8
SHINGLE = 5
MIN_SHINGLES = 8  # of a row, to be compared: fewer say too little
_HASHES, _BAND = 64, 4
_COUNTERS = 1 << 20
_COMMON_SHARE, _COMMON_ROWS = 0.2, 3


class Pair(NamedTuple):
    """Row `later` is like row `earlier`; both are places in what was compared."""

    later: int
    earlier: int
    similarity: float


def row_hash(*arrays: np.ndarray) -> int:
    """A 64-bit hash of some arrays. Equal rows are those whose hashes are equal: of a million rows, two that differ
    collide with a chance below one in ten million."""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(array.tobytes() + b"|")
    return int.from_bytes(digest.digest(), "little")


def exact_pairs(hashes: Sequence[int]) -> list[Pair]:
    """Each row that came before, with the first of its kind. e.g. [5, 7, 5] -> [Pair(2, 0, 1.0)]"""
    first: dict[int, int] = {}
    found = []
    for at, value in enumerate(hashes):
        earlier = first.setdefault(value, at)
        if earlier != at:
            found.append(Pair(at, earlier, 1.0))
    return found


def near_pairs(rows: Sequence[np.ndarray], reference: int = 0) -> tuple[list[Pair], int]:
    """Rows of token ids that are nearly the same as an earlier one, each with the most similar that was found; and how
    many rows were too short to be compared. Equal rows are near too.

    With `reference` > 0, only rows from that place on are compared, and only with those before it.
    """
    counts = np.zeros(_COUNTERS, dtype=np.int32)
    for ids in rows:
        counts[_shingles(ids) % _COUNTERS] += 1
    rare = max(_COMMON_ROWS, int(_COMMON_SHARE * len(rows)))
    draw = np.random.default_rng(0)
    factors = draw.integers(1, 2**63, _HASHES, dtype=np.uint64) | np.uint64(1)
    signatures = np.zeros((len(rows), _HASHES), dtype=np.uint32)
    long = np.zeros(len(rows), dtype=bool)
    for at, ids in enumerate(rows):
        kept = _rare_shingles(ids, counts, rare)
        if len(kept) >= MIN_SHINGLES:
            long[at] = True
            signatures[at] = _signature(kept, factors)
    best: dict[int, Pair] = {}
    for later, earlier in sorted(_candidates(signatures, np.flatnonzero(long), reference)):
        if (signatures[later] == signatures[earlier]).mean() < SIMILAR - 0.2:
            continue
        a, b = (_rare_shingles(rows[at], counts, rare) for at in (later, earlier))
        common = len(np.intersect1d(a, b, assume_unique=True))
        similarity = common / (len(a) + len(b) - common)
        if similarity >= SIMILAR and (later not in best or best[later].similarity < similarity):
            best[later] = Pair(later, earlier, similarity)
    return list(best.values()), int((~long).sum())


def _shingles(ids: np.ndarray) -> np.ndarray:
    """Distinct hashes of the runs of `SHINGLE` tokens, in order of size."""
    count = len(ids) - SHINGLE + 1
    if count < 1:
        return np.zeros(0, dtype=np.uint64)
    words = ids.astype(np.uint64)
    mixed = np.zeros(count, dtype=np.uint64)
    for place in range(SHINGLE):
        mixed = (mixed ^ words[place : place + count]) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return np.unique(mixed)


def _rare_shingles(ids: np.ndarray, counts: np.ndarray, rare: int) -> np.ndarray:
    found = _shingles(ids)
    return found[counts[found % _COUNTERS] <= rare]


def _signature(shingles: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """The smallest of each hash function: multiply and keep the upper half, in blocks so that a long row costs little
    memory."""
    out = np.full(len(factors), np.iinfo(np.uint32).max, dtype=np.uint32)
    for start in range(0, len(shingles), 4096):
        block = (shingles[start : start + 4096, None] * factors) >> np.uint64(32)
        out = np.minimum(out, block.min(axis=0).astype(np.uint32))
    return out


def _candidates(signatures: np.ndarray, rows: np.ndarray, reference: int) -> set[tuple[int, int]]:
    """Pairs whose signatures agree on a whole band: in a group, each row with the first and with the one before it, so
    that a large group costs no more than its size."""
    found: set[tuple[int, int]] = set()
    for start in range(0, _HASHES, _BAND):
        groups: dict[bytes, tuple[int, int]] = {}  # the first row of the group, and the last
        for at in rows.tolist():
            key = signatures[at, start : start + _BAND].tobytes()
            first, last = groups.get(key, (-1, -1))
            if first >= 0 and at >= reference:
                found |= {(at, first), (at, last)}
            if first < 0 or at < reference or not reference:
                groups[key] = (at if first < 0 else first, at)
    return {(a, b) for a, b in found if not reference or b < reference <= a}
