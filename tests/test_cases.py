"""Acceptance cases within the engine's reach, with their numbers. C01: test_attention; C24 and C76: test_engine."""

from __future__ import annotations

import logging
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_fixtures import CHATML, byte_tokenizer
from datasets import Dataset, Features, List, Value
from laws.runs import FIELDS, Run, bit_equal, run, same, scratch, sft
from peft import LoraConfig, PeftModel
from tiny import SHAPE, tiny_model, token_rows
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from posttrain import SFTConfig, SFTTrainer
from posttrain.data.forest import build_forest
from posttrain.data.sampling import RowItems
from posttrain.errors import ConfigError, DataError, EmptyDataError, ModelError
from posttrain.model.padding import pad_rows
from posttrain.types import Row, TokenBatch

LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"]}


def tokens(*rows: list[int], masked: int = 0) -> Dataset:
    """Rows of token ids, the first `masked` tokens of each not trained."""
    return Dataset.from_list([{"input_ids": ids, "labels": [-100] * masked + ids[masked:]} for ids in rows])


def text_trainer(rows: list[dict[str, Any]], **fields: Any) -> SFTTrainer:
    """A trainer on text or chats, one token a byte."""
    fields = {**FIELDS, "output_dir": scratch(), **fields}
    tokenizer = byte_tokenizer(template=CHATML)
    return SFTTrainer(tiny_model("qwen3"), SFTConfig(**fields), train_dataset=rows, processing_class=tokenizer)


def first_batch(trainer: Any) -> TokenBatch:
    return next(iter(trainer.get_train_dataloader()))["batch"]


def prepared(trainer: Any) -> list[dict[str, Any]]:
    return list(trainer.train_dataset.rows)


# ---- models whose losses are chosen ----------------------------------------------------------------------------------


def dial_model(losses: dict[int, float]) -> Any:
    """A model that predicts the same distribution everywhere: token t costs `losses[t]`, the others share the rest."""
    model = tiny_model("qwen3", tie_word_embeddings=False)
    head = torch.nn.Linear(32, 300)
    rest = 1 - sum(math.exp(-loss) for loss in losses.values())
    with torch.no_grad():
        head.weight.zero_()
        head.bias.fill_(math.log(rest / (300 - len(losses))))
        for token, loss in losses.items():
            head.bias[token] = -loss
    model.lm_head = head
    return model


DIAL = {10: 5.0, 11: 4.0, 12: 3.0, 13: 2.0, 14: 1.0}


def dial_rows(*counts_and_tokens: tuple[int, int]) -> Dataset:
    """e.g. (2, 11) -> a row of two targets that cost 4 each."""
    return tokens(*([3] + [token] * count for count, token in counts_and_tokens))


def entropy_model(ids: list[int], entropies: list[float]) -> Any:
    """A model whose distribution after token `ids[i]` has the entropy `entropies[i]`: nothing but the token matters."""
    model = tiny_model("qwen3", tie_word_embeddings=False)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name or "embed" in name or "lm_head" in name:
                weight.zero_()
        for i, (token, entropy) in enumerate(zip(ids, entropies, strict=True)):
            model.model.embed_tokens.weight[token, i] = 1.0
            model.lm_head.weight[0, i] = peak(entropy) / math.sqrt(32)
    return model


def peak(entropy: float) -> float:
    """The logit of one token, over 299 zeros, that gives this entropy."""
    low, high = 0.0, 30.0
    for _ in range(80):
        z = torch.zeros(300, dtype=torch.float64)
        z[0] = (low + high) / 2
        p = torch.softmax(z, 0)
        low, high = (z[0].item(), high) if -(p * p.log()).sum() > entropy else (low, z[0].item())
    return low


# ---- data, masks, packing --------------------------------------------------------------------------------------------


def test_c02_the_first_token_of_a_packed_example_is_no_target():
    trainer = sft(rows=tokens([5, 6, 7], [8, 9]), packing=True)
    batch = first_batch(trainer)
    assert batch.targets.tolist() == [6, 7, 9]
    assert batch.input_ids[batch.read_from].tolist() == [5, 6, 8]


def test_c03_boundaries_survive_the_loader():
    trainer = sft(rows=tokens([5, 6, 7], [8, 9]), packing=True)
    assert trainer.args.remove_unused_columns
    batch = first_batch(trainer)
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert batch.segments.parent == (-1, -1)


