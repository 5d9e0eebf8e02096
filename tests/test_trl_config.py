"""A configuration written for TRL's `sft` command runs unchanged from ours, or says which field it cannot have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from data_fixtures import CHATML, byte_tokenizer
from safetensors.torch import load_file
from tiny import tiny_model

from posttrain.cli.main import main
from posttrain.cli.schema import stored

# Every field that TRL 1.13 adds for its `sft` command, with its default there.
FIELDS = """
logging_steps: 10
gradient_checkpointing: true
bf16: null
lr_scheduler_kwargs: null
use_liger_kernel: false
torch_empty_cache_steps: null
learning_rate: 2.0e-5
model_init_kwargs: null
trust_remote_code: false
router_aux_loss_coef: 0.001
chat_template_path: null
dataset_text_field: text
dataset_kwargs: null
dataset_num_proc: null
eos_token: null
max_length: 1024
truncation_mode: keep_start
shuffle_dataset: false
packing: false
packing_strategy: bfd
padding_free: false
pad_to_multiple_of: null
eval_packing: null
completion_only_loss: null
assistant_only_loss: false
loss_type: null
activation_offloading: false
pad_token: null
model_name_or_path: MODEL
model_revision: main
dtype: float32
attn_implementation: null
use_peft: false
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_modules: null
lora_target_parameters: null
lora_modules_to_save: null
lora_task_type: CAUSAL_LM
use_rslora: false
use_dora: false
load_in_8bit: false
load_in_4bit: false
bnb_4bit_quant_type: nf4
use_bnb_nested_quant: false
bnb_4bit_quant_storage: null
dataset_name: null
dataset_config: null
dataset_train_split: train
dataset_test_split: test
dataset_streaming: false
ignore_bias_buffers: false
streaming: false
test_split_size: null
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model(eos_token_id=257).save_pretrained(tmp_path / "model")
    byte_tokenizer(template=CHATML).save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        chats = (
            [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"It is {i}."}] for i in range(8)
        )
        text = "\n".join(json.dumps({"messages": chat}) for chat in chats)
        (tmp_path / "data" / f"{split}.jsonl").write_text(text, encoding="utf-8")
    return tmp_path


def run(folder: Path, *flags: str, **changes: Any) -> int:
    """Write the file as for TRL, changed where asked, and run it."""
    values = yaml.safe_load(FIELDS.replace("MODEL", str(folder / "model")))
    values |= {"output_dir": str(folder / "out"), "max_steps": 2, "report_to": "none", "save_strategy": "no", **changes}
    file = folder / "sft.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return main(["sft", "--config", str(file), *flags])


def test_the_fields_are_all_of_trls():
    given = set(yaml.safe_load(FIELDS))
    known = {item.name for items in stored("sft").values() for item in items}
    assert given <= known
    assert len(given) == 6 + 22 + 19 + 6 + 2


def test_every_default_of_trl_written_out(folder: Path):
    source = [{"path": str(folder / "data/train.jsonl"), "split": "train", "name": None, "columns": ["messages"]}]
    assert run(folder, datasets=source) == 0
    moved, before = load_file(folder / "out/model.safetensors"), tiny_model(eos_token_id=257).state_dict()
    assert all(not weight.equal(before[name]) for name, weight in moved.items())


def test_another_value_of_every_field(folder: Path):
    changes = {
        "logging_steps": 1, "gradient_checkpointing": False, "bf16": False, "learning_rate": 1e-3,
        "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4},
        "torch_empty_cache_steps": 1, "model_init_kwargs": {"low_cpu_mem_usage": True}, "router_aux_loss_coef": 0.0,
        "dataset_kwargs": {"skip_prepare_dataset": False}, "dataset_num_proc": 1, "eos_token": "<|im_end|>",
        "pad_token": "<pad>", "max_length": 64, "truncation_mode": "keep_end", "shuffle_dataset": True, "packing": True,
        "packing_strategy": "bfd_split", "padding_free": True, "pad_to_multiple_of": 8, "eval_packing": False,
        "completion_only_loss": False, "assistant_only_loss": True, "loss_type": "dft", "activation_offloading": True,
        "use_peft": True, "lora_r": 2, "lora_alpha": 4, "lora_dropout": 0.0, "use_rslora": True,
        "lora_target_modules": ["q_proj", "v_proj"], "use_dora": False, "dataset_name": str(folder / "data"),
        "eval_strategy": "steps", "eval_steps": 1,
        "ignore_bias_buffers": True, "attn_implementation": "sdpa", "dtype": "float32",
    }  # fmt: skip
    assert run(folder, **changes) == 0
    assert (folder / "out/adapter_model.safetensors").is_file()


def test_the_launch_keys_of_trl_are_read_too(folder: Path, monkeypatch: pytest.MonkeyPatch):
    from posttrain.cli import launch

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", launch.LAUNCHED):
        monkeypatch.delenv(name, raising=False)
    seen: list[Any] = []
    monkeypatch.setattr(launch, "supervise", lambda line, environment: seen.append(json.loads(line[3])["asked"]) or 0)
    source = [{"path": str(folder / "data/train.jsonl")}]
    assert run(folder, "--accelerate_config", "zero2", "--num_processes", "4", datasets=source) == 0
    assert seen[0]["num_processes"] == 4 and seen[0]["accelerate_config"].endswith("zero2.yaml")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dataset_kwargs": {"add_special_tokens": False}}, "'add_special_tokens'"),
        ({"loss_type": "nlll"}, "`loss_type` is 'nlll'"),
        ({"packing_strategy": "ffd"}, "`packing_strategy`"),
        ({"truncation_mode": "keep_middle"}, "`truncation_mode`"),
        ({"load_in_4bit": True}, "`load_in_4bit` is on"),
        ({"dataset_streaming": True, "max_steps": -1}, "`max_steps`"),
        ({"label_smoothing_factor": 0.1}, "`label_smoothing_factor` is set"),
        ({"max_seq_length": 64}, "unknown key 'max_seq_length'"),
        ({"chat_template_path": "no/such"}, "no/such"),
        ({"eos_token": "<nope>"}, "<nope>"),
        ({"dtype": "float31"}, "float31"),
        ({"attn_implementation": "flashy"}, "flashy"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_had_is_named(
    changes: dict[str, Any], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(folder, dataset_name=str(folder / "data/train.jsonl"), **changes) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]
