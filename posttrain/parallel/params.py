"""FSDP2: which weights are sharded together, in which precision, and how they are made whole again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor

from posttrain.errors import ConfigError, ModelError
from posttrain.parallel.ranks import rank, say, world_size

_PASSED_OVER = {
    "min_num_params": "decoder layers are sharded here, one unit each",
    "ignored_modules": "every weight is sharded",
    "mixed_precision_policy": "`bf16` and `fp16` decide the precision: float32 masters and sums, products in half",
}
_COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16}


def fsdp2_plugin(asked: Any, args: Any) -> FullyShardedDataParallelPlugin | None:
    """The plugin a run shards with: the one the arguments made, else the one `accelerate launch` asks for, else None.

    Raises `ConfigError` for FSDP1, and where there is one process.
    """
    by_launcher = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if asked is None and not by_launcher:
        return None
    if world_size() == 1 and asked is None:
        say("FSDP2 was asked for by the launcher, and one process has nothing to shard: it holds all weights")
        return None
    if world_size() == 1:
        raise ConfigError("`fsdp` is on, and there is one process; run with `--num_processes`, or leave `fsdp` out.")
    plugin = asked or FullyShardedDataParallelPlugin()
    if plugin.fsdp_version != 2:
        raise ConfigError(
            f"the launcher asks for FSDP version {plugin.fsdp_version}; only 2 is supported: set `fsdp_version: 2` in "
            "the accelerate file."
        )
    for name, what in _PASSED_OVER.items():
        if getattr(plugin, name) or (args.fsdp_config or {}).get(name):
            raise ConfigError(f"`fsdp_config`: `{name}` is set, and {what}; leave it out.")
    if plugin.auto_wrap_policy is size_based_auto_wrap_policy:
        raise ConfigError(
            "`fsdp_config`: `auto_wrap_policy` is SIZE_BASED_WRAP, and decoder layers are sharded here, one unit each; "
            "leave it out, or set TRANSFORMER_BASED_WRAP."
        )
    if plugin.activation_checkpointing:
        # One way to recompute activations: the trainer's, which the base class would otherwise refuse beside this one.
        plugin.activation_checkpointing, args.activation_checkpointing = False, True
    return plugin


def refuse_fsdp1(args: Any) -> None:
    """Before the plugin is made, which fails for version 1 where there is no GPU."""
    version = (args.fsdp_plugin_args or {}).get("fsdp_version", 2)
    if version != 2:
        raise ConfigError(f"`fsdp_config` asks for FSDP version {version}; only 2 is supported: set `version: 2`.")


def use_fsdp2(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin | None) -> bool:
    """Make accelerate shard with our policy. Returns whether it shards."""
    if plugin is None:
        return False
    state: Any = accelerator.state
    # accelerate leaves several CPU processes out of its list, and would run DDP without a word.
    if state.distributed_type == DistributedType.MULTI_CPU:
        declare(accelerator, DistributedType.FSDP)
        state.fsdp_plugin = plugin
    # Its own sharding finds the optimizer's parameters by address, which empty shards share, and reduces in bf16.
    accelerator._prepare_fsdp2 = lambda *objects: _prepare(accelerator, *objects)
    return True


def declare(accelerator: Accelerator, kind: DistributedType) -> None:
    """Tell accelerate what it runs; each new view of its state copies the type from the process's."""
    PartialState._shared_state["distributed_type"] = accelerator.state.distributed_type = kind


def _prepare(accelerator: Accelerator, *objects: Any) -> tuple[Any, ...]:
    """Shard the model among the objects, and give the optimizer the shards."""
    (model,) = (o for o in objects if isinstance(o, nn.Module))
    names = {id(p): name for name, p in model.named_parameters()}
    shard(model, accelerator)
    shards = dict(model.named_parameters())
    for optimizer in (o for o in objects if isinstance(o, torch.optim.Optimizer)):
        for group in optimizer.param_groups:
            group["params"] = [shards[names[id(p)]] for p in group["params"]]
    if model not in accelerator._models:
        accelerator._models.append(model)
    return tuple(
        accelerator.prepare_optimizer(o) if isinstance(o, torch.optim.Optimizer) else o  # pyright: ignore[reportArgumentType]
        for o in objects
    )


