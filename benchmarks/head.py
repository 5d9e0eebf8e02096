"""The head alone: loss and both gradients of 2,048 tokens, a quarter of them masked, against TRL's two heads.

python benchmarks/head.py [--peer-root DIR] [--dtype auto bf16 fp32] [--autocast]

Runs of the sides are interleaved (A, B, C, A, B, C, …), each in a process kept alive, after one warm-up each. Memory is
the highest resident size over what the process held before its first call (imports, inputs): both gradients included.
`--dtype auto` follows the processor: bf16 where it multiplies bfloat16 natively; elsewhere fp32, and bf16 with few
tokens, since emulated products take minutes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import peers
from common import CLOCKS, Late, Worker, add_run_arguments, describe, machine, note, save, table

SIDES = ["ours", "trl-1.13.0", "trl-1.16.0"]
NAMES = {
    "ours": "posttrain",
    "trl-1.13.0": "TRL 1.13 chunked loss",
    "trl-1.16.0": "TRL 1.16 fused head",
    "full": "all logits at once",
}
TARGETS = {"trl-1.13.0": 1.8, "trl-1.16.0": 4.0}


def job(args: argparse.Namespace, side: str, case: str, tokens: int) -> dict[str, Any]:
    shape = {"tokens": tokens, "vocab": args.vocab, "hidden": args.hidden, "masked": 0.25}
    more = {"chunk_tokens": args.chunk_tokens} if side == "ours" else {}
    return {"side": side, "case": case, **more, "threads": args.threads, "seed": args.seed, **shape}


def speed(args: argparse.Namespace, case: str, tokens: int) -> dict[str, dict[str, Any]]:
    """Seconds and peak memory of each side. A case cut to few tokens is run once, after a warm-up on fewer."""
    cut = tokens < args.tokens
    results: dict[str, dict[str, Any]] = {side: {"seconds": [], "peak_mib": 0.0} for side in args.sides}
    workers = {}
    try:
        for side in args.sides:
            python = peers.interpreter(side, args.peer_root)
            workers[side] = Worker(python, "head_worker.py", job(args, side, case, tokens), args.limit)
        for number in range((1 if cut else args.rounds) + 1):
            for side in [s for s in args.sides if s in workers]:
                note(f"{case}, round {number}, {side}")
                one(results[side], workers, side, CLOCKS[args.clock], number == 0, cut)
    finally:
        for worker in workers.values():
            worker.close()
    return results


def one(result: dict[str, Any], workers: dict[str, Worker], side: str, clock: str, warmup: bool, cut: bool) -> None:
    try:
        answer = workers[side].ask("run 8" if warmup and cut else "run")
    except Late as late:
        result["failed"] = str(late)
        del workers[side]
        return
    result["loss"] = answer["loss"]
    result["peak_mib"] = max(result["peak_mib"], answer["peak_mib"])
    if not warmup:
        result["seconds"].append(answer[clock])


def errors(args: argparse.Namespace, tokens: int) -> dict[str, dict[str, Any]]:
    """Relative error of bf16 gradients against float64 ones, at fewer tokens: the reference is slow."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reference.pt"
        for side in ["full", *args.sides]:
            note(f"gradient error, {side}")
            worker = Worker(
                peers.interpreter(side, args.peer_root), "head_worker.py", job(args, side, "bf16", tokens), args.limit
            )
            try:
                found[side] = worker.ask(f"error {path}")
            except Late as late:
                found[side] = {"failed": str(late)}
            finally:
                worker.close()
    return found


def speed_table(results: dict[str, dict[str, Any]]) -> str:
    mine = results["ours"]
    base = statistics.median(mine["seconds"]) if mine["seconds"] else None
    rows = []
    for side, result in results.items():
        if not result["seconds"]:
            rows.append([NAMES[side], result.get("failed", "no run"), "", "", "", ""])
            continue
        median = statistics.median(result["seconds"])
        ratio = f"{median / base:.2f}×" if base else ""
        wanted = f"{TARGETS[side]}×" if side in TARGETS else ""
        spread = f"{min(result['seconds']):.2f}–{max(result['seconds']):.2f}"
        rows.append([NAMES[side], f"{median:.2f}", spread, ratio, wanted, f"{result['peak_mib']:.0f}"])
    return table(["", "seconds (median)", "range", "posttrain is faster by", "wanted", "peak MiB"], rows)


def error_table(found: dict[str, dict[str, Any]]) -> str:
    rows = []
    for side, values in found.items():
        if "failed" in values:
            rows.append([NAMES[side], values["failed"], ""])
        else:
            rows.append([NAMES[side], f"{values['hidden']:.2e}", f"{values['weight']:.2e}"])
    return table(["bf16 gradients, relative error", "hidden states", "weight"], rows)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peers.add_arguments(parser)
    parser.add_argument("--dtype", choices=["auto", "bf16", "fp32"], default="auto")
    parser.add_argument("--autocast", action="store_true", help="also fp32 inputs under bf16 autocast, as in a trainer")
    parser.add_argument("--emulated-tokens", type=int, default=128, help="in bf16 where only emulated; 0: leave it out")
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=[*SIDES, "full"])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--chunk-tokens", type=int, help="posttrain's chunk; default: its own")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--error-tokens", type=int, help="0: skip the gradient error (default 256, 16 without bf16)")
    add_run_arguments(parser, "head", limit=120)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    info = machine(args.threads, args.clock)
    native = info["native_bf16"]
    few = args.tokens if native else args.emulated_tokens
    cases = {"fp32": args.tokens} if args.dtype == "fp32" or (args.dtype == "auto" and not native) else {}
    if args.dtype != "fp32" and few:
        cases |= {"bf16": few, **({"autocast": few} if args.autocast else {})}
    print(describe(info), flush=True)
    print(
        f"{args.tokens:,} tokens, a quarter masked, H = {args.hidden}, V = {args.vocab}, "
        f"medians of {args.rounds}, {args.clock} clock\n"
    )
    if not native:
        print("This processor has no native bfloat16: the numbers wanted are for bf16, and shown for orientation.\n")
    result: dict[str, Any] = {"machine": info, "tokens": args.tokens, "cases": {}}
    for case, tokens in cases.items():
        result["cases"][case] = {"tokens": tokens, "sides": speed(args, case, tokens)}
        print(f"**{case}, {tokens:,} tokens**\n\n{speed_table(result['cases'][case]['sides'])}\n", flush=True)
    tokens = args.error_tokens if args.error_tokens is not None else (256 if native else 16)
    if tokens:
        result["errors"] = {"tokens": tokens, "sides": errors(args, tokens)}
        print(error_table(result["errors"]["sides"]), flush=True)
    if args.save:
        note(f"saved {save(args.save, result)}")


if __name__ == "__main__":
    main()
