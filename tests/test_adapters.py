"""Adapters and quantization: fields to configuration, and what a wrapped model must be."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from posttrain.errors import ConfigError, MissingExtraError, ModelError
from posttrain.model.adapters import (
    check_trainable,
    get_peft_config,
    get_quantization_config,
    is_adapted,
    wrap_adapter,
)
from posttrain.model.config import ModelConfig


def tiny(dtype: torch.dtype = torch.float32) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=1, **sizes)).to(dtype)


def lora(**fields: Any) -> Any:
    return get_peft_config(ModelConfig(use_peft=True, **fields))


# Fields to configuration


def test_off_by_default():
    assert get_peft_config(ModelConfig()) is None
    assert get_quantization_config(ModelConfig()) is None


def test_lora_fields():
    config = lora(lora_r=4, lora_alpha=8, lora_dropout=0.0, lora_target_modules=["q_proj"], use_rslora=True)
    assert isinstance(config, LoraConfig)
    assert (config.r, config.lora_alpha, config.lora_dropout, config.use_rslora) == (4, 8, 0.0, True)
    assert config.target_modules == {"q_proj"} and config.task_type == "CAUSAL_LM"
    assert lora(lora_target_modules=["all-linear"]).target_modules == "all-linear"


@pytest.mark.parametrize("fields", [{"lora_r": 0}, {"lora_task_type": "NO_SUCH"}])
def test_lora_fields_refused(fields: dict[str, Any]):
    with pytest.raises(ConfigError, match="lora_"):
        lora(**fields)


def test_two_quantizations_are_refused():
    with pytest.raises(ConfigError, match="`load_in_8bit` and `load_in_4bit`"):
        get_quantization_config(ModelConfig(load_in_8bit=True, load_in_4bit=True))


def test_quantization_needs_bitsandbytes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="`load_in_4bit` is on and bitsandbytes is not installed"):
        get_quantization_config(ModelConfig(load_in_4bit=True))


def test_quantization_fields(monkeypatch: pytest.MonkeyPatch):
    import transformers.utils.quantization_config as upstream

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(upstream.importlib.metadata, "version", lambda name: "0.46.0")
    config = get_quantization_config(ModelConfig(load_in_4bit=True, dtype="bfloat16", use_bnb_nested_quant=True))
    assert isinstance(config, BitsAndBytesConfig) and config.load_in_4bit
    assert config.bnb_4bit_compute_dtype == torch.bfloat16 and config.bnb_4bit_use_double_quant
    eight = get_quantization_config(ModelConfig(load_in_8bit=True))
    assert eight is not None and eight.load_in_8bit
    with pytest.raises(ConfigError, match="`bnb_4bit_quant_type` is 'int4'"):
        get_quantization_config(ModelConfig(load_in_4bit=True, bnb_4bit_quant_type="int4"))


# On the model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapter_weights_are_float32(dtype: torch.dtype):
    model = wrap_adapter(tiny(dtype), lora())
    assert is_adapted(model) and isinstance(model, PeftModel)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name)
        assert parameter.dtype == (torch.float32 if "lora_" in name else dtype)


def test_all_linear_leaves_the_head():
    model = wrap_adapter(tiny(), lora(lora_target_modules=["all-linear"]))
    adapted = {name.split(".lora_A")[0].rpartition(".")[2] for name, _ in model.named_parameters() if "lora_A" in name}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("targets", [["q_proj", "querry"], ["querry"]])
def test_target_that_matches_nothing_is_named(targets: list[str]):
    with pytest.raises(ModelError, match=r"`lora_target_modules` names 'querry'.*q_proj, k_proj") as error:
        wrap_adapter(tiny(), lora(lora_target_modules=targets))
    assert "'q_proj'," not in str(error.value)


def test_target_pattern_that_matches_nothing_is_named():
    wrap_adapter(tiny(), LoraConfig(target_modules=r".*\.[qv]_proj"))
    with pytest.raises(ModelError, match="match no module"):
        wrap_adapter(tiny(), LoraConfig(target_modules=r".*\.x_proj"))


def test_saved_module_that_matches_nothing_is_named():
    with pytest.raises(ModelError, match="`lora_modules_to_save` names 'head'"):
        wrap_adapter(tiny(), lora(lora_modules_to_save=["head"]))


def test_unknown_family_without_targets_is_a_model_error():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(ModelError, match="its linear layers are 0"):
        wrap_adapter(model, LoraConfig())


def test_second_adapter_is_refused():
    model = get_peft_model(tiny(), lora())
    with pytest.raises(ModelError, match=r"already has an adapter.*merge"):
        wrap_adapter(model, lora())


def test_wrapped_model_trains_as_it_is():
    model = get_peft_model(tiny(), lora())
    assert wrap_adapter(model, None) is model


def test_frozen_adapter_is_refused():
    model = get_peft_model(tiny(), lora())
    model.requires_grad_(False)
    with pytest.raises(ModelError, match="is_trainable=True"):
        check_trainable(wrap_adapter(model, None))


def test_frozen_adapter_from_disk_is_refused(tmp_path: Any):
    get_peft_model(tiny(), lora()).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="is_trainable=True"):
        check_trainable(PeftModel.from_pretrained(tiny(), tmp_path))
    check_trainable(PeftModel.from_pretrained(tiny(), tmp_path, is_trainable=True))


def test_frozen_model_is_refused():
    with pytest.raises(ModelError, match="every parameter of the model is frozen"):
        check_trainable(tiny().requires_grad_(False))
    check_trainable(tiny())


def test_peft_is_not_imported_for_a_plain_model():
    code = (
        "import sys, torch; from posttrain.model.adapters import wrap_adapter, get_peft_config, is_adapted\n"
        "from posttrain.model.config import ModelConfig\n"
        "m = torch.nn.Linear(1, 1); assert wrap_adapter(m, get_peft_config(ModelConfig())) is m and not is_adapted(m)\n"
        "assert 'peft' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_use_peft_without_peft_names_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="pip install peft"):
        lora()
