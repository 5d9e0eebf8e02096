"""What the device can multiply."""

from __future__ import annotations

import torch


def native_bf16() -> bool:
    """Whether the device multiplies bfloat16 in hardware (tensor cores, AMX, AVX512-BF16)."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.accelerator.is_available():
        return True
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
