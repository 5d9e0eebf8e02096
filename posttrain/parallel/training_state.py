"""What a sharded run saves to go on from: whole files that any strategy reads, or one part a rank.

Whole: weights as a Hugging Face folder, `optimizer.pt` as one process would write it. Sharded: both in one folder of
`torch.distributed.checkpoint`, read by any number of ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

from posttrain.errors import TrainingError
from posttrain.parallel.params import whole
from posttrain.parallel.ranks import rank, world_size

SHARDS = "pytorch_model_fsdp_0"


def has_shards(folder: str | Path) -> bool:
    return (Path(folder) / SHARDS / ".metadata").is_file()


def save_shards(folder: str | Path, model: nn.Module, optimizer: Any, adapter_only: bool) -> None:
    """Every rank writes its part of the weights and of the optimizer's state. A collective."""
    weights, states = get_state_dict(model, _inner(optimizer), options=_options(adapter_only))
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=str(Path(folder) / SHARDS), no_dist=_alone())


def load_shards(folder: str | Path, model: nn.Module, optimizer: Any, adapter_only: bool) -> None:
    """Read back in place, by any number of ranks, sharded or not. A collective."""
    options = _options(adapter_only)
    weights, states = get_state_dict(model, _inner(optimizer), options=options)
    found = {"model": weights, "optimizer": states}
    dcp.load(found, checkpoint_id=str(Path(folder) / SHARDS), no_dist=_alone())
    set_state_dict(
        model,
        _inner(optimizer),
        model_state_dict=found["model"],
        optim_state_dict=found["optimizer"],
        options=options,
    )


def load_shard_weights(folder: str | Path, model: nn.Module, adapter_only: bool) -> None:
    """The weights alone."""
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad} if adapter_only else set()
    weights = {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}
    dcp.load({"model": weights}, checkpoint_id=str(Path(folder) / SHARDS), no_dist=_alone())


def _alone() -> bool:
    return world_size() == 1


def _options(adapter_only: bool) -> StateDictOptions:
    return StateDictOptions(ignore_frozen_params=adapter_only, strict=not adapter_only)


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """Without accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


@contextlib.contextmanager
def late_errors(engine: Any) -> Iterator[None]:
    """DeepSpeed's ranks wait for each other while they save: what one cannot write is raised after that."""
    writer, failed = engine.checkpoint_engine, []
    own = writer.save

    def save(*args: Any, **kwargs: Any) -> Any:
        try:
            return own(*args, **kwargs)
        except (OSError, RuntimeError) as error:
            failed.append(error)

    writer.save = save
    try:
        yield
    finally:
        del writer.save
    if failed:
        raise failed[0]


# Whole files


def whole_optimizer_state(optimizer: Any) -> dict[str, Any]:
    """The state as one process holds it, complete on rank 0, on the host. A collective."""
    state = optimizer.state_dict()
    kept: dict[int, dict[str, Any]] = {}
    for index, slots in state["state"].items():
        full = {name: whole(value) if isinstance(value, Tensor) else value for name, value in slots.items()}
        if rank() == 0:
            kept[index] = {name: v.cpu() if isinstance(v, Tensor) else v for name, v in full.items()}
    return {**state, "state": kept}


def load_optimizer_state(optimizer: Any, state: dict[str, Any]) -> None:
    """Give each rank its part of a state that one process could have saved."""
    parameters = [p for group in _inner(optimizer).param_groups for p in group["params"]]
    cut = {
        index: {name: _cut(value, parameters[index]) for name, value in slots.items()}
        for index, slots in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": cut})


def load_weight_files(folder: str | Path, targets: Mapping[str, Tensor], shared: frozenset[str]) -> None:
    """Copy a Hugging Face folder's weights into tensors, sharded or not; `shared` names are other names of tensors the
    folder has. Raises `TrainingError` where the folder lacks one."""
    missing = dict(targets)
    with torch.no_grad():
        for path in sorted(Path(folder).glob("*.safetensors")):
            with safe_open(str(path), framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  not a dict
                    if name in missing:
                        fill(missing.pop(name), file.get_tensor(name))
    if lost := sorted(missing.keys() - shared):
        raise TrainingError(
            f"`resume_from_checkpoint`: {folder} lacks {', '.join(lost[:3])} ({len(lost)} tensors in all); the weights "
            "of this model were saved under other names. Resume with the version and strategy that saved it."
        )


def fill(target: Tensor, value: Tensor) -> None:
    """Write a whole tensor into one that may be sharded, in its dtype."""
    target.copy_(_cut(value.to(target.dtype), target))


def _cut(value: Any, like: Tensor) -> Any:
    """This rank's part of a whole tensor, where `like` is sharded and of its shape."""
    if isinstance(value, Tensor) and isinstance(like, DTensor) and value.shape == like.shape:
        device = like.to_local().device
        # Every rank has read the whole: nothing to send.
        return distribute_tensor(value.to(device), like.device_mesh, like.placements, src_data_rank=None)
    return value