def test_c05_overflow_is_accounted_for(capsys):
    rows = tokens([3] * 6, [4] * 2, [5] * 3, [6] * 2)
    trainer = SFTTrainer(
        tiny_model("qwen3"),
        SFTConfig(**FIELDS, output_dir=scratch(), packing=True, max_length=5),
        train_dataset=rows,
        processing_class=byte_tokenizer(),
    )
    assert len(trainer.train_dataset) == 3
    assert sum(trainer.train_dataset.costs) == 12
    assert "1 token cut from 1 row" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "kept", "targets", "said"),
    [
        ({}, 12, 8, "1 token cut from 1 row"),
        ({"overflow": "drop"}, 7, 4, "3 of 4 rows, 7 tokens, 4 targets; 1 row longer than `max_length` dropped"),
        # 6 tokens in two pieces of 5 and 2: the second begins with the last token of the first, as context.
        ({"overflow": "split"}, 14, 9, "1 row split in 2 pieces"),
        ({"packing_strategy": "bfd_split"}, 14, 9, "1 row split in 2 pieces"),
        ({"packing": False, "overflow": "split"}, 14, 9, "1 row split in 2 pieces"),
        ({"packing_strategy": "wrapped"}, 14, 9, "4 of 4 rows, 13 tokens"),
    ],
)
def test_c05_each_policy_keeps_and_counts(capsys, fields, kept, targets, said):
    rows = tokens([3] * 6, [4] * 2, [5] * 3, [6] * 2)
    trainer = SFTTrainer(
        tiny_model("qwen3"),
        SFTConfig(**{**FIELDS, "output_dir": scratch(), "packing": True, "max_length": 5, **fields}),
        train_dataset=rows,
        processing_class=byte_tokenizer(),
    )
    laid = [row for item in map(trainer.train_dataset.__getitem__, range(len(trainer.train_dataset))) for row in item]
    assert all(cost <= 5 for cost in trainer.train_dataset.costs)
    assert sum(len(row.input_ids) for row, _ in laid) == kept
    assert len(build_forest([row for row, _ in laid]).targets) == targets
    assert said in capsys.readouterr().err


def test_c05_a_long_row_is_an_error_where_that_is_asked():
    with pytest.raises(DataError, match="Row 1 of the train set: 6 tokens, and `max_length` is 5 with `overflow`"):
        SFTTrainer(
            tiny_model("qwen3"),
            SFTConfig(**{**FIELDS, "output_dir": scratch(), "max_length": 5, "overflow": "error"}),
            train_dataset=tokens([4] * 2, [3] * 6),
            processing_class=byte_tokenizer(),
        )


CHATS = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]},
    {
        "messages": [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "4"},
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": "Yes."},
        ]
    },
]


def test_c06_masks_survive_packing():
    settings: dict[str, Any] = {"assistant_only_loss": True, "max_length": 200, "max_steps": 1}
    loose = text_trainer(CHATS, per_device_train_batch_size=2, train_sampling_strategy="sequential", **settings)
    packed = text_trainer(CHATS, per_device_train_batch_size=1, packing=True, **settings)
    one, other = first_batch(loose), first_batch(packed)
    assert sorted(one.targets.tolist()) == sorted(other.targets.tolist())
    # The turns "Yo", "4" and "Yes.", each with its stop token.
    assert len(one.targets) == 3 + 2 + 5
    same(run(loose), run(packed))


def test_c08_an_assistant_turn_cut_by_the_limit_keeps_its_targets():
    row = {"input_ids": list(range(3, 19)), "assistant_masks": [0] * 6 + [1] * 10}
    trainer = text_trainer([row], max_length=10, assistant_only_loss=True)
    assert first_batch(trainer).targets.tolist() == [9, 10, 11, 12]


def test_c09_rows_with_nothing_left_to_train_are_dropped_and_counted(capsys):
    short, long = {"prompt": "abc", "completion": "de"}, {"prompt": "a" * 10, "completion": "de"}
    trainer = text_trainer([short] * 7 + [long] * 3, max_length=10)
    assert len(trainer.train_dataset) == 7
    assert "3 rows without targets dropped" in capsys.readouterr().err
    with pytest.raises(EmptyDataError, match=r"all 10 rows.*`max_length`=10"):
        text_trainer([long] * 10, max_length=10)


def weighted_items(*rows: tuple[list[int], list[float]]) -> RowItems:
    """Prepared rows, with rows that preparation would have dropped."""
    kinds = {"input_ids": List(Value("int32")), "weights": List(Value("float32")), "source": Value("int64")}
    columns = {"input_ids": [r[0] for r in rows], "weights": [r[1] for r in rows], "source": list(range(len(rows)))}
    return RowItems(Dataset.from_dict(columns, features=Features(kinds)))


