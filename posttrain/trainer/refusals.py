"""Fields of the base class that this version would ignore, or get wrong in a packed row: refused by name."""

from __future__ import annotations

import importlib.util
from typing import Any

from posttrain.errors import ConfigError, MissingExtraError
from posttrain.trainer.config import BaseConfig


def _splits_model(parallelism: Any) -> bool:
    sizes = ("tp_size", "cp_size", "sp_size")
    return parallelism is not None and any((getattr(parallelism, name, 1) or 1) > 1 for name in sizes)


def refuse_unsupported(args: BaseConfig) -> None:
    """Fields of the base class that would be ignored, or would be wrong in a packed row."""
    wrong = {
        "label_smoothing_factor": args.label_smoothing_factor != 0,
        "auto_find_batch_size": args.auto_find_batch_size,
        "ignore_data_skip": args.ignore_data_skip,
        "split_batches": bool(getattr(args.accelerator_config, "split_batches", False)),
        "parallelism_config": _splits_model(args.parallelism_config),
        "include_for_metrics": bool(args.include_for_metrics),
        "batch_eval_metrics": args.batch_eval_metrics,
        "bf16_full_eval": args.bf16_full_eval,
        "fp16_full_eval": args.fp16_full_eval,
        "dispatch_batches": bool(getattr(args.accelerator_config, "dispatch_batches", None)),
    }
    if args.use_liger_kernel and importlib.util.find_spec("liger_kernel") is None:
        raise MissingExtraError(
            "`use_liger_kernel` is on and liger-kernel is not installed; pip install 'posttrain[liger]'."
        )
    if args.torch_compile and args.deepspeed:
        raise ConfigError("`torch_compile` and `deepspeed` are both set: its hooks sit inside the layers; drop one.")
    for name, bad in wrong.items():
        if bad:
            raise ConfigError(f"`{name}` is set, and this version does not support it; leave it out.")
