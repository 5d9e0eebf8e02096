"""What `make demo` runs: measure, fine-tune with the `posttrain` command, measure again, compare."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

# Read by transformers when it is imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import model
import score

ROOT = Path(__file__).parent.parent
OUTPUT = ROOT / "runs" / "demo"
# What counts as learned: this share of the notes more than before.
GAIN = 0.4
INTRO = """\
posttrain demo: SmolLM2-135M-Instruct learns to turn calendar notes into JSON.

  1. prepare the model (about a minute, once)
  2. measure it on held-out notes: other sentences, events, people and places than in training
  3. fine-tune it: posttrain sft --config demo/sft.yaml
  4. measure it again

It takes minutes on a laptop's CPU, needs about 4 GB of memory, and no network.
"""


def heading(text: str) -> None:
    print(f"\n== {text}", flush=True)


def quiet() -> None:
    """The demo prints its own progress."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def measure(path: Path, rows: list[score.Row]) -> tuple[score.Score, list[str]]:
    started = time.monotonic()
    result, answers = score.measure(path, rows)
    print(f"{result}   ({time.monotonic() - started:.0f} s)", flush=True)
    return result, answers


def train(path: Path) -> None:
    """Run the command as a user would, with its own progress bar on this terminal."""
    command = ["posttrain", "sft", "--config", "demo/sft.yaml", "--model_name_or_path", str(path)]
    print(f"$ {shlex.join(command)}", flush=True)
    started = time.monotonic()
    program = Path(sys.executable).with_name("posttrain")
    code = subprocess.run([program, *command[1:]], cwd=ROOT).returncode
    if code:
        sys.exit(f"demo: training failed with exit code {code}; its message is above")
    print(f"trained in {time.monotonic() - started:.0f} s, start-up included")


def show(rows: list[score.Row], before: list[str], after: list[str], count: int = 3) -> None:
    for row, old, new in list(zip(rows, before, after, strict=True))[:count]:
        print(f"\nnote      {row.note}")
        print(f"before    {' '.join(old.split())}")
        print(f"after     {new}")
        print(f"expected  {json.dumps(row.expected, ensure_ascii=False)}")


def main() -> None:
    print(INTRO)
    heading("1. prepare the model")
    path = model.prepare()
    print(path)
    quiet()
    rows = score.read_rows()
    heading(f"2. before, on {len(rows)} held-out notes")
    before, answers_before = measure(path, rows)
    heading("3. fine-tune")
    train(path)
    heading(f"4. after, on the same {len(rows)} notes")
    after, answers_after = measure(OUTPUT, rows)
    show(rows, answers_before, answers_after)
    heading("result")
    print(f"all fields right: before {before.exact:.1%}, after {after.exact:.1%}")
    print(f"the model is in {OUTPUT.relative_to(ROOT)}")
    if after.exact - before.exact < GAIN:
        sys.exit(f"demo: not a real improvement; a gain of at least {GAIN:.0%} was expected")


if __name__ == "__main__":
    main()