MASKED = ([5, 6, 7, 8], [0.0] * 4)
FIVE = ([9, 10, 11, 12, 13, 14], [0.0] + [1.0] * 5)


def windows(*rows: tuple[list[int], list[float]], **settings: Any) -> Run:
    trainer = sft(per_device_train_batch_size=1, train_sampling_strategy="sequential", **settings)
    trainer.train_dataset = weighted_items(*rows)
    return run(trainer)


@pytest.mark.parametrize("order", [(MASKED, FIVE), (FIVE, MASKED)])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_c10_a_masked_micro_batch_counts_nothing(order, layout):
    alone = windows(FIVE, max_steps=1, layout=layout)
    both = windows(*order, max_steps=1, gradient_accumulation_steps=2, layout=layout)
    same(alone, both)


def test_c10_a_masked_window_leaves_the_weights_and_is_flagged(caplog):
    before = {n: p.clone() for n, p in tiny_model("qwen3").named_parameters()}
    with caplog.at_level(logging.WARNING):
        # Adam with weight decay, which moves weights whose gradient is zero.
        found = windows(MASKED, max_steps=1, optim="adamw_torch", weight_decay=0.5)
    assert all(torch.equal(p, before[n]) for n, p in found.weights.items())
    assert found.losses == [0.0]
    assert "step 1 has no targets" in caplog.text


def test_c11_padding_with_the_end_token_keeps_it_a_target():
    tokenizer = byte_tokenizer(pad=None)
    eos = tokenizer.eos_token_id
    rows = tokens([5, 6, eos], [7, eos])
    trainer = SFTTrainer(
        tiny_model("qwen3"),
        SFTConfig(**FIELDS | {"max_steps": 60, "optim": "adamw_torch", "learning_rate": 1e-2}, output_dir=scratch()),
        train_dataset=rows,
        processing_class=tokenizer,
    )
    assert trainer.processing_class.pad_token_id == eos
    batch = build_forest([Row([5, 6, eos], [0, 1, 1]), Row([7, eos], [0, 1])], share=False)
    assert batch.targets.tolist() == [6, eos, eos]
    assert sorted(first_batch(trainer).targets.tolist()) == [6, eos, eos]
    trainer.train()
    for prompt, rest in ([5], [6, eos]), ([7], [eos]):
        out = trainer.model.eval().generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=eos, pad_token_id=eos
        )
        assert out[0].tolist() == prompt + rest


def test_c13_a_template_that_ends_its_turn_is_left_alone():
    trainer = text_trainer(CHATS, max_length=200)
    for row, chat in zip(prepared(trainer), CHATS, strict=True):
        own = trainer.processing_class.apply_chat_template(chat["messages"], return_dict=True)["input_ids"]
        assert row["input_ids"] == own


def test_c16_prompts_are_counted_in_tokens():
    """The template call gives a mapping; its length is not that of the prompt."""
    rows = [
        {"prompt": [{"role": "user", "content": "x" * n}], "completion": [{"role": "assistant", "content": "ok"}]}
        for n in range(1, 21)
    ]
    trainer = text_trainer(rows)
    tokenizer = trainer.processing_class
    assert not isinstance(tokenizer.apply_chat_template(rows[0]["prompt"]), list)
    for prompt, row in zip((r["prompt"] for r in rows), prepared(trainer), strict=True):
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert row["weights"].index(1.0) == len(ids)


@pytest.mark.parametrize(
    ("side", "index", "columns"),
    [("right", [[0, 1, 2], [3, 4, -1]], [0, 1, 0]), ("left", [[0, 1, 2], [-1, 3, 4]], [0, 1, 1])],
)
def test_c21_the_padding_side_is_honoured_and_padding_is_no_target(side, index, columns):
    batch = build_forest([Row([5, 6, 7], [0, 1, 1]), Row([8, 9], [0, 1])], share=False)
    rows = pad_rows(batch, side)
    assert rows.index.tolist() == index
    assert rows.read_column.tolist() == columns
    assert (rows.index[rows.read_row, rows.read_column] == batch.read_from).all()


def test_c22_tokenized_rows_are_used_untouched():
    row = {"input_ids": [5, 6, 7, 8, 9], "labels": [-100, 6, -100, 8, 9]}
    (found,) = prepared(sft(rows=Dataset.from_list([row])))
    assert found == {"input_ids": [5, 6, 7, 8, 9], "weights": [0.0, 1.0, 0.0, 1.0, 1.0], "source": 0}


