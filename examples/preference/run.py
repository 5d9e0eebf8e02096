"""What `make example-preference` runs: SFT on careless answers, DPO and a reward model on pairs, and their measures."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read by transformers when it is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "demo"))

import model  # noqa: E402  demo/model.py

RUNS = "runs/preference"


def run(*command: str) -> None:
    """A command as a user would type it, in the project's folder."""
    print(f"\n$ {shlex.join(command)}", flush=True)
    started = time.monotonic()
    program = sys.executable if command[0] == "python" else str(Path(sys.executable).with_name(command[0]))
    code = subprocess.run([program, *command[1:]], cwd=ROOT).returncode
    if code:
        sys.exit(f"example: {command[0]} ended with exit code {code}; its message is above")
    print(f"({time.monotonic() - started:.0f} s)", flush=True)


def main() -> None:
    here = "examples/preference"
    run("posttrain", "sft", "--config", f"{here}/sft.yaml", "--model_name_or_path", str(model.prepare()))
    run("posttrain", "dpo", "--config", f"{here}/dpo.yaml")
    run("python", f"{here}/compare.py", f"{RUNS}/sft", f"{RUNS}/dpo")
    run("posttrain", "reward", "--config", f"{here}/reward.yaml")
    run(
        "posttrain", "score", "--model_name_or_path", f"{RUNS}/reward",
        "--dataset_name", f"{here}/data/pairs/test.jsonl", "--output_file", f"{RUNS}/rewards.jsonl",
    )  # fmt: skip
    print(f"\nThe curves: posttrain report {RUNS}/dpo {RUNS}/reward")


if __name__ == "__main__":
    main()
