"""The public names: sorted, lazy, and none of them missing."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import subprocess
import sys
from typing import Any

import pytest

import posttrain

HEAVY = ("torch", "transformers", "datasets", "peft", "accelerate")


def test_names_are_sorted_and_unique():
    assert list(posttrain.__all__) == sorted(set(posttrain.__all__))


@pytest.mark.parametrize("name", posttrain.__all__)
def test_name_resolves(name: str):
    assert getattr(posttrain, name).__name__ == name


def test_names_are_listed():
    assert set(posttrain.__all__) <= set(dir(posttrain))


def test_misspelt_name_is_an_attribute_error_with_a_hint():
    with pytest.raises(AttributeError, match="Did you mean 'SFTTrainer'"):
        posttrain.SFTTraner  # noqa: B018
    with pytest.raises(ImportError):
        from posttrain import NoSuchThing  # noqa: F401


def test_import_is_light():
    code = f"import sys, posttrain; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# The calls a script written for TRL 1.13 makes of what concerns data, models, callbacks and the command line. A default
# is what such a script gets when it leaves the argument out; ... stands for a required one.
CALLS = """
add_response_schema(processing_class)
apply_chat_template(example, tokenizer, tools=None, **kw)
maybe_apply_chat_template(example, tokenizer, tools=None, **kw)
clone_chat_template(model, tokenizer, source_tokenizer_path, resize_to_multiple_of=64)
create_reference_model(model, num_shared_layers=None, pattern=None)
extract_prompt(example)
maybe_extract_prompt(example)
get_dataset(mixture_config)
get_peft_config(model_args)
get_quantization_config(model_args)
get_training_chat_template(processing_class=None, tokenizer=None)
init_zero_verbose()
is_conversational(example)
is_conversational_from_value(example)
maybe_convert_to_chatml(example)
pack_dataset(dataset, seq_length, strategy='bfd', map_kwargs=None)
parse_response(tokenizer, ids, prefix=None)
supports_tool_calling(processing_class)
unpair_preference_dataset(dataset, **map_kwargs)
maybe_unpair_preference_dataset(dataset, num_proc=None, desc=None)
RichProgressCallback()
LogCompletionsCallback(trainer, generation_config=None, num_prompts=None, freq=None)
SyncRefModelCallback(ref_model, accelerator)
SyncRefModelCallback.sync_target_model(model, target_model, alpha)
BEMACallback(update_freq=400, ema_power=0.5, bias_power=0.2, lag=10, update_after=0, multiplier=1.0,
    min_ema_multiplier=0.0, device='cpu')
WeaveCallback(trainer, project_name=None, scorers=None, generation_config=None, num_prompts=None,
    dataset_name='eval_dataset', model_name=None)
TrlParser(dataclass_types=None)
TrlParser.parse_args_and_config(self, args=None, return_remaining_strings=False, fail_with_unknown_args=True,
    separate_remaining_strings=False)
TrlParser.parse_args_into_dataclasses(self, args=None, return_remaining_strings=False, look_for_args_file=True,
    args_filename=None, args_file_flag=None)
TrlParser.set_defaults_with_config(self, **kwargs)
SFTTrainer(model, args=None, data_collator=None, train_dataset=None, eval_dataset=None, processing_class=None,
    compute_loss_func=None, compute_metrics=None, callbacks=None, optimizers=(None, None),
    optimizer_cls_and_kwargs=None, preprocess_logits_for_metrics=None, quantization_config=None, peft_config=None,
    formatting_func=None)
ModelConfig(model_name_or_path=None, model_revision='main', dtype='float32', attn_implementation=None,
    use_peft=False, lora_r=16, lora_alpha=32, lora_dropout=0.05, lora_target_modules=None,
    lora_target_parameters=None, lora_modules_to_save=None, lora_task_type='CAUSAL_LM', use_rslora=False,
    use_dora=False, load_in_8bit=False, load_in_4bit=False, bnb_4bit_quant_type='nf4', use_bnb_nested_quant=False,
    bnb_4bit_quant_storage=None)
ScriptArguments(dataset_name=None, dataset_config=None, dataset_train_split='train', dataset_test_split='test',
    dataset_streaming=False, ignore_bias_buffers=False)
DatasetConfig(path, name=None, data_dir=None, data_files=None, split='train', columns=None, fraction=None)
DatasetMixtureConfig(datasets=list, streaming=False, test_split_size=None)
FusedLinearDPOLoss(ignore_index=-100, beta=0.1, alpha=1.0, compute_nll_loss=False, compiled=True, use_ref_model=True,
    average_log_prob=False, chunk_size=1, loss_type='sigmoid', label_smoothing=0.0, discopop_tau=0.05)
