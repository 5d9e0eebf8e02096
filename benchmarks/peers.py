"""The interpreters the benchmarks compare: this one for posttrain, a virtual environment of its own for each peer.

python benchmarks/peers.py      make the environments in .bench/ (needs pip's index)

Elsewhere: `--peer-root DIR` or POSTTRAIN_PEERS=DIR, where DIR/<peer>/bin/python is the interpreter.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS = {"trl-1.13.0": ["trl[peft]==1.13.0"], "trl-1.16.0": ["trl[peft]==1.16.0"]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = os.environ.get("POSTTRAIN_PEERS", str(ROOT / ".bench"))
    parser.add_argument("--peer-root", type=Path, default=Path(default), help=f"folder of environments ({default})")


def interpreter(side: str, root: Path) -> Path:
    """The Python of a side, its environment made when missing."""
    if side not in PEERS:
        return Path(sys.executable)
    python = root / side / "bin" / "python"
    if not python.exists():
        create(side, root)
    return python


def create(side: str, root: Path) -> None:
    print(f"making {root / side}", file=sys.stderr, flush=True)
    venv.create(root / side, with_pip=True)
    # The same torch, transformers and datasets as ours: what is measured is the library, not its dependencies.
    pip = [str(root / side / "bin" / "python"), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    index = os.environ.get("TORCH_INDEX")
    subprocess.run([*pip, *(["--extra-index-url", index] if index else []), "torch"], check=True)
    subprocess.run([*pip, "transformers", "datasets", "accelerate", *PEERS[side]], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    root = parser.parse_args().peer_root
    for side in PEERS:
        print(side, interpreter(side, root))


if __name__ == "__main__":
    main()
