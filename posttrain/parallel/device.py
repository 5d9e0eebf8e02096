"""What the device can multiply, and how the host keeps its memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools

import torch


@functools.cache
def native_bf16() -> bool:
    """Whether the device multiplies bfloat16 in hardware (tensor cores, AMX, AVX512-BF16)."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.accelerator.is_available():
        return True
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # <malloc.h>


def keep_freed_memory() -> None:
    """Have glibc keep freed blocks for the next allocation. As it comes, it gives every large block back to the kernel
    and faults it in again, page by page: in training on a CPU that is each activation of each layer. Other C libraries
    are left alone."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        libc = ctypes.CDLL(None)
        for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 64 << 20)):
            libc.mallopt(option, value)