def shard(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Shard a model over the data-parallel ranks, in place: one unit a decoder layer, one for an untied embedding,
    and the root, which keeps the head, the last norm and tied embeddings together.

    Weights and optimizer states keep float32; under mixed precision a unit is gathered and multiplied in bf16, and
    gradients are added up over the ranks in float32. What enters and leaves a module is not rounded.
    """
    if isinstance(model, FSDPModule):
        return model
    plugin: Any = accelerator.state.fsdp_plugin
    compute = _COMPUTE.get(accelerator.mixed_precision)
    if compute is not None:
        for parameter in model.parameters():
            if parameter.requires_grad:  # float32 master weights; one unit cannot train two dtypes
                parameter.data = parameter.data.float()
    enter_computed(model)
    _copy_first_rank(model, accelerator.device)
    whole = {p for p in model.parameters() if not p.is_floating_point()}  # packed 4-bit weights cannot be cut
    for parameter in whole:
        parameter.data = parameter.data.to(accelerator.device)
    common: dict[str, Any] = {
        "mesh": _mesh(accelerator),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=compute,
            reduce_dtype=None if compute is None else torch.float32,
            output_dtype=None,
            cast_forward_inputs=False,
        ),
        "offload_policy": plugin.cpu_offload,
        "ignored_params": whole,
    }
    for unit in _units(model, plugin):
        fully_shard(unit, reshard_after_forward=plugin.reshard_after_forward, **common)
    # The root of a trained model waits gathered for its backward pass; a frozen one has none.
    fully_shard(
        model, reshard_after_forward=None if any(p.requires_grad for p in model.parameters()) else True, **common
    )
    return model


def enter_computed(model: nn.Module) -> None:
    """Copies that peft trains in full (`modules_to_save`) take float32, the dtype of their master weights. Let them
    take the dtype in which a strategy lays these weights out for the forward pass."""
    found = [getattr(module, "modules_to_save", None) for module in model.modules()]  # a model has a set of names
    for copies in (x for x in found if isinstance(x, nn.ModuleDict)):
        for copy in copies.values():
            if _enter_computed not in copy._forward_pre_hooks.values():
                copy.register_forward_pre_hook(_enter_computed)  # after the one that makes it float32


def _enter_computed(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)


def _mesh(accelerator: Accelerator) -> DeviceMesh:
    mesh = accelerator.torch_device_mesh
    if mesh is None or accelerator.parallelism_config is None:
        return init_device_mesh(accelerator.device.type, (world_size(),))
    return mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]


def _units(model: nn.Module, plugin: Any) -> Iterator[nn.Module]:
    """Modules sharded apart, inner ones first."""
    modules = list(model.modules())
    asked = plugin.transformer_cls_names_to_wrap
    names = set(asked or [n for m in modules for n in getattr(m, "_no_split_modules", None) or ()])
    found = [m for m in reversed(modules) if type(m).__name__ in names]
    if asked and not found:
        raise ConfigError(f"`transformer_layer_cls_to_wrap` is {sorted(names)}, and the model has no such module.")
    yield from found
    base: Any = next((m for m in modules if isinstance(getattr(m, "_no_split_modules", None), (list, set))), model)
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    shared = {id(p) for p in embedding.parameters()} & {id(p) for p in (head.parameters() if head else ())}
    if not shared:
        yield embedding


@torch.no_grad()
def _copy_first_rank(model: nn.Module, device: torch.device) -> None:
    """Weights and buffers of rank 0 everywhere, as DDP does: the others may have drawn, or not loaded, theirs."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ModelError(f"`model`: {name} is on the meta device, without values; load it on the host.")
        there = tensor.data.to(device)
        dist.broadcast(there, 0)
        if there is not tensor.data:
            tensor.data.copy_(there)


def is_parted(model: nn.Module) -> bool:
    """Whether each rank holds a part of the weights alone, and all of them go through the model together."""
    first = next(model.parameters())
    return world_size() > 1 and (isinstance(first, DTensor) or "ds_id" in vars(first))


def parameter_count(model: nn.Module) -> int:
    """Over all ranks."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())  # ZeRO-3 leaves none of them here


def parameter_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name → shape over all ranks, whatever the strategy."""
    return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or its shards put together on every rank. A collective where it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def unsaved(model: Any) -> set[str]:
    """Names of the weights that peft never saves with an adapter: the frozen ones, but for those of the embedding and
    the head, which it saves where they were resized, or where one of them has an adapter."""
    ends = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
    kept = {id(p) for end in ends for p in end.parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, p in named if not p.requires_grad and id(p) not in kept}


def whole_state(
    model: nn.Module, adapter_only: bool, gather: Callable[[str, Tensor], Tensor] = lambda _, tensor: whole(tensor)
) -> dict[str, Tensor]:
    """The state dict, tensor by tensor made whole by `gather` and kept by rank 0 alone, on the host. A collective.

    With `adapter_only`, without what no adapter saves.
    """
    passed_over = unsaved(model) if adapter_only else set()
    kept: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name in passed_over:
            continue
        full = gather(name, tensor.detach())
        if rank() == 0:
            kept[name] = full.cpu()
    return kept


@contextlib.contextmanager
def whole_weights() -> Iterator[None]:
    """Models made inside keep their weights whole under ZeRO-3, which else takes them apart as they are made."""
    from transformers.integrations import deepspeed

    before = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed._hf_deepspeed_config_weak_ref = None
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = before
