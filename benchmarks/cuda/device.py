"""What the benchmarks of this folder share: where `benchmarks/` is, the device and its description."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import peers  # noqa: E402
from common import add_run_arguments, commit  # noqa: E402

ANCHOR = "TRL's own numbers for the head's chunk on an H100: 23.37 ms before its fused head, 3.86 ms with it"


def parser(doc: str, save: str) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    peers.add_arguments(found)
    found.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: with --tiny, to try the script")
    found.add_argument("--tiny", action="store_true", help="small shapes: the numbers mean nothing")
    add_run_arguments(found, save, threads=8, clock=False)
    return found


def check(args: argparse.Namespace) -> None:
    """End with one line when the device is missing, before any work."""
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device is visible; to try the script: --tiny --device cpu")
    if args.tiny and args.save:
        args.save = ""  # tiny numbers are never a result


def info(device: str) -> dict[str, Any]:
    import torch

    found = {"device": device, "torch": torch.__version__, "cuda": torch.version.cuda, "commit": commit()}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "memory_gib": properties.total_memory / 2**30}
    return found


def describe(found: dict[str, Any]) -> str:
    name = f"{found['gpu']}, {found['memory_gib']:.0f} GiB, CUDA {found['cuda']}" if "gpu" in found else "CPU"
    return f"{name}, torch {found['torch']}, posttrain {found['commit']}"
