"""What `posttrain env` prints. Nothing that is missing or broken may stop it."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

from posttrain import __version__

_PACKAGES = ("transformers", "accelerate", "datasets", "peft")
_OPTIONAL = ("deepspeed", "vllm", "liger-kernel", "bitsandbytes", "trl")


def report() -> str:
    """One line a fact."""
    rows = [
        ("posttrain", __version__),
        ("python", platform.python_version()),
        ("platform", platform.platform()),
        ("cores", _safely(_cores)),
        ("memory", _safely(_memory)),
        ("torch", _version("torch")),
        *_torch(),
        *((name, _version(name)) for name in (*_PACKAGES, *_OPTIONAL)),
    ]
    return "\n".join(f"{name + ':':<14}{value}" for name, value in rows)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _safely(read: Callable[[], str]) -> str:
    try:
        return read()
    except Exception as error:  # a report of a broken installation is what this command is for
        return f"unknown ({type(error).__name__}: {error})"


def _cores() -> str:
    usable = len(os.sched_getaffinity(0)) if "sched_getaffinity" in dir(os) else os.cpu_count()
    return f"{usable} usable of {os.cpu_count()}"


def _memory() -> str:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{total / 2**30:.1f} GiB"


def _torch() -> Iterator[tuple[str, str]]:
    yield "device", _safely(_device)
    yield "native bf16", _safely(_bf16)


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return ", ".join(f"{item.name} ({item.total_memory / 2**30:.0f} GiB)" for item in names)
    if torch.accelerator.is_available():
        return str(torch.accelerator.current_accelerator())
    return f"cpu ({torch.get_num_threads()} threads)"


def _bf16() -> str:
    from posttrain.parallel.device import native_bf16

    return "yes" if native_bf16() else "no"
