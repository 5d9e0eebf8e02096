"""Supervised fine-tuning of random-weight shapes on one GPU: tokens a second and peak memory, beside TRL.

python benchmarks/cuda/sft.py [--peer-root DIR] [--only Qwen3-0.6B …] [--kinds full lora]
python benchmarks/cuda/sft.py --tiny --device cpu --sides ours      (to try the script)

About 16,384 tokens an optimizer step, in 32 rows of log-normal lengths (median 370, at most 4,096; every token a
target). Every run is its own process: the model is made on the device from its shape, the first steps are left out, and
the device is waited for at the end of each step. Gradient checkpointing is on, everyone's default. Memory is the
highest allocation, weights and optimizer included.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import device
import peers
import rows as data
from common import note, run_once, save, table
from shapes import RUNS, shape

NAMES = {"ours": "posttrain", "trl-1.13.0": "TRL 1.13", "trl-1.16.0": "TRL 1.16"}
ROWS = 32
# How a micro-batch is made. TRL pads; its packing needs a flash-attention package to keep rows apart.
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "ours": {
        "default": {"per_device_train_batch_size": 8},
        "one micro-batch": {"per_device_train_batch_size": ROWS},
        "one micro-batch, layers kept in 8 GiB": {
            "per_device_train_batch_size": ROWS,
            "activation_memory_mb": 8192,
        },
        "one micro-batch, products kept": {
            "per_device_train_batch_size": ROWS,
            "activation_checkpointing_policy": "matmul",
        },
    },
    **{
        side: {
            "default": {"per_device_train_batch_size": 8},
            "2 rows": {"per_device_train_batch_size": 2},
            "grouped by length": {
                "per_device_train_batch_size": 8,
                "train_sampling_strategy": "group_by_length",
            },
        }
        for side in ("trl-1.13.0", "trl-1.16.0")
    },
}


def token_rows(args: argparse.Namespace) -> list[list[int]]:
    count = ROWS * args.steps
    if args.tiny:
        return [[t % 500 + 3 for t in row] for row in data.varied(count, args.seed, median=20, longest=60)]
    return data.varied(count, args.seed, median=370, longest=4096)


def job(args: argparse.Namespace, path: Path, name: str, kind: str, side: str, setting: str) -> dict[str, Any]:
    config = {"max_length": 4096, "logging_steps": 1000, "learning_rate": 1e-5, **SETTINGS[side][setting]}
    config["gradient_accumulation_steps"] = ROWS // config["per_device_train_batch_size"]
    config["bf16"] = args.device == "cuda"
    return {
        "side": side,
        "device": args.device,
        "threads": args.threads,
        "shape": shape(name, args.tiny),
        "rows": str(path),
        "config": config,
        "lora": 16 if kind == "lora" else 0,
        "targets": RUNS[name][kind].get("targets", "all-linear"),
        "dtype": "float32" if args.device == "cpu" else RUNS[name][kind]["dtype"],
    }


def run(args: argparse.Namespace, path: Path, name: str, kind: str, side: str, setting: str) -> dict[str, Any]:
    asked = job(args, path, name, kind, side, setting)
    worker = str(device.HERE / "sft_worker.py")
    result = run_once(peers.interpreter(side, args.peer_root), worker, asked, args.limit)
    if "failed" in result:
        return {"failed": result["failed"]}
    steps = result["steps"][args.warmup :]
    tokens, computed = sum(s["tokens"] for s in steps), sum(s["computed"] for s in steps)
    return {**result, "rate": tokens / sum(s["seconds"] for s in steps), "computed_share": computed / tokens}


def shown(results: dict[str, dict[str, Any]]) -> str:
    best = max((r.get("rate", 0.0) for key, r in results.items() if key.startswith("ours")), default=0.0)
    lines = []
    for key, result in results.items():
        side, setting = key.split("|")
        label = f"{NAMES[side]}, {setting}"
        if "failed" in result:
            lines.append([label, result["failed"][:80], "", "", "", ""])
            continue
        ratio = f"{best / result['rate']:.2f}×" if side != "ours" and best else ""
        memory = f"{result['peak_mib'] / 1024:.1f}"
        share, loss = f"{result['computed_share']:.2f}", f"{result['loss']:.4f}"
        lines.append([label, f"{result['rate']:.0f}", ratio, share, memory, loss])
    header = ["", "real tokens/s", "posttrain's best is faster by", "positions computed per token", "peak GiB", "loss"]
    return table(header, lines)


def main() -> None:
    parser = device.parser(__doc__ or "", "cuda-sft")
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--kinds", nargs="+", choices=["full", "lora"], default=["full", "lora"])
    parser.add_argument("--sides", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--settings", nargs="+", help="only these")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of a run")
    parser.add_argument("--warmup", type=int, default=3, help="of them not measured")
    args = parser.parse_args()
    if args.warmup >= args.steps:
        parser.error(f"--warmup is {args.warmup} and --steps {args.steps}: nothing would be measured")
    device.check(args)
    found = device.info(args.device)
    print(f"{device.describe(found)}\n", flush=True)
    result: dict[str, Any] = {"machine": found, "runs": {}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        path.write_text(json.dumps(token_rows(args)))
        for name in args.only:
            for kind in [k for k in RUNS[name] if k in args.kinds]:
                entries = {}
                for side in args.sides:
                    for setting in [s for s in SETTINGS[side] if not args.settings or s in args.settings]:
                        note(f"{name}, {kind}, {NAMES[side]}, {setting}")
                        entries[f"{side}|{setting}"] = run(args, path, name, kind, side, setting)
                result["runs"][f"{name}|{kind}"] = entries
                print(f"**{name}, {kind}, {RUNS[name][kind]['dtype']} weights**\n\n{shown(entries)}\n", flush=True)
                if args.save:
                    save(args.save, result)


if __name__ == "__main__":
    main()
