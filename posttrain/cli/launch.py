"""`--num_processes`, `--accelerate_config` and their kin: the same command again, once per process.

posttrain sft …                         reads and checks the fields, imports nothing heavy, waits, passes signals on
└── python -m posttrain.cli.agent …     `accelerate launch`, told what the fields say
    └── python -m posttrain.cli sft …   one a process, with the training flags alone
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from posttrain.cli.coerce import parse_yaml
from posttrain.errors import ConfigError, suggest

FOLDER = Path(__file__).with_name("accelerate_configs")
# Set in the processes we launch, so that they pass over the launch keys of the file they share with us. A single one
# has no RANK to know by.
LAUNCHED = "POSTTRAIN_LAUNCHED"
# The command as its user wrote it, launch flags included: JSON, for the record of the run.
COMMAND = "POSTTRAIN_COMMAND"
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_ONE_PROCESS = "NO"
_TYPES = (_ONE_PROCESS, "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_HPU", "MULTI_MUSA")
_TYPES += ("FSDP", "DEEPSPEED")
# Flags of `accelerate launch` that people write, and what says it here.
SPELT_HERE = {
    "config_file": "--accelerate_config FILE",
    "multi_gpu": "--accelerate_config multi_gpu",
    "use_fsdp": "--accelerate_config fsdp2",
    "use_deepspeed": "--accelerate_config zero1, zero2 or zero3",
    "zero_stage": "--accelerate_config zero1, zero2 or zero3",
    "deepspeed_config_file": "--deepspeed FILE",
    "cpu": "--accelerate_config cpu",
    "nproc_per_node": "--num_processes N (over all machines)",
    "nnodes": "--num_machines N",
    "node_rank": "--machine_rank N",
    "master_addr": "--main_process_ip IP",
    "master_port": "--main_process_port PORT",
    "dynamo_backend": "--torch_compile",
}


@dataclass
class LaunchArguments:
    """How many processes run the command, and how they are set up. Any of these but `mixed_precision` starts the
    command again under `accelerate launch`."""

    accelerate_config: str | None = None
    """One of single, multi_gpu, fsdp2, zero1, zero2, zero3, cpu, or a YAML file that `accelerate config` wrote. Unset:
    multi_gpu, or cpu on a machine without an accelerator."""
    num_processes: int | None = None
    """Processes over all machines. Unset: what the file says, else one for each device of each machine."""
    num_machines: int | None = None
    """Machines that take part. Unset: what the file says, else 1."""
    machine_rank: int | None = None
    """Which of the machines this one is, from 0."""
    main_process_ip: str | None = None
    """Address of the machine of rank 0."""
    main_process_port: int | None = None
    """Port of the machine of rank 0. Unset: a free one on one machine, 29500 on several."""
    gpu_ids: str | None = None
    """Devices to use on this machine, such as 0,1. Unset: all."""
    num_cpu_threads_per_process: int | None = None
    """Threads of each process. Unset: OMP_NUM_THREADS, else 1; on CPUs the cores divided by the processes."""
    mixed_precision: Literal["no", "fp16", "bf16"] | None = None
    """Another way to write `bf16` and `fp16`; starts nothing."""


# Signals that reach every process of a run. SLURM sends SIGUSR1 ahead of time when asked to.
PASSED = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if name in dir(signal)]
# Those that start processes.
OPTIONS = tuple(field.name for field in fields(LaunchArguments) if field.name != "mixed_precision")


# What is asked for


def choose_precision(asked: Mapping[str, Any], config: dict[str, Any]) -> None:
    """Turn `mixed_precision` into fields of the training config."""
    chosen = asked.get("mixed_precision")
    if chosen is None:
        return
    for name in ("bf16", "fp16"):
        if name in config:
            raise ConfigError(f"`mixed_precision` ({chosen!r}) and `{name}` ({config[name]}) are both set; keep one.")
    config |= {"bf16": chosen == "bf16", "fp16": chosen == "fp16"}


def is_asked_for(asked: Mapping[str, Any], on_the_line: Sequence[str]) -> bool:
    """Whether the command must be started again. Under a launcher it never is: a flag is then an error, a key of the
    file is passed over with a word."""
    if not asked or LAUNCHED in os.environ:
        return False
    seen = [name for name in _LAUNCHER_VARIABLES if name in os.environ]
    if not seen:
        return True
    variables = ", ".join(f"{name}={os.environ[name]}" for name in seen)
    if on_the_line:
        raise ConfigError(
            f"`{on_the_line[0]}` is given, and a launcher has already started this process ({variables}); leave it "
            "out, or run the command without torchrun or accelerate."
        )
    if os.environ.get("RANK", "0") == "0":
        print(f"{', '.join(asked)}: not read, since a launcher has already started this process ({variables})")
    return False


def find_config(name: str) -> Path:
    """The file behind `accelerate_config`: a shipped name, or a path."""
    known = sorted(file.stem for file in FOLDER.glob("*.yaml"))
    if name in known:
        return FOLDER / f"{name}.yaml"
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if path.suffix or os.sep in name:
        raise ConfigError(f"`accelerate_config` is {name!r}; there is no such file.")
    raise ConfigError(
        f"`accelerate_config` is {name!r}; expected one of {', '.join(known)}, or a file.{suggest(name, known)}"
    )


def read_config(path: Path) -> dict[str, Any]:
    """The file's keys. Raises `ConfigError` where accelerate would fail later, or run something else in silence."""
    where = f"`accelerate_config` {path}"
    try:
        config = parse_yaml(path.read_text(encoding="utf-8"), where)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: the file cannot be read ({error}).") from error
    if not isinstance(config, dict) or "distributed_type" not in config:
        raise ConfigError(f"{where}: `distributed_type` is missing; write the file with `accelerate config`.")
    environment = config.get("compute_environment", "LOCAL_MACHINE")
    if environment != "LOCAL_MACHINE":
        raise ConfigError(f"{where}: `compute_environment` is {environment!r}; only LOCAL_MACHINE can be launched.")
    dynamo = config.get("dynamo_config") or {}
    backend = dynamo.get("dynamo_backend", config.get("dynamo_backend", "NO"))
    if str(backend).upper() != "NO":
        raise ConfigError(f"{where}: `dynamo_backend` is {backend!r}; set `torch_compile` of the command instead.")
    kind = config["distributed_type"]
    if kind not in _TYPES:
        raise ConfigError(f"{where}: `distributed_type` is {kind!r}; expected one of {', '.join(_TYPES)}.")
    return config


