"""posttrain: post-training for language models. Names are imported when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_ROOMS = {
    "posttrain.data.chat": ["apply_chat_template", "maybe_apply_chat_template"],
    "posttrain.data.config": ["DatasetConfig", "DatasetMixtureConfig", "ScriptArguments"],
    "posttrain.data.formats": ["is_conversational", "is_conversational_from_value", "maybe_convert_to_chatml"],
    "posttrain.data.mixture": ["get_dataset"],
    "posttrain.data.packing": ["pack_dataset"],
    "posttrain.model.config": ["ModelConfig"],
    "posttrain.model.adapters": ["get_peft_config", "get_quantization_config"],
    "posttrain.model.tokens": ["clone_chat_template"],
    "posttrain.trainer.sft": ["SFTConfig", "SFTTrainer"],
    "posttrain.trainer.callbacks": ["RichProgressCallback"],
    "posttrain.cli.parse": ["TrlParser"],
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from posttrain.cli.parse import TrlParser
    from posttrain.data.chat import apply_chat_template, maybe_apply_chat_template
    from posttrain.data.config import DatasetConfig, DatasetMixtureConfig, ScriptArguments
    from posttrain.data.formats import is_conversational, is_conversational_from_value, maybe_convert_to_chatml
    from posttrain.data.mixture import get_dataset
    from posttrain.data.packing import pack_dataset
    from posttrain.model.adapters import get_peft_config, get_quantization_config
    from posttrain.model.config import ModelConfig
    from posttrain.model.tokens import clone_chat_template
    from posttrain.trainer.callbacks import RichProgressCallback
    from posttrain.trainer.sft import SFTConfig, SFTTrainer


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        from posttrain.errors import suggest

        raise AttributeError(f"module 'posttrain' has no attribute {name!r}.{suggest(name, __all__)}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
