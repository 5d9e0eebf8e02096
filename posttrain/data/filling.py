"""Bins that are full to the last tokens, from rows of typical length.

Best fit decreasing lays the longest rows first. Where most rows are about an eighth of a bin, seven of the longer ones
leave a gap that no row fits, and up to a twentieth of all tokens is lost. Here each bin takes rows near the mean, and
the last two are chosen together to fill what is left. The tails that remain are varied enough for best fit decreasing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np

_LEFT = 0.05  # share of rows left over: without a choice the last bins would be bad
_TRIES = 48  # pairs looked at for one gap
_SLACK = 1000  # a bin counts as full when no more than this fraction of it is free


def full_bins(sizes: np.ndarray, capacity: int) -> tuple[list[list[int]], np.ndarray]:
    """Return bins as lists of places in `sizes` that are full, or lack a thousandth, and the places left over.

    e.g. full_bins([4, 3, 3, 2, 1], 10) -> bins of 10 tokens while there are some
    """
    stock = _Stock(sizes)
    least = max(2, int(_LEFT * len(sizes)))
    found: list[list[int]] = []
    while stock.rows > least:
        made = next(filter(None, (stock.bin(capacity, k) for k in stock.likely(capacity))), None)
        if made is None:
            break
        found.append(made)
    # Places of equal sizes are interchangeable, so the plan may be made of sizes first.
    order = np.argsort(sizes, kind="stable")
    first = dict(zip(*(x.tolist() for x in np.unique(sizes[order], return_index=True)), strict=True))
    bins = []
    for made in found:
        bins.append([])
        for size in made:
            bins[-1].append(int(order[first[size]]))
            first[size] += 1
    used = np.zeros(len(sizes), dtype=bool)
    used[[place for places in bins for place in places]] = True
    return bins, np.flatnonzero(~used)


class _Stock:
    """Sizes that are not in a bin yet: the distinct ones in order, and how many there are of each."""

    def __init__(self, sizes: np.ndarray) -> None:
        values, counts = np.unique(sizes[sizes > 0], return_counts=True)
        self.values: list[int] = values.tolist()
        self.counts: dict[int, int] = dict(zip(self.values, counts.tolist(), strict=True))
        self.rows, self.tokens = int(counts.sum()), int(sizes.sum())

    def likely(self, capacity: int) -> list[int]:
        """How many rows a bin may hold: those numbers first whose rows would be nearest to the mean."""
        mean = self.tokens / self.rows
        near = int(capacity / mean)
        numbers = [k for k in range(near - 1, near + 3) if k >= 2]
        return sorted(numbers, key=lambda k: abs(capacity / k - mean))[:3]

    def bin(self, capacity: int, number: int) -> list[int] | None:
        """Take `number` sizes that fill a bin, or nothing."""
        free, taken = capacity, []
        for left in range(number, 2, -1):
            size = self._nearest(free / left)
            if size is None or size > free:
                break
            self._take(size)
            taken.append(size)
            free -= size
        else:
            pair = self._pair(free, capacity // _SLACK)
            if pair is not None:
                for size in pair:
                    self._take(size)
                return [*taken, *pair]
        for size in taken:
            self._put_back(size)
        return None

    def _nearest(self, wanted: float) -> int | None:
        at = bisect_left(self.values, wanted)
        around = self.values[max(0, at - 1) : at + 1]
        return min(around, key=lambda size: abs(size - wanted), default=None)

    def _pair(self, free: int, slack: int) -> tuple[int, int] | None:
        """Two sizes that fill a gap best, and leave no more than `slack`."""
        best, found = slack + 1, None
        at = bisect_left(self.values, free // 2)
        for _ in range(_TRIES):
            if at == len(self.values) or self.values[at] > free:
                break
            larger = self.values[at]
            under = bisect_right(self.values, free - larger) - 1
            if under < 0:
                break
            smaller = self.values[under]
            if smaller == larger and self.counts[larger] < 2:
                at += 1
                continue
            left = free - larger - smaller
            if left < best:
                best, found = left, (larger, smaller)
                if left == 0:
                    break
            # Nothing between fits better with this smaller size; the next larger one may.
            at = max(at + 1, bisect_left(self.values, free - smaller))
        return found

    def _take(self, size: int) -> None:
        self.rows, self.tokens = self.rows - 1, self.tokens - size
        self.counts[size] -= 1
        if not self.counts[size]:
            del self.counts[size]
            self.values.pop(bisect_left(self.values, size))

    def _put_back(self, size: int) -> None:
        self.rows, self.tokens = self.rows + 1, self.tokens + size
        if size not in self.counts:
            self.values.insert(bisect_left(self.values, size), size)
            self.counts[size] = 0
        self.counts[size] += 1
