"""DeepSpeed ZeRO behind the same engine: the one file that names it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper
from torch import Tensor, nn
from transformers.integrations import deepspeed as hf_deepspeed

from posttrain.errors import ConfigError
from posttrain.parallel.params import declare, enter_computed, whole_state
from posttrain.parallel.strategy import Strategy

_REFUSED = ("curriculum_learning", "data_efficiency", "autotuning", "flops_profiler", "amp", "progressive_layer_drop")


def complete_config(config: dict[str, Any], args: Any) -> None:
    """Fill in what the DeepSpeed config leaves out and the arguments say.

    Raises `ConfigError` for a stage without sharding, and for what the engine does itself.
    """
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if stage not in (1, 2, 3):
        raise ConfigError(f"`deepspeed`: `zero_optimization.stage` is {stage}; expected 1, 2 or 3.")
    for key in _REFUSED:
        if config.get(key, {}).get("enabled"):
            raise ConfigError(f"`deepspeed`: `{key}` is enabled, and this engine does not support it; leave it out.")
    # DeepSpeed's own defaults: bf16 gradients are added up over the ranks in bf16, and nothing is clipped.
    config.setdefault("communication_data_type", "fp32")
    config.setdefault("gradient_clipping", args.max_grad_norm)
    config.setdefault("train_micro_batch_size_per_gpu", args.per_device_train_batch_size)
    config.setdefault("gradient_accumulation_steps", args.gradient_accumulation_steps)


def join_ranks() -> None:
    """Let DeepSpeed talk over gloo, on CPU processes. Before a model is loaded: ZeRO-3 cuts it as it is read."""
    import deepspeed

    # It would compile an operator that gloo can do without; a killed run leaves a lock that all later ones wait for.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)


def use_deepspeed(accelerator: Accelerator, plugin: Any, args: Any) -> bool:
    """Make accelerate run the plugin's ZeRO stage, on CPU processes too. Returns whether it does.

    Raises `ConfigError` where its config and the arguments disagree.
    """
    if plugin is None:
        return False
    state: Any = accelerator.state
    if state.distributed_type in (DistributedType.MULTI_CPU, DistributedType.NO):
        # accelerate ignores DeepSpeed on CPU, and would run DDP without a word.
        join_ranks()
        declare(accelerator, DistributedType.DEEPSPEED)
        plugin.set_mixed_precision(state._mixed_precision)
        plugin.select(_from_accelerator_state=True)
        state.deepspeed_plugins = {"default": plugin}
        state._mixed_precision = "no"  # DeepSpeed's own config holds it
        accelerator.native_amp = False
    if getattr(args, "hf_deepspeed_config", None) is None:
        hf_deepspeed.propagate_args_to_deepspeed(accelerator, args)
    plugin = state.deepspeed_plugin
    complete_config(plugin.hf_ds_config.config, args)
    if mismatches := plugin.hf_ds_config.mismatches:
        told = "; ".join(text.removeprefix("- ds ") for text in mismatches)
        raise ConfigError(f'`deepspeed` and the arguments disagree; set these to "auto" there: {told}.')
    return True


class Zero(Strategy):
    """ZeRO-1, 2 and 3."""

    def release(self, wrapped: Any, model: nn.Module) -> Any:
        if isinstance(wrapped, _engine_type()):
            wrapped.destroy()
        return model

    @property
    def _plugin(self) -> Any:
        return self.accelerator.state.deepspeed_plugin

    @property
    def config(self) -> dict[str, Any]:
        return self._plugin.hf_ds_config.config

    @property
    def stage(self) -> int:
        return self.config["zero_optimization"]["stage"]

    @property
    def sharded(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.stage == 3

    def prepare(self, model: nn.Module) -> Any:
        """Whole below stage 3, in the dtype the policy computes in; at stage 3 an engine without an optimizer."""
        config = copy.deepcopy({k: v for k, v in self.config.items() if k not in ("optimizer", "scheduler")})
        dtype = self._plugin.hf_ds_config.dtype()
        enter_computed(model)
        if self.stage < 3:
            return model.to(self.accelerator.device, dtype)
        import deepspeed

        config["zero_optimization"].pop("offload_optimizer", None)
        for key in ("train_batch_size", "gradient_accumulation_steps"):
            config.pop(key, None)
        config["train_micro_batch_size_per_gpu"] = 1
        _fill_buckets(config["zero_optimization"])
        return deepspeed.initialize(model=model, config=config)[0]

    def backward(self, model: Any, loss: Tensor, synchronise: bool) -> None:
        # Boundaries are ours, and so is the scale: DeepSpeed would divide by the accumulation steps once more.
        model.set_gradient_accumulation_boundary(synchronise)
        model.backward(loss, scale_wrt_gas=False)

    def grad_norm(self, model: Any, measured: Any) -> float:
        """Measured before the step; DeepSpeed's own is that of the step before."""
        zero = model.optimizer
        groups = zero._get_norm_groups() if self.stage == 3 else [zero.scaled_global_norm()]
        norms = torch.stack([torch.as_tensor(group, dtype=torch.float32) for group in groups])
        if bool((norms < 0).any()):  # −1 stands for inf and NaN
            return float("nan")
        return float(torch.linalg.vector_norm(norms)) / float(zero.loss_scale)

    def skip_step(self, model: Any) -> None:
        self._optimizer.skip = True

    def joined(self, optimizer: Any, model: Any) -> Any:
        enter_computed(model)
        self._optimizer = _SteppingOptimizer(model)
        self.accelerator._optimizers[:] = [self._optimizer]
        return self._optimizer

    def whole_state(self, model: nn.Module, adapter_only: bool) -> dict[str, Tensor] | None:
        """Trained weights come from their float32 masters."""
        parameters = dict(model.named_parameters(remove_duplicate=False))

        def gather(name: str, tensor: Tensor) -> Tensor:
            full = _whole_parameter(parameters[name]) if name in parameters else tensor
            return full.detach().clone()  # masters are views of one flat tensor

        return whole_state(model, adapter_only, gather)


