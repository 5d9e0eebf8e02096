"""Activation memory: peak memory and tokens a second of each way to keep or recompute, on SmolLM2-135M-Instruct.

python benchmarks/memory.py [--model DIR] [--settings …] [--lora]

Every run is its own process and trains on the same pre-tokenized rows, each optimizer step one micro-batch. Memory is
the highest resident size over what the process held before loading the model: float32 weights, gradients and Adam's
state are in it and are the same for every row of the table. Offload is left out: on a CPU activations are in host
memory already.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import rows as data
from common import CLOCKS, add_run_arguments, describe, machine, note, run_once, save, table

ON: dict[str, Any] = {"gradient_checkpointing": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "full": ON,
    "attention kept": ON | {"activation_checkpointing_policy": "attention"},
    "products kept": ON | {"activation_checkpointing_policy": "matmul"},
    "layers kept in 512 MiB": ON | {"activation_memory_mb": 512},
    "layers kept in 1,024 MiB": ON | {"activation_memory_mb": 1024},
    "off": {"gradient_checkpointing": False},
}


def job(args: argparse.Namespace, path: Path, setting: str, bf16: bool) -> dict[str, Any]:
    config = {"per_device_train_batch_size": args.batch, "bf16": bf16, **SETTINGS[setting]}
    return {
        "side": "ours",
        "model": args.model,
        "rows": str(path),
        "config": config,
        "lora": 16 if args.lora else 0,
        "threads": args.threads,
        "prewarm": True,
    }


def shown(results: dict[str, list[dict[str, Any]]], clock: str) -> str:
    rates, lines = {}, []
    for setting, runs in results.items():
        good = [r for r in runs if "failed" not in r]
        if not good:
            lines.append([setting, runs[0]["failed"], "", "", ""])
            continue
        # The first step measures the layers a budget chooses from, and warms up.
        rates[setting] = statistics.median(
            sum(s["tokens"] for s in r["steps"][1:]) / sum(s[clock] for s in r["steps"][1:]) for r in good
        )
        ratio = f"{rates[setting] / rates['full']:.2f}×" if "full" in rates else ""
        memory = max(r["peak_over_baseline_mib"] for r in good)
        lines.append([setting, f"{rates[setting]:.1f}", ratio, f"{memory:.0f}", f"{good[0]['loss']:.5f}"])
    return table(["checkpointing", "tokens/s", "of full", "peak MiB", "loss"], lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path(os.environ.get("POSTTRAIN_CACHE", "~/.cache/posttrain")).expanduser()
    parser.add_argument("--model", default=str(cache / "smollm2-135m-instruct"), help="made by demo/model.py")
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--lora", action="store_true", help="rank 16 on every linear layer instead of all weights")
    parser.add_argument("--dtype", choices=["auto", "bf16", "fp32"], default="auto")
    parser.add_argument("--batch", type=int, default=8, help="rows of a step")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--median", type=int, default=200, help="length of the rows")
    parser.add_argument("--repeat", type=int, default=1, help="repetitions, interleaved")
    add_run_arguments(parser, "memory")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error(f"--steps is {args.steps}: the first is left out, so at least 2 are needed")
    return args


def main() -> None:
    args = arguments()
    info = machine(args.threads, args.clock)
    bf16 = info["native_bf16"] if args.dtype == "auto" else args.dtype == "bf16"
    rows = data.varied(args.batch * args.steps, args.seed, median=args.median)
    print(describe(info), flush=True)
    print(
        f"{'bf16' if bf16 else 'fp32'}, {'LoRA' if args.lora else 'all weights'}, {args.steps} steps of {args.batch} "
        f"rows, {sum(map(len, rows))} tokens, {args.clock} clock, repetitions {args.repeat}\n",
        flush=True,
    )
    results: dict[str, list[dict[str, Any]]] = {setting: [] for setting in args.settings}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        path.write_text(json.dumps(rows))
        for repetition in range(args.repeat):
            for setting in args.settings:
                note(f"{setting}, repetition {repetition + 1}")
                run = run_once(sys.executable, "sft_worker.py", job(args, path, setting, bf16), args.limit)
                results[setting].append(run)
    print(shown(results, CLOCKS[args.clock]), flush=True)
    if args.save:
        note(f"saved {save(args.save, {'machine': info, 'bf16': bf16, 'lora': args.lora, 'runs': results})}")


if __name__ == "__main__":
    main()
