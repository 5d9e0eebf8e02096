"""Adapters (peft) and quantization (bitsandbytes): from the model's fields to a wrapped, trainable model."""

from __future__ import annotations

import copy
import importlib.util
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from posttrain.errors import ConfigError, MissingExtraError, ModelError, suggest
from posttrain.model.config import ModelConfig
from posttrain.parallel.device import native_bf16

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import BitsAndBytesConfig


def get_peft_config(model_args: ModelConfig) -> PeftConfig | None:
    """The LoRA configuration the fields ask for, or None when `use_peft` is off."""
    if not model_args.use_peft:
        return None
    _require("peft", "use_peft")
    from peft import LoraConfig

    targets: Any = model_args.lora_target_modules
    # peft knows the word only as text; on the command line every list is a list.
    if targets == ["all-linear"]:
        targets = "all-linear"
    fields: dict[str, Any] = {
        "task_type": model_args.lora_task_type,
        "r": model_args.lora_r,
        "lora_alpha": model_args.lora_alpha,
        "lora_dropout": model_args.lora_dropout,
        "target_modules": targets,
        "modules_to_save": model_args.lora_modules_to_save,
        "use_rslora": model_args.use_rslora,
        "use_dora": model_args.use_dora,
    }
    if model_args.lora_target_parameters is not None:
        fields["target_parameters"] = model_args.lora_target_parameters
    if model_args.lora_r < 1:
        raise ConfigError(f"`lora_r` is {model_args.lora_r}; it must be at least 1.")
    try:
        return LoraConfig(**fields)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the `lora_*` fields make no LoRA configuration: {error}") from error


def get_quantization_config(model_args: ModelConfig) -> BitsAndBytesConfig | None:
    """The quantization of the frozen base the fields ask for, or None."""
    if model_args.load_in_8bit and model_args.load_in_4bit:
        raise ConfigError("`load_in_8bit` and `load_in_4bit` are both on; keep one.")
    if not model_args.load_in_8bit and not model_args.load_in_4bit:
        return None
    if model_args.bnb_4bit_quant_type not in ("nf4", "fp4"):
        raise ConfigError(f"`bnb_4bit_quant_type` is {model_args.bnb_4bit_quant_type!r}; expected nf4 or fp4.")
    _require("bitsandbytes", "load_in_8bit" if model_args.load_in_8bit else "load_in_4bit")
    from transformers import BitsAndBytesConfig

    if model_args.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    try:
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
            bnb_4bit_compute_dtype=_compute_dtype(model_args.dtype),
            bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
            bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage,
        )
    except (AttributeError, ValueError) as error:
        raise ConfigError(f"the `bnb_4bit_*` fields make no quantization: {error}") from error


def head_left_whole(config: Any, heads: Iterable[str]) -> Any:
    """A quantization that leaves heads of labels as they are. transformers leaves the last module, but for one with a
    bias, and a head drawn anew is trained."""
    from transformers import BitsAndBytesConfig

    if not isinstance(config, BitsAndBytesConfig):
        return config
    config = copy.copy(config)
    config.llm_int8_skip_modules = [*(config.llm_int8_skip_modules or ()), *heads]
    return config


def _compute_dtype(dtype: str | None) -> str:
    """The dtype 4-bit weights are multiplied in. Unset: bfloat16 where the device multiplies it natively, else
    bitsandbytes' own, float32."""
    if dtype not in (None, "auto"):
        return dtype
    return "bfloat16" if native_bf16() else "float32"


