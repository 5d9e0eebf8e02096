"""How fast rows are packed, and how full the bins are, for log-normal lengths with a median of an eighth of a bin.

python benchmarks/pack.py [--rows N] [--capacities C ...] [--sigmas S ...]

Time is of the processor, on one core, for the whole plan. Efficiency is ceil(sum of lengths / capacity), the fewest
bins that could hold the tokens, divided by the bins used. Lengths over the capacity are cut to it, as training does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from common import add_run_arguments, describe, machine, note, save, table

from posttrain.data.packing import STRATEGIES, plan_bins

NEEDED = {"rows_per_minute": 1e6, "efficiency": 0.995}


def lengths(count: int, capacity: int, sigma: float, seed: int) -> np.ndarray:
    draw = np.random.default_rng(seed).standard_normal(count)
    return np.clip(np.round(capacity / 8 * np.exp(sigma * draw)), 1, capacity).astype(np.int64)


def measure(args: argparse.Namespace, capacity: int, sigma: float) -> dict[str, Any]:
    sizes = lengths(args.rows, capacity, sigma, args.seed)
    seconds, bins = [], 0
    for _ in range(args.rounds):
        start = time.process_time()
        plan = plan_bins(sizes.tolist(), capacity, args.strategy)
        seconds.append(time.process_time() - start)
        bins = len(plan)
        held = sum(piece.end - piece.start for pieces in plan for piece in pieces)
        if args.strategy == "bfd" and held != int(sizes.sum()):
            raise SystemExit(f"{held} of {int(sizes.sum())} tokens are in the bins")
        del plan
    spent = statistics.median(seconds)
    return {
        "capacity": capacity,
        "sigma": sigma,
        "rows": args.rows,
        "seconds": seconds,
        "rows_per_minute": 60 * args.rows / spent,
        "bins": bins,
        "efficiency": -(-int(sizes.sum()) // capacity) / bins,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--capacities", type=int, nargs="+", default=[1024, 8192, 65536])
    parser.add_argument("--sigmas", type=float, nargs="+", default=[0.1, 0.3, 0.5, 0.8, 1.2])
    parser.add_argument("--strategy", choices=list(STRATEGIES), default="bfd")
    parser.add_argument("--rounds", type=int, default=3)
    add_run_arguments(parser, "pack", threads=1, clock=False)
    args = parser.parse_args()
    info = machine(args.threads)
    print(describe(info) + "\n", flush=True)
    found = []
    for capacity in args.capacities:
        for sigma in args.sigmas:
            note(f"capacity {capacity}, sigma {sigma}")
            found.append(measure(args, capacity, sigma))
    out = [
        [
            f"{one['capacity']:,}",
            f"{one['sigma']:g}",
            f"{statistics.median(one['seconds']):.2f}",
            f"{one['rows_per_minute'] / 1e6:.1f}",
            f"{100 * one['efficiency']:.2f}",
        ]
        for one in found
    ]
    print(table(["capacity", "sigma", "seconds", "million rows a minute", "% of the bound"], out))
    if args.save:
        note(f"saved {save(args.save, {'machine': info, 'strategy': args.strategy, 'needed': NEEDED, 'runs': found})}")


if __name__ == "__main__":
    main()