def test_c23_extra_columns_reach_nothing():
    rows = [{**row, "id": f"r{i}", "difficulty": 0.5, "weight": 2} for i, row in enumerate(token_rows(4))]
    trainer = sft(rows=Dataset.from_list(rows), max_steps=2)
    assert set(next(iter(trainer.get_train_dataloader()))) == {"batch"}
    same(run(trainer), run(sft(rows=token_rows(4), max_steps=2)), tolerance=0.0)


# ---- loss numerics and metrics ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "accumulation"), [(1, 4), (2, 2), (4, 1)])
def test_c25_the_mean_is_over_tokens(size, accumulation):
    """Rows of 1, 2, 3 and 10 targets that cost 4, 3, 2 and 1 each: 26/16."""
    rows = dial_rows((1, 11), (2, 12), (3, 13), (10, 14))
    found = run(
        sft(
            model=dial_model(DIAL),
            rows=rows,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
        )
    )
    assert found.losses == pytest.approx([1.625], rel=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 7, 17, 64])
def test_c26_the_chunk_is_a_memory_knob(chunk):
    """17 targets; the loss is not multiplied by the number of chunks, and there are 17 scores."""
    rows = dial_rows((17, 13))
    trainer = sft(model=dial_model(DIAL), rows=rows, head_chunk_tokens=chunk, max_steps=1)
    batch = first_batch(trainer)
    with torch.no_grad():
        assert trainer.model(token_batch=batch).logps.tolist() == pytest.approx([-2.0] * 17, rel=1e-6)
    assert run(trainer).losses == pytest.approx([2.0], rel=1e-6)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_c28_eval_loss_whatever_the_batch_size(size):
    """Rows of 1 … 5 targets that cost 5 … 1 each: 35/15."""
    rows = dial_rows((1, 10), (2, 11), (3, 12), (4, 13), (5, 14))
    trainer = sft(model=dial_model(DIAL), eval_rows=rows, per_device_eval_batch_size=size)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(35 / 15, rel=1e-6)


@pytest.mark.parametrize("loss_type", [None, "nll", "chunked_nll", "dft"])
def test_c29_every_loss_works_in_evaluation(loss_type):
    rows = dial_rows((2, 13))
    trainer = sft(model=dial_model(DIAL), eval_rows=rows, loss_type=loss_type)
    expected = 2 * math.exp(-2) if loss_type == "dft" else 2.0
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_c30_entropy_is_measured_where_the_loss_is():
    """2 prompt and 4 completion tokens: the mean over positions 2 to 5."""
    ids, entropies = [20, 21, 22, 23, 24, 25], [0.4, 0.9, 1.2, 0.6, 0.3, 2.0]
    trainer = sft(model=entropy_model(ids, entropies), rows=tokens(ids, masked=2), max_steps=1)
    assert run(trainer).logs[0]["entropy"] == pytest.approx(0.75, abs=1e-4)


def test_c31_accuracy_is_a_ratio_of_sums():
    """1 of 1 and 0 of 9 right: 0.10, in training and in evaluation."""
    rows = dial_rows((1, 14), (9, 10))
    settings: dict[str, Any] = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 1}
    trainer = sft(model=dial_model(DIAL), rows=rows, eval_rows=rows, per_device_eval_batch_size=1, **settings)
    assert trainer.evaluate()["eval_mean_token_accuracy"] == pytest.approx(0.1)
    assert run(trainer).logs[0]["mean_token_accuracy"] == pytest.approx(0.1)


def moe_model() -> Any:
    shape = SHAPE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**shape))


def test_c32_balance_loss_of_experts():
    settings: dict[str, Any] = {"max_steps": 1, "router_aux_loss_coef": 0.5}
    one = run(sft(model=moe_model(), per_device_train_batch_size=4, **settings))
    four = run(sft(model=moe_model(), per_device_train_batch_size=1, gradient_accumulation_steps=4, **settings))
    same(one, four)
    assert one.logs[0]["aux_loss"] > 0
    router = "model.layers.0.mlp.gate.weight"
    without = run(sft(model=moe_model(), per_device_train_batch_size=4, max_steps=1, router_aux_loss_coef=0.0))
    assert not torch.allclose(one.gradients[router], without.gradients[router])


