"""How long until something happens: help, import, first optimizer step, against TRL.

python benchmarks/startup.py [--peer-root DIR] [--model DIR]

Commands of the sides are interleaved; the first round, which fills the page cache, is left out of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import peers
import rows as data
from common import describe, environment, machine, note, run_once, save, table

NAMES = {"ours": "posttrain", "trl-1.13.0": "TRL 1.13", "trl-1.16.0": "TRL 1.16"}


def commands(side: str, python: Path) -> dict[str, list[str]]:
    library = "posttrain" if side == "ours" else "trl"
    return {
        "--help": [str(python.parent / library), "--help"],
        "sft --help": [str(python.parent / library), "sft", "--help"],
        f"import {library}": [str(python), "-c", f"import {library}"],
        "import SFTTrainer": [str(python), "-c", f"from {library} import SFTConfig, SFTTrainer"],
    }


def seconds(command: list[str], threads: int) -> float | None:
    start = time.perf_counter()
    run = subprocess.run(command, env=environment(threads), capture_output=True, timeout=300)
    return time.perf_counter() - start if run.returncode == 0 else None


def first_step(python: Path, args: argparse.Namespace, side: str, rows: Path) -> float | None:
    config: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    if not args.bf16:
        config["bf16"] = False
    job = {"side": side, "model": args.model, "rows": str(rows), "config": config, "lora": 0, "threads": args.threads}
    answer = run_once(python, "startup_worker.py", {**job, "started": time.time()}, 300)
    if "failed" in answer:
        note(f"{side}: {answer['failed']}")
    return answer.get("first_step")


def measure(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {side: {} for side in args.sides}
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        rows.write_text(json.dumps([row[:16] for row in data.varied(2, 0)]))
        for number in range(args.rounds + 1):
            for side in args.sides:
                note(f"round {number}, {side}")
                python = peers.interpreter(side, args.peer_root)
                values = {name: seconds(c, args.threads) for name, c in commands(side, python).items()}
                values["first optimizer step"] = first_step(python, args, side, rows)
                for name, value in values.items():
                    key = name.replace("import trl", "import the library").replace(
                        "import posttrain", "import the library"
                    )
                    if value is not None and number:
                        found[side].setdefault(key, []).append(value)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peers.add_arguments(parser)
    cache = Path(os.environ.get("POSTTRAIN_CACHE", "~/.cache/posttrain")).expanduser()
    parser.add_argument("--model", default=str(cache / "smollm2-135m-instruct"), help="made by demo/model.py")
    parser.add_argument("--sides", nargs="+", default=list(NAMES), choices=list(NAMES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save", default="startup", help="name of the result file; empty: none")
    args = parser.parse_args()
    info = machine(args.threads)
    args.bf16 = info["native_bf16"]
    print(describe(info) + "\n", flush=True)
    found = measure(args)
    names = list(dict.fromkeys(name for values in found.values() for name in values))
    out = [
        [name, *(f"{statistics.median(found[s][name]):.2f}" if name in found[s] else "failed" for s in args.sides)]
        for name in names
    ]
    print(table(["seconds (median)", *(NAMES[s] for s in args.sides)], out))
    if args.save:
        note(f"saved {save(args.save, {'machine': info, 'seconds': found})}")


if __name__ == "__main__":
    main()
