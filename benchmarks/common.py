"""What the benchmarks share: the machine, worker processes, tables and result files. Standard library only."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WORKERS = HERE / "workers"
RESULTS = HERE / "results"

PROBE = """
import json, time, torch
torch.set_num_threads({threads})
def peak(dtype, n, seconds):
    a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
    torch.nn.functional.linear(a, b)
    best, begin = float("inf"), time.perf_counter()
    while time.perf_counter() - begin < seconds:
        start = time.{clock}()
        torch.nn.functional.linear(a, b)
        best = min(best, time.{clock}() - start)
    return 2 * n**3 / best / 1e9
native = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
print(json.dumps({{
    "native_bf16": native,
    "torch": torch.__version__,
    "capability": torch.backends.cpu.get_cpu_capability(),
    "fp32_gflops": peak(torch.float32, 2048, 4),
    "bf16_gflops": peak(torch.bfloat16, 2048 if native else 256, 4),
}}))
"""


def environment(threads: int, device: str = "cpu") -> dict[str, str]:
    """What every worker of every side runs under."""
    return {
        **os.environ,
        **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}),
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }


def machine(threads: int, clock: str = "wall") -> dict[str, Any]:
    """The processor, and the best rate its matrix products reach here: the denominator of every utilisation printed."""
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            PROBE.format(threads=threads, clock="process_time" if clock == "cpu" else "perf_counter"),
        ],
        env=environment(threads),
        capture_output=True,
        text=True,
        check=True,
    )
    name = platform.processor()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "threads": threads,
        "load": os.getloadavg()[0],
        "commit": commit(),
        **json.loads(run.stdout.splitlines()[-1]),
    }


def commit() -> str:
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True)
    dirty = subprocess.run(["git", "status", "--porcelain", "../posttrain"], cwd=HERE, capture_output=True, text=True)
    return run.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")


def describe(info: dict[str, Any]) -> str:
    bf16 = "native bf16" if info["native_bf16"] else "no native bf16"
    return (
        f"{info['cpu']} ({info['capability']}, {bf16}), {info['threads']} of {info['cores']} cores, "
        f"torch {info['torch']}, measured peak {info['fp32_gflops']:.0f} GFLOP/s fp32 "
        f"and {info['bf16_gflops']:.1f} bf16, load {info['load']:.1f} at the start, posttrain {info['commit']}"
    )


CLOCKS = {"wall": "seconds", "cpu": "cpu_seconds"}  # the name a worker gives each


class Late(Exception):
    """A worker did not answer in time."""


class Worker:
    """A process that answers one line of JSON to each line it is sent."""

    def __init__(self, python: Path | str, script: str, job: dict[str, Any], limit: float) -> None:
        self.limit = limit
        self.process = subprocess.Popen(
            [str(python), str(WORKERS / script), json.dumps(job)],
            env=environment(job["threads"], job.get("device", "cpu")),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._pump, daemon=True).start()
        self._answer(300)

    def _pump(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def _answer(self, limit: float) -> dict[str, Any]:
        while True:
            try:
                line = self.lines.get(timeout=limit)
            except queue.Empty:
                self.close()
                raise Late(f"no answer in {limit:.0f} s") from None
            if not line:
                raise RuntimeError(f"the worker ended with status {self.process.wait()}")
            if line.startswith("{"):
                return json.loads(line)

    def ask(self, command: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self._answer(self.limit)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def run_once(python: Path | str, script: str, job: dict[str, Any], limit: float) -> dict[str, Any]:
    """One process, one answer: the last line it prints. {"failed": why} when there is none."""
    try:
        run = subprocess.run(
            [str(python), str(WORKERS / script), json.dumps(job)],
            env=environment(job["threads"], job.get("device", "cpu")),
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"more than {limit:.0f} s"}
    if run.returncode:
        return {"failed": (run.stderr.strip().splitlines() or ["no message"])[-1][:200]}
    return json.loads(run.stdout.strip().splitlines()[-1])


def table(header: list[str], rows: list[list[str]]) -> str:
    """A markdown table: the first column to the left, the others to the right."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def add_run_arguments(
    parser: argparse.ArgumentParser, name: str, threads: int = 2, limit: float = 900, clock: bool = True
) -> None:
    """How runs are made and where their result goes; `name` is that of its file."""
    parser.add_argument("--threads", type=int, default=threads)
    if clock:
        parser.add_argument(
            "--clock", choices=list(CLOCKS), default="wall", help="cpu: for a busy machine, --threads 1"
        )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=limit, help="seconds after which a run is given up")
    parser.add_argument("--save", default=name, help="name of the result file; empty: none")


def save(name: str, result: dict[str, Any]) -> Path:
    path = Path(name) if "/" in name else RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def note(text: str) -> None:
    """Progress, apart from the result on stdout."""
    print(text, file=sys.stderr, flush=True)