def test_c32_coefficient_zero_and_dense_models_are_plain():
    plain = run(sft(model=moe_model(), per_device_train_batch_size=4, max_steps=1, router_aux_loss_coef=0.0))
    accumulated = run(
        sft(
            model=moe_model(),
            per_device_train_batch_size=1,
            gradient_accumulation_steps=4,
            max_steps=1,
            router_aux_loss_coef=0.0,
        )
    )
    same(plain, accumulated)
    same(run(sft(router_aux_loss_coef=0.0)), run(sft(router_aux_loss_coef=0.5)), tolerance=0.0)


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_path", [True, False])
def test_c68_resuming_through_the_config(as_path, tmp_path):
    settings: dict[str, Any] = {
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 3,
        "lr_scheduler_type": "linear",
        "save_total_limit": None,
        "output_dir": str(tmp_path),
    }
    whole = run(sft(**settings))
    (tmp_path / "checkpoint-6").rename(tmp_path / "elsewhere")
    where = str(tmp_path / "checkpoint-3") if as_path else "true"
    trainer = sft(resume_from_checkpoint=where, **settings)
    trainer.train()
    logs = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["step"] for line in logs] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in logs] == whole.losses
    assert [line["learning_rate"] for line in logs] == [line["learning_rate"] for line in whole.logs]
    assert trainer._initial_global_step == 3


def test_c68_a_missing_checkpoint_is_an_error(tmp_path):
    missing = str(tmp_path / "checkpoint-9")
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint.*checkpoint-9"):
        sft(resume_from_checkpoint=missing).train()
    with pytest.raises(ConfigError, match="resume_from_checkpoint"):
        sft(output_dir=str(tmp_path)).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("adapted", [False, True])
def test_c70_building_a_trainer_draws_nothing(adapted):
    model, rows = tiny_model("qwen3"), token_rows()
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    sft(model=model, rows=rows, peft_config=LoraConfig(**LORA) if adapted else None)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_c70_same_seeds_give_the_same_bits():
    """Whatever was drawn before, with dropout and a fresh adapter."""

    def once(noise: int) -> Run:
        torch.manual_seed(noise)
        random.seed(noise)
        return run(sft(peft_config=LoraConfig(**LORA, lora_dropout=0.3), optim="adamw_torch"))

    bit_equal(once(1), once(2))


def test_c71_a_frozen_adapter_is_refused_before_step_1(tmp_path):
    wrapped = PeftModel(tiny_model("qwen3"), LoraConfig(**LORA))
    wrapped.save_pretrained(tmp_path)
    frozen = PeftModel.from_pretrained(tiny_model("qwen3"), str(tmp_path))
    with pytest.raises(ModelError, match=r"frozen.*is_trainable=True"):
        sft(model=frozen)


def test_c72_every_adapter_layer_learns_under_checkpointing():
    def once(checkpointing: bool) -> Run:
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules="all-linear")
        return run(sft(peft_config=config, gradient_checkpointing=checkpointing, max_steps=1))

    on, off = once(True), once(False)
    ups = {n: p for n, p in on.weights.items() if "lora_B" in n}
    assert len(ups) == 2 * 7
    assert all(p.abs().max() > 0 for p in ups.values())
    same(on, off)


BARE = """
import importlib.machinery
import sys

hidden = {"vllm", "deepspeed", "bitsandbytes", "flash_attn", "liger_kernel", "peft"}
own = importlib.machinery.PathFinder.find_spec


def find_spec(cls, name, path=None, target=None):
    return None if name.split(".")[0] in hidden else own(name, path, target)


importlib.machinery.PathFinder.find_spec = classmethod(find_spec)
sys.path.insert(0, {tests!r})
from data_fixtures import byte_tokenizer
from tiny import tiny_model, token_rows
from posttrain import ModelConfig, SFTConfig, SFTTrainer, get_peft_config, get_quantization_config
from posttrain.errors import MissingExtraError

trainer = SFTTrainer(
    tiny_model("qwen3"),
    SFTConfig(output_dir={out!r}, max_steps=2, report_to="none"),
    train_dataset=token_rows(),
    processing_class=byte_tokenizer(),
)
trainer.train()
assert trainer.state.global_step == 2
for what, config, build in (
    ("peft", ModelConfig(use_peft=True), get_peft_config),
    ("bitsandbytes", ModelConfig(load_in_4bit=True), get_quantization_config),
):
    try:
        build(config)
    except MissingExtraError as error:
        assert what in str(error), error
    else:
        raise AssertionError(what)
print("bare install trains")
"""


@pytest.mark.slow
def test_c74_a_bare_install_trains_on_a_cpu(tmp_path):
    """Without any optional package; a missing one is named only when it is asked for."""
    script = BARE.replace("{tests!r}", repr(str(Path(__file__).parent))).replace("{out!r}", repr(str(tmp_path)))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "bare install trains" in done.stdout
