"""Metrics that add: kept as (sum, weight) on the device, read once a log line."""

from __future__ import annotations

import time

from torch import Tensor

from posttrain.parallel.ranks import gather_objects
from posttrain.types import Mean


class Meter:
    """Adds up `Mean`s between two log lines. Nothing waits for the device, and no rank for another, until `drain`."""

    def __init__(self) -> None:
        self._means: dict[str, Mean] = {}

    def add(self, metrics: dict[str, Mean]) -> None:
        for name, mean in metrics.items():
            self._means[name] = self._means[name] + mean if name in self._means else mean

    def drain(self) -> dict[str, float]:
        """Means over all ranks since the last call. A metric that no rank has seen is absent, not 0 and not NaN."""
        local = {name: (_number(mean.total), _number(mean.weight)) for name, mean in self._means.items()}
        self._means = {}
        totals: dict[str, list[float]] = {}
        for one in gather_objects(local):
            for name, (total, weight) in one.items():
                sums = totals.setdefault(name, [0.0, 0.0])
                sums[0] += total
                sums[1] += weight
        return {name: total / weight for name, (total, weight) in sorted(totals.items()) if weight}


def _number(value: Tensor | float) -> float:
    return float(value)


class Speed:
    """Tokens a second of training alone: the clock stands while the run evaluates, saves or has not begun."""

    def __init__(self) -> None:
        self._tokens, self._seconds = 0.0, 0.0
        self._since: float | None = None

    def run(self, tokens: float) -> None:
        """A step over so many tokens begins."""
        self._since = time.perf_counter() if self._since is None else self._since
        self._tokens += tokens

    def stand(self) -> None:
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
        self._since = None

    def drain(self) -> float:
        """Tokens a second since the last call."""
        self.stand()
        speed = self._tokens / max(self._seconds, 1e-9)
        self._tokens, self._seconds = 0.0, 0.0
        return speed