def check(asked: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Refuse numbers that cannot be launched."""
    for name in ("num_processes", "num_machines", "num_cpu_threads_per_process"):
        if asked.get(name) is not None and asked[name] < 1:
            raise ConfigError(f"`{name}` is {asked[name]}; it must be at least 1.")
    processes = asked.get("num_processes") or config.get("num_processes")
    machines = asked.get("num_machines") or config.get("num_machines") or 1
    if config.get("distributed_type") == _ONE_PROCESS and (processes or 1) > 1:
        raise ConfigError(
            f"`num_processes` is {processes}, and this `accelerate_config` is for one process; take multi_gpu or cpu."
        )
    if machines == 1:
        return
    if processes is not None and processes % machines:
        raise ConfigError(f"`num_processes` is {processes}; over {machines} machines it must be a multiple of them.")
    ranks, given = range(machines), {**config, **asked}
    if asked.get("machine_rank", config.get("machine_rank")) not in ranks:
        raise ConfigError(f"`machine_rank` is {given.get('machine_rank')}; expected 0 to {machines - 1}.")
    if not given.get("main_process_ip"):
        raise ConfigError(f"`num_machines` is {machines}; set `main_process_ip` to the address of machine 0.")


# The launch


def launch(command: str, args: Sequence[str], asked: Mapping[str, Any]) -> int:
    """Run `posttrain command args` in the processes asked for; returns the exit code of the first that failed.

    args: the command line without the launch flags.
    """
    name = asked.get("accelerate_config")
    path = find_config(name) if name is not None else None
    check(asked, read_config(path) if path is not None else {})
    order = {"asked": {**asked, "accelerate_config": path and str(path)}, "parent": os.getpid()}
    line = [sys.executable, "-m", "posttrain.cli.agent", json.dumps(order), command, *args]
    return supervise(line, {**os.environ, LAUNCHED: name or "auto"})


def supervise(line: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a process to its end. A signal that ends us goes to it first; a second one kills it.

    Returns its exit code, 128 + n where signal n ended it.
    """
    # A session of its own: Ctrl-C in a terminal then reaches it once, through us.
    child = subprocess.Popen(line, env=dict(environment), start_new_session=True)
    received: list[int] = []

    def pass_on(number: int, _: Any) -> None:
        received.append(number)
        child.send_signal(number if len(received) == 1 else signal.SIGKILL)

    # `nohup` and shells that start jobs in the background have some ignored: leave those.
    passed = [s for s in PASSED if signal.getsignal(s) != signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in passed}
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - code if code < 0 else code


def tie_to_parent(number: int, parent: int | None = None) -> None:
    """Ask Linux for a signal when the parent dies, however it dies; elsewhere do nothing.

    parent: who it must be, where it may have died before we asked.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None).prctl(1, number)  # 1 is PR_SET_PDEATHSIG
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), number)