def master_weight(parameter: Tensor) -> Tensor | None:
    """ZeRO's float32 master of a weight, whole, on every rank; None where ZeRO does not train it. A collective."""
    if not {"_hp_mapping", "ds_id"} & set(vars(parameter)):
        return None
    from deepspeed.utils import safe_get_full_fp32_param

    return safe_get_full_fp32_param(parameter)


@contextlib.contextmanager
def whole_parameters(parameters: Iterable[Tensor], writing: bool = False) -> Iterator[None]:
    """Parameters that ZeRO-3 took apart are whole inside; the others are as they are. With `writing`, what every rank
    writes into them stays. A collective."""
    parted = [p for p in parameters if "ds_id" in vars(p)]
    if not parted:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parted, modifier_rank=0 if writing else None):
        yield


def _engine_type() -> type:
    from deepspeed import DeepSpeedEngine

    return DeepSpeedEngine


def _whole_parameter(parameter: nn.Parameter) -> Tensor:
    full = master_weight(parameter)
    if full is not None:
        return full
    with whole_parameters([parameter]):
        return parameter.detach().clone()


def _fill_buckets(zero: dict[str, Any]) -> None:
    """A model without an optimizer is given no sizes by transformers: leave "auto" to DeepSpeed's defaults."""
    for key in [key for key, value in zero.items() if value == "auto"]:
        del zero[key]


class _SteppingOptimizer(DeepSpeedOptimizerWrapper):
    """Steps when the trainer says so. accelerate's steps inside every synchronising backward pass, before anybody has
    looked at the gradients."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine.optimizer)
        self._engine = engine
        self.skip = False  # the next step only clears the gradients

    def step(self, closure: Any = None) -> None:
        if self.skip:
            _clear(self._engine.optimizer)
        else:
            self._engine.step()
        self.skip = False


def _clear(zero: Any) -> None:
    """What ZeRO's step does to its gradients, without the step."""
    zero.zero_grad(set_to_none=True)
    stage3 = "fp16_groups" in vars(zero)
    zero.micro_step_id = 0 if stage3 else -1
    for found in (zero.averaged_gradients, *(() if stage3 else (zero.all_grad_tensors,))):
        for key in found:
            found[key] = None
