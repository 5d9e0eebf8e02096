"""Checkpoints of a trainer whose weights are sharded, and of any trainer that resumes from one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from posttrain.model.adapter_weights import saved_tensors, tied_names
from posttrain.model.adapters import is_adapted
from posttrain.model.saved import is_saved_otherwise, restore_weights
from posttrain.parallel.training_state import (
    has_shards,
    load_optimizer_state,
    load_shard_weights,
    load_shards,
    load_weight_files,
    save_shards,
    whole_optimizer_state,
)


def writes_shards(trainer: Any) -> bool:
    """Whether checkpoints are one part a rank (`state_dict_type: SHARDED_STATE_DICT`), not whole files."""
    return trainer.is_fsdp_enabled and "SHARDED" in str(trainer.accelerator.state.fsdp_plugin.state_dict_type)


def save_training(trainer: Any, folder: str) -> None:
    """Optimizer and schedule of an FSDP2 run; sharded, the weights too."""
    os.makedirs(folder, exist_ok=True)
    if writes_shards(trainer):
        save_shards(folder, trainer.model, trainer.optimizer, is_adapted(trainer.model))
    else:
        state = whole_optimizer_state(trainer.optimizer)
        if trainer.args.should_save:
            torch.save(state, Path(folder) / "optimizer.pt")
    if trainer.args.should_save:
        torch.save(trainer.lr_scheduler.state_dict(), Path(folder) / "scheduler.pt")


def load_training(trainer: Any, folder: str) -> None:
    """What `save_training` wrote, or what one process or DDP did."""
    if has_shards(folder):
        load_shards(folder, trainer.model, trainer.optimizer, is_adapted(trainer.model))
    else:
        state = torch.load(Path(folder) / "optimizer.pt", map_location="cpu", weights_only=True)
        load_optimizer_state(trainer.optimizer, state)
    trainer.lr_scheduler.load_state_dict(torch.load(Path(folder) / "scheduler.pt", weights_only=True))


def load_weights(trainer: Any, folder: str) -> bool:
    """Weights alone. False for adapters in one process or under DDP, and for DeepSpeed: they are upstream's to read."""
    model, adapted = trainer.model, is_adapted(trainer.model)
    if has_shards(folder):
        load_shard_weights(folder, model, adapted)
    elif trainer.is_deepspeed_enabled or (adapted and not trainer.is_fsdp_enabled):
        return False
    elif not adapted and is_saved_otherwise(model):
        restore_weights(model, folder)  # upstream would pass over names it does not know
    else:
        load_weight_files(folder, saved_tensors(model), tied_names(model))
    return True
