"""The public fused losses: time and peak memory of loss and gradients, against all logits at once and TRL 1.13's.

python benchmarks/fused_losses.py [--peer-root DIR] [--frozen] [--losses dpo kto grpo jsd]

Each row is a prompt, which is not trained, and a completion. Runs of the sides are interleaved, each in a process kept
alive, after one warm-up each. Memory is the highest resident size over what the process held before its first call, the
gradients included. The losses printed are those of the last run: the sides must agree.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import peers
from common import CLOCKS, Late, Worker, add_run_arguments, describe, machine, note, save, table

SIDES = ["ours", "full", "trl-1.13.0"]
NAMES = {"ours": "posttrain", "full": "all logits at once", "trl-1.13.0": "TRL 1.13 trl.losses"}
LOSSES = ["dpo", "kto", "grpo", "jsd"]


def measure(args: argparse.Namespace, loss: str) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {side: {"seconds": [], "peak_mib": 0.0} for side in args.sides}
    names = ("rows", "length", "hidden", "vocab", "prompt", "dtype", "frozen", "compiled", "threads", "seed")
    shared = {name: getattr(args, name) for name in names}
    workers: dict[str, Worker] = {}
    try:
        for side in args.sides:
            python = peers.interpreter(side, args.peer_root)
            workers[side] = Worker(python, "fused_worker.py", {**shared, "side": side, "loss": loss}, args.limit)
        for number in range(args.rounds + 1):
            for side in [s for s in args.sides if s in workers]:
                note(f"{loss}, round {number}, {side}")
                one(results[side], workers, side, CLOCKS[args.clock], warmup=number == 0)
    finally:
        for worker in workers.values():
            worker.close()
    return results


def one(result: dict[str, Any], workers: dict[str, Worker], side: str, clock: str, warmup: bool) -> None:
    try:
        answer = workers[side].ask("run")
    except Late as late:
        result["failed"] = str(late)
        del workers[side]
        return
    result["loss"] = answer["loss"]
    result["peak_mib"] = max(result["peak_mib"], answer["peak_mib"])
    if not warmup:
        result["seconds"].append(answer[clock])


def rows_of(loss: str, results: dict[str, dict[str, Any]]) -> list[list[str]]:
    base = statistics.median(results["ours"]["seconds"]) if results.get("ours", {}).get("seconds") else None
    rows = []
    for side, result in results.items():
        if not result["seconds"]:
            rows.append([f"{loss}, {NAMES[side]}", result.get("failed", "no run"), "", "", "", ""])
            continue
        median = statistics.median(result["seconds"])
        spread = f"{min(result['seconds']):.2f}–{max(result['seconds']):.2f}"
        ratio = f"{median / base:.2f}×" if base else ""
        name = f"{loss}, {NAMES[side]}"
        rows.append([name, f"{median:.2f}", spread, ratio, f"{result['peak_mib']:.0f}", f"{result['loss']:.4f}"])
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peers.add_arguments(parser)
    parser.add_argument("--losses", nargs="+", default=LOSSES, choices=LOSSES)
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--frozen", action="store_true", help="the weight takes no gradient, as with an adapter")
    parser.add_argument("--compiled", action="store_true", help="TRL's losses compiled; needs a C++ compiler")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=256, help="positions of a row")
    parser.add_argument("--prompt", type=float, default=0.5, help="share of a row that is not trained")
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--rounds", type=int, default=3)
    add_run_arguments(parser, "fused_losses", limit=300)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    info = machine(args.threads, args.clock)
    shape = {name: getattr(args, name) for name in ("rows", "length", "prompt", "hidden", "vocab", "dtype", "frozen")}
    print(describe(info), flush=True)
    print(
        f"{args.rows} rows of {args.length}, {args.prompt:.0%} of each a prompt, H = {args.hidden}, V = {args.vocab}, "
        f"{args.dtype}, weight {'frozen' if args.frozen else 'trained'}, medians of {args.rounds}, {args.clock} clock\n"
    )
    result: dict[str, Any] = {"machine": info, "shape": shape, "losses": {}}
    rows: list[list[str]] = []
    for loss in args.losses:
        result["losses"][loss] = measure(args, loss)
        rows += rows_of(loss, result["losses"][loss])
    print(table(["", "seconds (median)", "range", "posttrain is faster by", "peak MiB", "loss"], rows), flush=True)
    if args.save:
        note(f"saved {save(args.save, result)}")


if __name__ == "__main__":
    main()
