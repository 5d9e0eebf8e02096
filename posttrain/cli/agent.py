"""The process between `posttrain sft` and its workers: `accelerate launch`, called with what the fields say.

`python -m posttrain.cli.agent ORDER COMMAND ARGS…`, where ORDER is the JSON that `launch.launch` writes.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.cli.launch import FOLDER, PASSED, read_config, tie_to_parent

_CPU = "MULTI_CPU"


def choose_config(asked: Mapping[str, Any], devices: int) -> Path:
    """The configuration asked for, else the one for this machine."""
    if asked.get("accelerate_config"):
        return Path(asked["accelerate_config"])
    ids = asked.get("gpu_ids")
    processes = asked.get("num_processes") or (devices if ids is None else len(str(ids).split(",")))
    is_one = processes == 1 and (asked.get("num_machines") or 1) == 1
    return FOLDER / f"{'cpu' if not devices else 'single' if is_one else 'multi_gpu'}.yaml"


def accelerate_args(asked: Mapping[str, Any], config: Mapping[str, Any], path: Path, devices: int) -> list[str]:
    """The flags of `accelerate launch`. What was asked for wins over the file.

    e.g. {"num_processes": 2}, cpu.yaml, 0 devices -> --config_file cpu.yaml --num_processes 2 --num_machines 1
    --main_process_port 0 --multi_gpu
    """
    machines = asked.get("num_machines") or config.get("num_machines") or 1
    ids = str(asked.get("gpu_ids") or config.get("gpu_ids") or "all")
    visible = devices if ids == "all" else len(ids.split(","))
    uses_cpu = bool(config.get("use_cpu"))
    processes = (
        asked.get("num_processes") or config.get("num_processes") or machines * ((not uses_cpu and visible) or 1)
    )
    flags = {
        "config_file": path,
        "num_processes": processes,
        "num_machines": machines,
        "machine_rank": asked.get("machine_rank"),
        "main_process_ip": asked.get("main_process_ip"),
        "main_process_port": asked.get("main_process_port"),
        "gpu_ids": asked.get("gpu_ids"),
        "num_cpu_threads_per_process": asked.get("num_cpu_threads_per_process"),
    }
    if machines == 1 and not (flags["main_process_port"] or config.get("main_process_port")):
        flags["main_process_port"] = 0  # a free one: two runs on one machine must not meet
    given = [text for name, value in flags.items() if value is not None for text in (f"--{name}", str(value))]
    # For several processes on CPUs accelerate would call mpirun; its torchrun path does the same without.
    return [*given, "--multi_gpu"] if config["distributed_type"] == _CPU and processes > 1 else given


def run(asked: Mapping[str, Any], command: Sequence[str]) -> int:
    """Launch and wait. Returns the exit code of the first process that failed, else 0."""
    import torch

    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    path = choose_config(asked, devices)
    config = read_config(path)
    if config.get("use_cpu"):
        os.environ["ACCELERATE_USE_CPU"] = "true"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    precision = config.get("mixed_precision", "bf16")
    if precision not in ("bf16", None):
        print(f"mixed_precision ({precision}) of {path} is not read; `bf16` and `fp16` of the command decide.")
    with tempfile.TemporaryDirectory(prefix="posttrain_") as folder:
        # torchrun leaves its own folder behind.
        flags = [*accelerate_args(asked, config, path, devices), "--log_dir", folder]
        return _launch([*flags, "-m", "posttrain.cli", *command], path)


def _launch(line: list[str], path: Path) -> int:
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # The processes print their own errors, once each; this would print them a second time, in a table.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        launch_command(launch_command_parser().parse_args(line))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return _ended(failure.exitcode, f"rank {rank}")
    except subprocess.CalledProcessError as error:
        return _ended(error.returncode, "the process")
    except SignalException as error:
        return 128 + error.sigval.value
    except (ValueError, KeyError, TypeError, ImportError, OSError, RuntimeError) as error:
        print(f"posttrain: error: accelerate refuses {path}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _ended(code: int, who: str) -> int:
    if code >= 0:
        return code
    if -code not in (signal.SIGTERM, signal.SIGINT):
        name = signal.Signals(-code).name
        hint = "; the system may have run out of memory" if -code == signal.SIGKILL else ""
        print(f"posttrain: error: {who} was ended by {name}{hint}.", file=sys.stderr)
    return 128 - code


def _pass_on(number: int, _: Any) -> None:
    """For a single process, which accelerate starts without torchrun and so without its handling of signals."""
    import psutil

    for child in psutil.Process().children():
        child.send_signal(number)


def main(argv: Sequence[str]) -> int:
    order = json.loads(argv[0])
    for number in PASSED:
        signal.signal(number, _pass_on)
    # How long torchrun lets the processes save after a signal, in seconds; its own 30 are few for a large model.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    tie_to_parent(signal.SIGTERM, order["parent"])
    return run(order["asked"], argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
