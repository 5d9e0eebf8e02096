"""Metrics that add: kept as (sum, weight) on the device, read once a log line."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from posttrain.model.padding import padded_length
from posttrain.parallel.ranks import gather_objects
from posttrain.types import Mean, TokenBatch

# Of means over different rows: no mean of anything, so they do not add.
_DIFFERENCES = {"rewards/margins": ("rewards/chosen", "rewards/rejected")}


class Meter:
    """Adds up `Mean`s between two log lines. Nothing waits for the device, and no rank for another, until `drain`."""

    def __init__(self) -> None:
        self._means: dict[str, Mean] = {}

    def add(self, metrics: dict[str, Mean]) -> None:
        for name, given in metrics.items():
            mean = Mean(_cut(given.total), _cut(given.weight))
            self._means[name] = self._means[name] + mean if name in self._means else mean

    def snapshot(self) -> dict[str, Mean]:
        """What was added since the last line, for `restore`."""
        return dict(self._means)

    def restore(self, snapshot: dict[str, Mean]) -> None:
        """Forget what was added since the snapshot was taken."""
        self._means = dict(snapshot)

    def drain(self, peaks: Mapping[str, float] | None = None) -> dict[str, float]:
        """Means over all ranks since the last call, and the largest of each of `peaks` over the ranks. A metric that no
        rank has seen is absent, not 0 and not NaN."""
        local = {name: (_number(mean.total), _number(mean.weight)) for name, mean in self._means.items()}
        self._means = {}
        totals: dict[str, list[float]] = {}
        largest: dict[str, float] = {}
        for one, high in gather_objects((local, dict(peaks or {}))):
            largest |= {name: max(value, largest.get(name, value)) for name, value in high.items()}
            for name, (total, weight) in one.items():
                sums = totals.setdefault(name, [0.0, 0.0])
                sums[0] += total
                sums[1] += weight
        means = {name: total / weight for name, (total, weight) in sorted(totals.items()) if weight}
        for name, parts in _DIFFERENCES.items():
            if name not in means and all(part in means for part in parts):
                means[name] = means[parts[0]] - means[parts[1]]
        return means | largest


def _cut(value: Tensor | float) -> Tensor | float:
    """Without its graph, which would keep the activations of every micro-batch until the next line of the log."""
    return value.detach() if isinstance(value, Tensor) else value


def _number(value: Tensor | float) -> float:
    return float(value)


class Speed:
    """Speed of training alone: the clock stands while the run evaluates, saves or has not begun. Nothing waits for the
    device: the clock runs from line to line of the log, and the loss of a line has been read before it stops.

    peak: operations a second the device could do, where known.
    """

    def __init__(self, peak: float | None = None) -> None:
        self.peak = peak
        self._tokens, self._operations, self._seconds = 0.0, 0.0, 0.0
        self._since: float | None = None

    def run(self, tokens: float, operations: float = 0.0) -> None:
        """A step begins: tokens over all ranks, operations of this one."""
        self._since = time.perf_counter() if self._since is None else self._since
        self._tokens += tokens
        self._operations += operations

    def stand(self) -> None:
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
        self._since = None

    def drain(self) -> dict[str, float]:
        """Since the last call: tokens a second over all ranks, model TFLOP/s of this one, and its share of the peak."""
        self.stand()
        seconds = max(self._seconds, 1e-9)
        found = {"tokens_per_second": self._tokens / seconds, "tflops": self._operations / seconds / 1e12}
        if self.peak is not None:
            found["mfu"] = self._operations / seconds / self.peak
        self._tokens, self._operations, self._seconds = 0.0, 0.0, 0.0
        return found


def layout_metrics(window: list[TokenBatch], layout: str, multiple: int | None) -> dict[str, Mean]:
    """What sharing saved of the tokens, and what padding added to them."""
    used = [batch for batch in window if batch.num_sequences]
    laid, unshared = sum(batch.num_tokens for batch in used), sum(batch.unshared_tokens for batch in used)
    padded = 0
    if layout == "padded":
        padded = sum(laid_tokens(batch, layout, multiple) - batch.unshared_tokens for batch in used)
    return {
        "shared_share": Mean(float(unshared - laid), float(unshared)),
        "padding_share": Mean(float(padded), float(padded + laid)),
    }


def laid_tokens(batch: TokenBatch, layout: str, multiple: int | None) -> int:
    """Positions a forward computes."""
    if layout != "padded" or not batch.num_sequences:
        return batch.num_tokens
    lengths = [len(batch.segments.positions(leaf)) for leaf in batch.leaf]
    return padded_length(max(lengths), multiple) * len(lengths)


def next_step_logs(args: Any, state: Any) -> bool:
    """Whether the optimizer step to come will be told in the log."""
    step, every = state.global_step + 1, state.logging_steps
    if args.logging_strategy != "steps":
        return args.logging_strategy != "no"
    if step == 1 and args.logging_first_step:
        return True
    return step % every == 0 if every else False
