"""Bad input gives one clear error that names the field, the value seen and the fix; and gives it before training where
that can be known."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from data_fixtures import CHATML, byte_tokenizer
from datasets import Dataset, IterableDataset
from laws.runs import FIELDS, run, scratch, sft
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import tiny_model, token_rows
from transformers import AutoModelForCausalLM, TrainerCallback

from posttrain import SFTConfig, SFTTrainer
from posttrain.errors import (
    ConfigError,
    DataError,
    EmptyDataError,
    LayoutError,
    ModelError,
    NonFiniteError,
    PosttrainError,
    TrainingError,
)

TEXT = [{"text": "hello"}] * 4
CHAT = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]}] * 4


def build(rows: Any = None, model: Any = None, template: str | None = CHATML, **fields: Any) -> SFTTrainer:
    return SFTTrainer(
        tiny_model("qwen3") if model is None else model,
        SFTConfig(**FIELDS | {"output_dir": scratch()} | fields),
        train_dataset=TEXT if rows is None else rows,
        processing_class=byte_tokenizer(template=template),
    )


class Raises:
    """Expect one error of a kind, whose one-line text holds every needle."""

    def __init__(self, kind: type[PosttrainError], *needles: str) -> None:
        self.kind, self.needles = kind, needles

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        assert error is not None, f"no error; expected {self.kind.__name__}"
        assert isinstance(error, self.kind), f"{type(error).__name__}: {error}"
        text = str(error)
        assert "\n" not in text
        assert len(text) < 600
        for needle in self.needles:
            assert re.search(needle, text), f"{needle!r} is not in {text!r}"
        return True


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_unknown_columns():
    with Raises(DataError, "train", "question", "'?text'?"):
        build([{"question": "a", "answer": "b"}])


@pytest.mark.parametrize(
    ("row", "seen", "meant"),
    [
        ({"mesages": CHAT[0]["messages"]}, "mesages", "messages"),
        ({"promt": "a", "completion": "b"}, "promt", "prompt"),
        ({"prompt": "a", "completions": "b"}, "completions", "completion"),
        ({"txt": "a"}, "txt", "text"),
    ],
)
def test_misspelt_columns(row, seen, meant):
    with Raises(DataError, seen, meant):
        build([row])


def test_text_field_that_is_not_there():
    with Raises(DataError, "body|dataset_text_field"):
        build(TEXT, dataset_text_field="body")


@pytest.mark.parametrize(
    "rows", [[], Dataset.from_dict({"text": []}), IterableDataset.from_generator(lambda: iter([]))]
)
def test_empty_data_set(rows):
    with Raises(EmptyDataError, "train", "no rows"):
        build(rows)


def test_all_rows_masked():
    rows = [{"input_ids": [5, 6, 7], "labels": [-100] * 3}] * 4
    with Raises(EmptyDataError, "all 4 rows", "masked"):
        build(rows)


def test_eval_set_with_nothing_to_train():
    with Raises(EmptyDataError, "eval", "all 1 rows"):
        sft(eval_rows=Dataset.from_list([{"input_ids": [5, 6], "labels": [-100, -100]}]))


def test_max_length_below_every_prompt():
    rows = [{"prompt": "a long prompt", "completion": "b"}] * 3
    with Raises(EmptyDataError, "all 3 rows", "`max_length`=8", "raise it"):
        build(rows, max_length=8)


def test_chat_without_a_template():
    with Raises(DataError, "chat template", "chat_template_path"):
        build(CHAT, template=None)


IMAGE = [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "What is it?"}]


def test_images_are_refused_by_name():
    answer = [{"type": "text", "text": "A cat"}]
    rows = [{"messages": [{"role": "user", "content": IMAGE}, {"role": "assistant", "content": answer}]}]
    with Raises(DataError, "[Ii]mage"):
        build(rows)


def test_images_beside_text_are_refused_by_name():
    rows = [{"messages": [{"role": "user", "content": IMAGE}, {"role": "assistant", "content": "A cat"}]}]
    with Raises(DataError, "[Ii]mage"):
        build(rows)


def test_a_list_of_rows_that_mix_types():
    with Raises(DataError, "train", "type"):
        build([{"text": "a"}, {"text": ["b"]}])


def test_image_columns_are_refused_by_name():
    with Raises(DataError, "image"):
        build([{**CHAT[0], "images": ["cat.png"]}])


def test_a_row_that_breaks_its_column():
    with Raises(DataError, "Row 2", "'text'", "None"):
        build([{"text": "a"}, {"text": "b"}, {"text": None}])


def test_token_ids_outside_the_vocabulary():
    with Raises(DataError, "`input_ids`", "300", "processing_class"):
        sft(rows=Dataset.from_list([{"input_ids": [5, 6, 300]}]))
    with Raises(DataError, "`input_ids`", "-1"):
        sft(rows=Dataset.from_list([{"input_ids": [5, -1, 7]}]))


def test_no_data_set_at_all():
    trainer = SFTTrainer(
        tiny_model("qwen3"), SFTConfig(**FIELDS, output_dir=scratch()), processing_class=byte_tokenizer()
    )
    with Raises(ConfigError, "`train_dataset` is None"):
        trainer.train()
    with Raises(ConfigError, "`eval_dataset` is None"):
        trainer.evaluate()


# ---- fields ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "known"),
    [
        ("loss_type", "nil", "nll"),
        ("layout", "pakced", "packed"),
        ("truncation_mode", "keep_strat", "keep_start"),
        ("packing_strategy", "bdf", "bfd"),
    ],
)
def test_unknown_choices(field, value, known):
    with Raises(ConfigError, f"`{field}`", value, known):
        build(**{field: value}, packing=field == "packing_strategy")


@pytest.mark.parametrize(
    "field",
    [
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "gradient_accumulation_steps",
        "max_tokens_per_forward",
        "head_chunk_tokens",
        "head_memory_mb",
        "pad_to_multiple_of",
        "dataset_num_proc",
    ],
)
@pytest.mark.parametrize("value", [0, -2])
def test_impossible_geometry(field, value):
    with Raises(ConfigError, f"`{field}`", str(value), "at least 1"):
        SFTConfig(**FIELDS | {"output_dir": scratch(), field: value})


def test_a_data_set_smaller_than_a_batch_that_drops_the_last():
    """Nothing would be trained."""
    with Raises(PosttrainError, "dataloader_drop_last|per_device_train_batch_size"):
        build(TEXT, per_device_train_batch_size=8, dataloader_drop_last=True, max_steps=-1).train()


def test_lengths_that_hold_no_target():
    with Raises(ConfigError, "`max_length` is 1", "at least 2"):
        build(max_length=1)
    with Raises(ConfigError, "`packing_strategy`", "`overflow`", "'drop'"):
        build(packing=True, packing_strategy="bfd_split", overflow="drop")
    with Raises(ConfigError, "`overflow`", "`truncation_mode`"):
        build(overflow="split", truncation_mode="keep_end")
    with Raises(ConfigError, "`packing`", "`max_length`"):
        build(packing=True, max_length=None)


def test_masks_that_do_not_fit_the_rows():
    with Raises(ConfigError, "`assistant_only_loss`", "text"):
        build(assistant_only_loss=True)
    with Raises(ConfigError, "`completion_only_loss`", "text"):
        build(completion_only_loss=True)


@pytest.mark.parametrize("field", ["eos_token", "pad_token"])
def test_tokens_outside_the_tokenizer(field):
    with Raises(ConfigError, f"`{field}`", "im_edn", "im_end"):
        build(**{field: "<|im_edn|>"})


def test_sharing_asked_of_a_layout_that_cannot():
    with Raises(ConfigError, "`share_prefixes`", "padded"):
        build(share_prefixes=True, layout="padded")


def test_model_init_kwargs_that_are_no_mapping():
    with Raises(ConfigError, "`model_init_kwargs`"):
        build(model_init_kwargs="attn_implementation=eager")


# ---- models ----------------------------------------------------------------------------------------------------------


def test_folder_without_a_model(tmp_path):
    with Raises(ModelError, "`model`", tmp_path.name, "config.json"):
        build(model=str(tmp_path))


def test_a_path_that_is_not_there(tmp_path):
    with Raises(ModelError, "`model`", "nowhere"):
        build(model=str(tmp_path / "nowhere"))


def test_a_name_that_is_not_there():
    with Raises(ModelError, "`model`", "no-such/model-at-all"):
        build(model="no-such/model-at-all")


def test_a_file_for_a_model(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with Raises(ModelError, "`model`", "model.safetensors", "folder"):
        build(model=str(tmp_path / "model.safetensors"))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tiny_model("qwen3").save_pretrained(tmp_path)
    return tmp_path


def test_broken_config(saved):
    (saved / "config.json").write_text("{")
    with Raises(ModelError, "`model`", saved.name):
        build(model=str(saved))


def test_missing_weights(saved):
    (saved / "model.safetensors").unlink()
    with Raises(ModelError, "`model`", saved.name):
        build(model=str(saved))


def test_truncated_weights(saved):
    data = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(data[: len(data) // 2])
    with Raises(ModelError, "`model`", saved.name):
        build(model=str(saved))


def test_an_adapter_folder_without_its_base(tmp_path):
    adapter = get_peft_model(tiny_model("qwen3"), LoraConfig(target_modules=["q_proj"]))
    adapter.save_pretrained(tmp_path / "nameless")
    with Raises(ModelError, "adapter", "base_model_name_or_path"):
        build(model=str(tmp_path / "nameless"))
    adapter.active_peft_config.base_model_name_or_path = str(tmp_path / "moved")
    adapter.save_pretrained(tmp_path / "adapter")
    with Raises(ModelError, "base_model_name_or_path", "moved"):
        build(model=str(tmp_path / "adapter"))


def test_something_else_for_a_model():
    with Raises(ModelError, "`model`", "Linear"):
        build(model=torch.nn.Linear(2, 2))


def test_a_model_without_a_head():
    model = AutoModelForCausalLM.from_config(tiny_model("qwen3").config).model
    with Raises(ModelError, "Qwen3Model", "AutoModelForCausalLM"):
        build(model=model)


def test_a_tokenizer_that_is_nowhere():
    with Raises(ModelError, "`processing_class`"):
        SFTTrainer(tiny_model("qwen3"), SFTConfig(**FIELDS, output_dir=scratch()), train_dataset=TEXT)


def test_a_layout_that_is_not_exact():
    with Raises(LayoutError, "layout='packed'", "eager", "auto"):
        build(model=tiny_model("qwen3", attn_implementation="eager"), layout="packed")


def test_target_modules_that_match_nothing():
    with Raises(ModelError, "lora_target_modules", "q_porj", "q_proj"):
        sft(peft_config=LoraConfig(target_modules=["q_porj"]))


# ---- nothing to train ------------------------------------------------------------------------------------------------


def test_a_frozen_adapter_is_found_at_set_up(tmp_path):
    get_peft_model(tiny_model("qwen3"), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    with Raises(ModelError, "frozen", "is_trainable=True"):
        build(model=PeftModel.from_pretrained(tiny_model("qwen3"), str(tmp_path)))


def test_a_frozen_model_is_found_at_set_up():
    with Raises(ModelError, "frozen", "requires_grad"):
        build(model=tiny_model("qwen3").requires_grad_(False))


def test_an_adapter_without_a_gradient_is_found_after_step_1():
    """A and B are both zero: no gradient ever reaches either."""
    model = get_peft_model(tiny_model("qwen3"), LoraConfig(target_modules=["q_proj"]))
    for name, weight in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.zeros_(weight)
    with Raises(TrainingError, "step 1", "gradient"):
        build(model=model).train()


def test_trainable_weights_that_are_never_used_are_found_at_step_1():
    model = tiny_model("qwen3").requires_grad_(False)
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(2)))
    with Raises(TrainingError, "step 1", "gradient|trainable"):
        build(model=model).train()


# ---- NaN -------------------------------------------------------------------------------------------------------------


class Poison(TrainerCallback):
    """Makes a weight NaN (or the loss infinite) after a step."""

    def __init__(self, step: int, value: float) -> None:
        self.step, self.value = step, value

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == self.step:
            with torch.no_grad():
                model.lm_head.weight[:2] = self.value


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_nan_loss_stops_names_the_batch_and_keeps_the_last_checkpoint(value, clip, tmp_path):
    settings: dict[str, Any] = {
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 2,
        "output_dir": str(tmp_path),
        "max_grad_norm": clip,
        "train_sampling_strategy": "sequential",
    }
    good = run(sft(**settings | {"max_steps": 2, "output_dir": str(tmp_path / "good")}))
    trainer = sft(**settings)
    trainer.add_callback(Poison(2, value))
    with Raises(NonFiniteError, "step 3", "loss nan|loss inf", "rows 4, 5 ", "step 2", tmp_path.name, "learning_rate"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert [path.name for path in sorted(tmp_path.glob("checkpoint-*"))] == ["checkpoint-2"]
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2", dtype=torch.float32)
    for name, weight in kept.named_parameters():
        assert torch.equal(weight, good.weights[name]), name
    # And the run goes on from there.
    assert len(run(sft(**settings), resume=str(tmp_path / "checkpoint-2")).losses) == 6


def test_a_learning_rate_that_explodes_stops():
    with Raises(NonFiniteError, "step [23]", "learning_rate"):
        build(token_rows(), learning_rate=1e38).train()
