"""posttrain: post-training for language models. Names are imported when they are first used."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Whoever imports peft imports bitsandbytes, which warns on some CPUs that an optional package is not there.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda r: "kernels-community" not in str(r.msg))

_ROOMS = {
    "posttrain.data.chat": ["apply_chat_template", "maybe_apply_chat_template"],
    "posttrain.data.config": ["DatasetConfig", "DatasetMixtureConfig", "ScriptArguments"],
    "posttrain.data.formats": ["is_conversational", "is_conversational_from_value", "maybe_convert_to_chatml"],
    "posttrain.data.mixture": ["get_dataset"],
    "posttrain.data.packing": ["pack_dataset"],
    "posttrain.data.preference": [
        "extract_prompt",
        "maybe_extract_prompt",
        "maybe_unpair_preference_dataset",
        "unpair_preference_dataset",
    ],
    "posttrain.data.responses": [
        "add_response_schema",
        "get_training_chat_template",
        "parse_response",
        "supports_tool_calling",
    ],
    "posttrain.loss.fused": ["FusedLinearDPOLoss", "FusedLinearGRPOLoss", "FusedLinearJSDLoss", "FusedLinearKTOLoss"],
    "posttrain.model.config": ["ModelConfig"],
    "posttrain.model.adapters": ["get_peft_config", "get_quantization_config"],
    "posttrain.trainer.cloning": ["clone_chat_template"],
    "posttrain.model.reference": ["create_reference_model"],
    "posttrain.trainer.dpo": ["DPOConfig", "DPOTrainer"],
    "posttrain.trainer.kto": ["KTOConfig", "KTOTrainer"],
    "posttrain.trainer.prm": ["PRMConfig", "PRMTrainer"],
    "posttrain.trainer.reward": ["RewardConfig", "RewardTrainer"],
    "posttrain.trainer.sft": ["SFTConfig", "SFTTrainer"],
    "posttrain.trainer.callbacks": ["BEMACallback", "RichProgressCallback", "SyncRefModelCallback"],
    "posttrain.trainer.logged": ["LogCompletionsCallback", "WeaveCallback"],
    "posttrain.cli.parse": ["TrlParser"],
    "posttrain.cli.quiet": ["init_zero_verbose"],
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from posttrain.cli.parse import TrlParser
    from posttrain.cli.quiet import init_zero_verbose
    from posttrain.data.chat import apply_chat_template, maybe_apply_chat_template
    from posttrain.data.config import DatasetConfig, DatasetMixtureConfig, ScriptArguments
    from posttrain.data.formats import is_conversational, is_conversational_from_value, maybe_convert_to_chatml
    from posttrain.data.mixture import get_dataset
    from posttrain.data.packing import pack_dataset
    from posttrain.data.preference import (
        extract_prompt,
        maybe_extract_prompt,
        maybe_unpair_preference_dataset,
        unpair_preference_dataset,
    )
    from posttrain.data.responses import (
        add_response_schema,
        get_training_chat_template,
        parse_response,
        supports_tool_calling,
    )
    from posttrain.loss.fused import FusedLinearDPOLoss, FusedLinearGRPOLoss, FusedLinearJSDLoss, FusedLinearKTOLoss
    from posttrain.model.adapters import get_peft_config, get_quantization_config
    from posttrain.model.config import ModelConfig
    from posttrain.model.reference import create_reference_model
    from posttrain.trainer.callbacks import BEMACallback, RichProgressCallback, SyncRefModelCallback
    from posttrain.trainer.cloning import clone_chat_template
    from posttrain.trainer.dpo import DPOConfig, DPOTrainer
    from posttrain.trainer.kto import KTOConfig, KTOTrainer
    from posttrain.trainer.logged import LogCompletionsCallback, WeaveCallback
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