def keep_quantized_weights(model: nn.Module) -> None:
    """Leave 4-bit weights on a CPU as they are. bitsandbytes packs them anew, rounding their scales to bfloat16, at the
    first evaluation; training would go on from a different base."""
    if "bitsandbytes" not in sys.modules:
        return
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def _require(package: str, field: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(f"`{field}` is on and {package} is not installed; pip install {package}.")


# On the model


def is_adapted(model: nn.Module) -> bool:
    """Whether peft wraps the model. Where peft was never imported, nothing can be."""
    if "peft" not in sys.modules:
        return False
    from peft import PeftMixedModel, PeftModel

    return isinstance(model, (PeftModel, PeftMixedModel))


def wrap_adapter(model: Any, peft_config: PeftConfig | None) -> Any:
    """Put a fresh adapter on the model, its weights in float32. Without a configuration, only check the model."""
    _refuse_foreign(model)
    if peft_config is not None:
        if is_adapted(model):
            raise ModelError(
                "the model already has an adapter, and `peft_config` asks for another: leave `peft_config` out (on the "
                "command line `use_peft`) to go on training the one it has, or merge it first "
                "(`model = model.merge_and_unload()`, or `posttrain merge`)."
            )
        _require("peft", "peft_config")
        from peft import get_peft_model

        check_adapter(peft_config)
        _check_targets(model, peft_config)
        try:
            model = get_peft_model(model, peft_config, autocast_adapter_dtype=True)
        except ValueError as error:
            raise ModelError(
                f"peft cannot put the adapter on {type(model).__name__}: {error} `lora_target_modules` is "
                f"{_shown(getattr(peft_config, 'target_modules', None))}; {_available(model)}"
            ) from error
    if is_adapted(model):
        check_adapter(model.active_peft_config)
        _refuse_merged(model)
        keep_master_weights(model)
    return model


def with_label_head(base: Any, peft_config: Any, task: str) -> Any:
    """An adapter's configuration for a task, which trains the new head in full unless it says itself how."""
    if peft_config is None:
        return None
    config = copy.copy(peft_config)
    config.task_type = task
    named = {*(getattr(config, "modules_to_save", None) or ())}
    targets = getattr(config, "target_modules", None)
    head = next(name for name in ("score", "classifier") if isinstance(getattr(base, name, None), nn.Module))
    if head not in {*named, *(targets if isinstance(targets, (list, set, tuple)) else ())}:
        config.modules_to_save = sorted({*named, head})
    return config


_REFUSED = {
    "ADALORA": "its ranks are dealt out anew at every step by a training loop of its own; use LoRA",
    "XLORA": "it runs the model twice in a forward; use LoRA",
    "POLY": "it needs a task id for every row; use LoRA",
}


def check_adapter(peft_config: Any) -> None:
    """Raise `ModelError` for a kind of adapter that a packed row, or this loop, cannot train exactly."""
    if peft_config is None:
        return
    kind = type(peft_config).__name__
    if getattr(peft_config, "is_prompt_learning", False):
        raise ModelError(f"`peft_config` is a {kind}: virtual tokens have no place in a packed row; use LoRA.")
    reason = _REFUSED.get(str(getattr(peft_config.peft_type, "value", peft_config.peft_type)))
    if reason is not None:
        raise ModelError(f"`peft_config` is a {kind}: {reason}.")
    for name in ("alora_invocation_tokens", "monteclora_config"):
        if getattr(peft_config, name, None) is not None:
            raise ModelError(f"`peft_config` sets `{name}`, which acts outside of a packed row; leave it out.")


def _refuse_foreign(model: Any) -> None:
    if not is_adapted(model) and getattr(model, "_hf_peft_config_loaded", False):
        raise ModelError(
            "`model` has an adapter put on by transformers itself (`load_adapter`, `add_adapter`), whose checkpoints "
            "cannot be resumed: give the adapter's folder or hub id as `model`, or "
            "`PeftModel.from_pretrained(base, adapter, is_trainable=True)`."
        )


def _refuse_merged(model: Any) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    if any(isinstance(module, BaseTunerLayer) and module.merged for module in model.modules()):
        raise ModelError("the adapter is merged into the base, so it would not be trained: `model.unmerge_adapter()`.")


def keep_master_weights(model: Any) -> bool:
    """Modules trained in full (`modules_to_save`) get float32 weights, as the rest of the adapter has, and go on
    taking and giving the dtype of the base. peft copies them in the base's, where small updates are lost. Returns
    whether there were any to change."""
    from peft.utils.other import ModulesToSaveWrapper

    changed = False
    for wrapper in (module for module in model.modules() if isinstance(module, ModulesToSaveWrapper)):
        for module in wrapper.modules_to_save.values():
            dtypes = {p.dtype for p in module.parameters() if p.requires_grad and p.dtype in _HALF}
            if dtypes:
                module.float()
                module.register_forward_pre_hook(_enter_float32)
                module.register_forward_hook(_Leave(dtypes.pop()))
                changed = True
    return changed


_HALF = (torch.bfloat16, torch.float16)


def _enter_float32(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.float() if isinstance(x, Tensor) and x.dtype in _HALF else x for x in args)


@dataclass(frozen=True)
class _Leave:
    """What a module gives, back in the dtype of the base. The scores of a head stay as they are."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output.to(self.dtype) if isinstance(output, Tensor) else output


def check_trainable(model: nn.Module) -> None:
    """Refuse a model of which nothing would be trained."""
    if any(parameter.requires_grad for parameter in model.parameters()):
        return
    if is_adapted(model):
        raise ModelError(
            "the adapter is frozen, so nothing would be trained: load it with "
            "`PeftModel.from_pretrained(..., is_trainable=True)`."
        )
    raise ModelError("every parameter of the model is frozen, so nothing would be trained: set `requires_grad`.")


def _check_targets(model: nn.Module, peft_config: PeftConfig) -> None:
    """Refuse names that match nothing; peft passes over them as long as one of them does."""
    names = [name for name, _ in model.named_modules()]
    targets = getattr(peft_config, "target_modules", None)
    if isinstance(targets, str):
        targets = None if targets == "all-linear" else [targets]
        missing = [t for t in targets or () if not any(re.fullmatch(t, name) for name in names)]
    else:
        missing = _unmatched(targets, names)
    if missing:
        hint = _available(model) + suggest(missing[0], _linear_names(model))
        raise ModelError(f"`lora_target_modules` names {_shown(missing)}, which match no module; {hint}")
    saved = getattr(peft_config, "modules_to_save", None)
    if missing := _unmatched(saved, names):
        raise ModelError(f"`lora_modules_to_save` names {_shown(missing)}, which match no module of the model.")


def _unmatched(wanted: Iterable[str] | None, names: list[str]) -> list[str]:
    return sorted(w for w in wanted or () if not any(name == w or name.endswith(f".{w}") for name in names))


def _linear_names(model: nn.Module) -> list[str]:
    """Last part of the name of every linear layer."""
    linear = [name for name, module in model.named_modules() if "Linear" in type(module).__name__]
    return list(dict.fromkeys(name.rpartition(".")[2] for name in linear))


def _available(model: nn.Module) -> str:
    return f"its linear layers are {', '.join(_linear_names(model))}."


def _shown(names: Any) -> str:
    return ", ".join(map(repr, sorted(names))) if isinstance(names, (list, set, tuple)) else repr(names)
