"""Adapters (peft) and quantization (bitsandbytes): from the model's fields to a wrapped, trainable model."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from posttrain.errors import ConfigError, MissingExtraError, ModelError, suggest
from posttrain.model.config import ModelConfig

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


def _compute_dtype(dtype: str | None) -> str:
    """The dtype 4-bit weights are multiplied in. Unset: bfloat16 where the GPU has it; bitsandbytes' own is float32."""
    import torch

    if dtype not in (None, "auto"):
        return dtype
    native = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if native else "float32"


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
    if peft_config is not None:
        if is_adapted(model) or getattr(model, "_hf_peft_config_loaded", False):
            raise ModelError(
                "the model already has an adapter, and `peft_config` asks for another: leave `peft_config` out to go "
                "on training the one it has, or merge it first (`model = model.merge_and_unload()`)."
            )
        _require("peft", "peft_config")
        from peft import get_peft_model

        _refuse_prompt_learning(peft_config)
        _check_targets(model, peft_config)
        try:
            model = get_peft_model(model, peft_config, autocast_adapter_dtype=True)
        except ValueError as error:
            raise ModelError(
                f"peft cannot put the adapter on {type(model).__name__}: {error} `lora_target_modules` is "
                f"{_shown(getattr(peft_config, 'target_modules', None))}; {_available(model)}"
            ) from error
    if is_adapted(model):
        _refuse_prompt_learning(model.active_peft_config)
    check_trainable(model)
    return model


def _refuse_prompt_learning(config: Any) -> None:
    if getattr(config, "is_prompt_learning", False):
        raise ModelError(
            f"`peft_config` is a {type(config).__name__}: virtual tokens have no place in a packed row; use LoRA."
        )


def check_trainable(model: nn.Module) -> None:
    """Refuse a model of which nothing would be trained."""
    if any(parameter.requires_grad for parameter in model.parameters()):
        return
    if is_adapted(model) or getattr(model, "_hf_peft_config_loaded", False):
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
