"""Fields of the base class that this version would ignore, or get wrong in a packed row: refused by name."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError, MissingExtraError
from posttrain.model.head import is_known, output_head
from posttrain.model.recurrent import mixers
from posttrain.model.rope import varying_rope
from posttrain.parallel.ranks import world_size
from posttrain.parallel.strategy import Strategy
from posttrain.trainer.config import BaseConfig
from posttrain.trainer.folder import writing


def _splits_model(parallelism: Any) -> bool:
    sizes = ("tp_size", "cp_size", "sp_size")
    return parallelism is not None and any((getattr(parallelism, name, 1) or 1) > 1 for name in sizes)


def refuse_unsupported(args: BaseConfig) -> None:
    """Fields of the base class that would be ignored, or would be wrong in a packed row."""
    accelerator: Any = args.accelerator_config
    wrong = {
        "label_smoothing_factor": args.label_smoothing_factor != 0,
        "auto_find_batch_size": args.auto_find_batch_size,
        "ignore_data_skip": args.ignore_data_skip,
        "split_batches": bool(accelerator.split_batches),
        "parallelism_config": _splits_model(args.parallelism_config),
        "include_for_metrics": bool(args.include_for_metrics),
        "batch_eval_metrics": args.batch_eval_metrics,
        "bf16_full_eval": args.bf16_full_eval,
        "fp16_full_eval": args.fp16_full_eval,
        "average_tokens_across_devices": not args.average_tokens_across_devices,
        "dataloader_in_order": not args.dataloader_in_order,
        "sync_each_batch": bool((accelerator.gradient_accumulation_kwargs or {}).get("sync_each_batch")),
        "dispatch_batches": bool(accelerator.dispatch_batches),
    }
    if args.use_liger_kernel and importlib.util.find_spec("liger_kernel") is None:
        raise MissingExtraError(
            "`use_liger_kernel` is on and liger-kernel is not installed; pip install 'posttrain[liger]'."
        )
    if args.should_save and args.output_dir is not None:
        with writing(Path(args.output_dir)):  # the base class makes it next
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    for name, bad in wrong.items():
        if bad:
            raise ConfigError(f"`{name}` is set, and this version does not support it; leave it out.")


def refuse_combinations(args: BaseConfig, base: Any, strategy: Strategy, balance: float) -> None:
    """Fields that exclude each other, or the model, under the strategy that runs. `base`: the transformers model."""
    deepspeed = args.deepspeed_plugin is not None
    parted = strategy.sharded and world_size() > 1
    rope = varying_rope(base.config)
    checkpointing: Any = args.activation_checkpointing_kwargs or args.gradient_checkpointing_kwargs or {}
    head = output_head(base)
    wrong = (
        (
            deepspeed and args.torch_compile,
            "`torch_compile` is on under DeepSpeed, whose hooks sit inside the layers; drop one of them",
        ),
        (deepspeed and args.fp16, "`fp16` is on under DeepSpeed, whose scaler overflows by design; set `bf16`"),
        (
            strategy.sharded and args.save_on_each_node,
            "`save_on_each_node` is on and the weights are sharded; give all machines one `output_dir`",
        ),
        (
            parted and rope == "dynamic",
            "`model`: dynamic rotary frequencies take one forward for each length, and ranks with other lengths would "
            "wait for each other's weights; train it with DDP or in one process",
        ),
        (
            parted and deepspeed and bool(mixers(base)),
            "`model`: its token mixers run once for each length, and under ZeRO-3 ranks with other lengths would wait "
            "for each other's weights; use ZeRO-2 or FSDP2",
        ),
        (
            parted and deepspeed and not is_known(head),
            f"`model`: the output projection is a {type(head).__name__}, which takes several forwards under ZeRO-3; "
            "put plain LoRA on it, or use ZeRO-2 or FSDP2",
        ),
        (
            balance > 0 and args.activation_checkpointing and checkpointing.get("use_reentrant"),
            "`router_aux_loss_coef` is set and `use_reentrant` is on in the checkpointing kwargs: the balance loss "
            "would train nothing; turn one of them off",
        ),
    )
    for bad, text in wrong:
        if bad:
            raise ConfigError(f"{text}.")
