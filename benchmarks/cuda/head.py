"""The head's chunk on one GPU: 256 tokens × hidden 2,048 × vocabulary 248,320, forward and backward, bf16.

python benchmarks/cuda/head.py [--peer-root DIR]
python benchmarks/cuda/head.py --tiny --device cpu --sides ours full      (to try the script)

Sides: posttrain, TRL 1.13's chunked loss, TRL 1.16's fused head (each in its own environment), and all logits at once
in torch. Every side is a process kept alive; calls are interleaved (A, B, C, A, B, C, …) after warm-up calls. Both
gradients are included; the device is waited for before and after. Memory is the highest allocation over what the inputs
take.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import device
import peers
from common import Late, Worker, note, save, table

NAMES = {
    "ours": "posttrain",
    "trl-1.13.0": "TRL 1.13 chunked loss",
    "trl-1.16.0": "TRL 1.16 fused head",
    "full": "all logits at once",
}
CASES = {
    "chunk": {"tokens": 256, "masked": 0.0},
    "batch": {"tokens": 16384, "masked": 0.25},
}


def job(args: argparse.Namespace, side: str, case: str) -> dict[str, Any]:
    shape = {"vocab": 248320, "hidden": 2048, **CASES[case]}
    if args.tiny:
        shape |= {"vocab": 512, "hidden": 32, "tokens": 64}
    dtype = "fp32" if args.device == "cpu" else "bf16"
    return {"side": side, "case": dtype, "device": args.device, "threads": args.threads, "seed": args.seed, **shape}


def measure(args: argparse.Namespace, case: str) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {side: {"ms": [], "peak_mib": 0.0} for side in args.sides}
    workers: dict[str, Worker] = {}
    try:
        for side in args.sides:
            python = peers.interpreter(side, args.peer_root)
            try:
                workers[side] = Worker(python, "head_worker.py", job(args, side, case), args.limit)
            except (RuntimeError, Late) as error:
                results[side]["failed"] = str(error)
        for number in range(args.rounds + args.warmup):
            note(f"{case}, round {number}")
            for side in list(workers):
                try:
                    answer = workers[side].ask("run")
                except (RuntimeError, Late) as error:  # out of memory ends the process
                    results[side]["failed"] = str(error)
                    del workers[side]
                    continue
                results[side]["loss"], results[side]["peak_mib"] = answer["loss"], answer["peak_mib"]
                if number >= args.warmup:
                    results[side]["ms"].append(1000 * answer["seconds"])
    finally:
        for worker in workers.values():
            worker.close()
    return results


def shown(results: dict[str, dict[str, Any]]) -> str:
    mine = statistics.median(results["ours"]["ms"]) if results.get("ours", {}).get("ms") else None
    rows = []
    for side, result in results.items():
        if not result["ms"]:
            rows.append([NAMES[side], result.get("failed", "no run"), "", "", "", ""])
            continue
        median = statistics.median(result["ms"])
        spread = f"{min(result['ms']):.2f}–{max(result['ms']):.2f}"
        ratio = f"{median / mine:.2f}×" if mine else ""
        rows.append([NAMES[side], f"{median:.2f}", spread, ratio, f"{result['peak_mib']:.0f}", f"{result['loss']:.5f}"])
    return table(["", "ms (median)", "range", "posttrain is faster by", "peak MiB", "loss"], rows)


def main() -> None:
    parser = device.parser(__doc__ or "", "cuda-head")
    parser.add_argument("--sides", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    args = parser.parse_args()
    device.check(args)
    found = device.info(args.device)
    print(f"{device.describe(found)}\n{device.ANCHOR}\n", flush=True)
    result: dict[str, Any] = {"machine": found, "cases": {}}
    for case in args.cases:
        result["cases"][case] = measure(args, case)
        print(
            f"**{case}: {job(args, 'ours', case)['tokens']:,} tokens**\n\n{shown(result['cases'][case])}\n", flush=True
        )
    if args.save:
        note(f"saved {save(args.save, result)}")


if __name__ == "__main__":
    main()