FusedLinearDPOLoss.forward(self, lin_weight, _input, target, bias=None, ref_input=None, ref_weight=None, ref_bias=None)
FusedLinearKTOLoss(ignore_index=-100, beta=0.1, compiled=True, use_ref_model=False, average_log_prob=False,
    chunk_size=1)
FusedLinearKTOLoss.forward(self, _input, lin_weight, target, bias=None, preference_labels=None, ref_input=None,
    ref_weight=None, ref_bias=None, kl=None)
FusedLinearGRPOLoss(beta=0.04, compiled=True, use_ref_model=True, chunk_size=1, epsilon_low=0.2, epsilon_high=0.2,
    loss_type='dapo', max_completion_length=None, importance_sampling_level='token', sapo_temperature_pos=1.0,
    sapo_temperature_neg=1.05, temperature=1.0, delta=None, use_bias_correction_kl=False, vespo_k_pos=2.0,
    vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0)
FusedLinearGRPOLoss.forward(self, _input, lin_weight, selected_token_ids, attention_mask, advantages, bias=None,
    ref_per_token_logps=None, old_per_token_logps=None, ref_input=None, ref_weight=None, ref_bias=None,
    vllm_is_ratio=None, num_items_in_batch=None)
FusedLinearJSDLoss(weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5, ignore_index=-100, temperature=1.0,
    compiled=True, chunk_size=1024, return_soft_hard_loss=False)
FusedLinearJSDLoss.forward(self, student_input, student_weight, teacher_input, teacher_weight, true_labels,
    student_bias=None, teacher_bias=None)
"""
# Defaults of ours that differ; docs/migrating.md says why.
DIFFERENT = {("ModelConfig", "dtype"): None}


def calls() -> list[str]:
    lines = CALLS.replace("\n    ", " ").strip().splitlines()
    assert len(lines) == 43
    return lines


def written_parameters(call: str) -> dict[str, Any]:
    """e.g. "f(a, b=1, **kw)" -> {"a": ..., "b": 1, "**": ...}"""
    definition = ast.parse(f"def f{call[call.index('(') :]}: ...".replace("=list", "=[]")).body[0]
    assert isinstance(definition, ast.FunctionDef)
    names = [argument.arg for argument in definition.args.args]
    defaults = [ast.literal_eval(value) for value in definition.args.defaults]
    found = dict(zip(names, [...] * (len(names) - len(defaults)) + defaults, strict=True))
    return found | ({"**": ...} if definition.args.kwarg else {})


@pytest.mark.parametrize("call", calls(), ids=lambda call: call.partition("(")[0])
def test_a_call_has_the_same_parameters(call: str):
    name = call.partition("(")[0]
    target: Any = posttrain
    for part in name.split("."):
        target = getattr(target, part)
    ours = inspect.signature(target).parameters
    wanted = written_parameters(call)
    takes_any = wanted.pop("**", None) is not None
    assert takes_any <= any(p.kind is p.VAR_KEYWORD for p in ours.values())
    assert list(ours)[: len(wanted)] == list(wanted)
    for parameter, default in wanted.items():
        found = ours[parameter].default
        if dataclasses.is_dataclass(target):
            field = target.__dataclass_fields__[parameter]
            found = field.default_factory() if field.default_factory is not dataclasses.MISSING else found
        if default is ...:  # it may be left out here; it may not be refused
            continue
        assert found == DIFFERENT.get((name, parameter), default), parameter
    # What we add can be left out.
    added = [p for key, p in ours.items() if key not in wanted and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    assert all(p.default is not p.empty for p in added)


def test_a_call_that_differs_is_noticed():
    with pytest.raises(AssertionError):
        test_a_call_has_the_same_parameters("pack_dataset(dataset, seq_length, strategy='wrapped', map_kwargs=None)")
    with pytest.raises(AssertionError):
        test_a_call_has_the_same_parameters("extract_prompt(row)")
    with pytest.raises(AttributeError):
        test_a_call_has_the_same_parameters("no_such_name()")


def test_zero_verbose_is_quiet():
    code = (
        "import logging, warnings\nfrom posttrain import init_zero_verbose\ninit_zero_verbose()\n"
        "warnings.warn('unheard')\nlogging.getLogger('x').warning('unheard')\nlogging.getLogger('x').error('heard')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    text = done.stdout + done.stderr
    assert "unheard" not in text and "heard" in text
