"""Reward models: where a reward is read, its loss, its metrics, adapters and refusals; cases C45 to C47."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from data_fixtures import CHATML, byte_tokenizer
from laws.runs import FIELDS, as_reward, reward, run, scratch
from peft import LoraConfig
from pool import POOL
from strategies import STRATEGIES, clean
from tiny import tiny_model, token_rows
from transformers import AutoModelForSequenceClassification

from posttrain import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from posttrain.cli.main import main
from posttrain.data.forest import build_forest, rows_of, select
from posttrain.data.pairs import PairOptions, prepare_pairs
from posttrain.errors import ConfigError, DataError, EmptyDataError, ModelError
from posttrain.loss.ranking import bradley_terry
from posttrain.trainer.reward import reward_metrics
from posttrain.types import Row, ScoreRequest

TOKENIZER = byte_tokenizer(template=CHATML)
AT_END = PairOptions(drop_long=True, at_end=True)


def trained(model: Any, rows: list[dict[str, Any]], tokenizer: Any = TOKENIZER, **fields: Any) -> RewardTrainer:
    fields = FIELDS | {"learning_rate": 0.01, "output_dir": scratch()} | fields
    return RewardTrainer(model, RewardConfig(**fields), train_dataset=rows, processing_class=tokenizer)


# ---- C45: the right token --------------------------------------------------------------------------------------------

CHATS = [
    {"prompt": [{"role": "user", "content": q}], "chosen": [{"role": "assistant", "content": a}],
     "rejected": [{"role": "assistant", "content": b}]}
    for q, a, b in (("2+2?", "4", "five, or so it seems"), ("Name a colour.", "blue is one", "no"))
]  # fmt: skip


def test_c45_a_reward_is_that_of_the_row_alone():
    """The padding token ends turns, inside the text and at its end; two pairs in one row."""
    tokenizer = byte_tokenizer(template=CHATML)
    tokenizer.pad_token = tokenizer.eos_token
    model = as_reward(tiny_model("qwen3", pad_token_id=257, eos_token_id=257))
    trainer = trained(model, CHATS, tokenizer)
    pairs, _ = prepare_pairs(CHATS, tokenizer, AT_END)
    assert all(row["input_ids"][-1] == row["input_ids"][row["weights"].index(1.0)] for row in pairs)
    batch = trainer.collator([trainer.train_dataset[0], trainer.train_dataset[1]])["batch"]
    model.eval()
    model.config.pad_token_id = None  # or transformers looks for the last token that is not padding
    with torch.no_grad():
        together = model(token_batch=batch, score_request=ScoreRequest())
        alone = [model(input_ids=torch.tensor([row["input_ids"]])).logits.item() for row in pairs]
    assert together.logps.tolist() == pytest.approx(alone, abs=1e-5)
    assert together.values.shape == (4, 1) and len(set(alone)) == 4


def test_read_outs_lie_at_their_own_tokens():
    """By hand: two responses behind one prompt, of which one is the other's beginning."""
    rows = [Row([5, 6, 7], [0.0, 0.0, 1.0]), Row([5, 6, 7, 8], [0.0, 0.0, 0.0, 1.0]), Row([9], [1.0])]
    batch = build_forest(rows, own=True, min_shared=1)
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 9]
    assert batch.read_from.tolist() == [2, 3, 4] and batch.targets.tolist() == [7, 8, 9]
    assert [row.weights for row in rows_of(batch)] == [row.weights for row in rows]
    part = select(batch, [1, 2])
    assert part.own and part.read_from.tolist() == [3, 4]


def test_c46_the_end_of_a_response_is_trained_and_read():
    rows, report = prepare_pairs([{"prompt": "2+2=", "chosen": "4", "rejected": "5"}], TOKENIZER, AT_END)
    for row, text in zip(rows, ("2+2=4", "2+2=5"), strict=True):
        assert row["input_ids"] == [*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id]
        assert row["weights"] == [0.0] * 5 + [1.0]
    assert report.tokens == 12


# ---- C47: the loss ---------------------------------------------------------------------------------------------------


def test_c47_centring_and_margin_by_hand():
    chosen, rejected = torch.tensor([1.0, 0.0]), torch.tensor([0.5, -1.0])
    plain, centred = bradley_terry(chosen, rejected), bradley_terry(chosen, rejected, None, 0.01)
    assert (centred - plain).mean().item() == pytest.approx(0.01625)
    assert plain.tolist() == pytest.approx([math.log1p(math.exp(-0.5)), math.log1p(math.exp(-1.0))])
    margin = bradley_terry(chosen, rejected, torch.tensor([0.5, 0.0]))
    assert margin.tolist() == pytest.approx([math.log(2.0), math.log1p(math.exp(-1.0))])


def test_metrics_by_hand():
    found = reward_metrics(torch.tensor([2.0, 0.0]), torch.tensor([0.0, 1.0]))
    values = {name: float(mean.total) / mean.weight for name, mean in found.items()}
    up, down = 1 / (1 + math.exp(-2.0)), 1 / (1 + math.exp(1.0))
    assert values == pytest.approx(
        {"accuracy": 0.5, "margin": 0.5, "mean_reward": 0.75, "min_reward": 0.0, "max_reward": 1.5,
         "confidence": (up + 1 - down) / 2, "brier": ((1 - up) ** 2 + (1 - down) ** 2) / 2}
    )  # fmt: skip


def test_a_rule_is_learned():
    """Whether the answer repeats the question's letter: held-out accuracy well above chance."""
    letters = "abcdefghij"
    rows = [
        {"prompt": f"{a}{b}:", "chosen": a * 3, "rejected": c * 3}
        for i, a in enumerate(letters)
        for b, c in ((letters[(i + 3) % 10], letters[(i + j) % 10]) for j in range(1, 10))
    ]
    trainer = RewardTrainer(
        as_reward(tiny_model("qwen3")),
        RewardConfig(**FIELDS | {"optim": "adamw_torch", "learning_rate": 3e-3, "max_steps": 60, "max_grad_norm": 1.0,
                                 "per_device_train_batch_size": 16, "logging_steps": 20, "output_dir": scratch()}),
        train_dataset=[row for i, row in enumerate(rows) if i % 5],
        eval_dataset=[row for i, row in enumerate(rows) if i % 5 == 0],
        processing_class=TOKENIZER,
    )  # fmt: skip
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] > 0.8


# ---- models and adapters ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("qwen3").save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


def test_a_name_gets_a_head_and_is_saved_with_it(saved: str):
    rows = [{"prompt": "a", "chosen": "b", "rejected": f"c{i}"} for i in range(4)]
    trainer = trained(saved, rows)
    assert trainer.model.score.weight.dtype == torch.float32
    start = trainer.model.score.weight.detach().clone()
    assert torch.equal(trained(saved, rows).model.score.weight, start)  # drawn from the seed
    trainer.train()
    trainer.save_model()
    again = AutoModelForSequenceClassification.from_pretrained(trainer.args.output_dir)
    assert again.config.num_labels == 1 and again.config.pad_token_id == TOKENIZER.pad_token_id
    assert torch.equal(again.score.weight, trainer.model.score.weight) and not torch.equal(again.score.weight, start)


def test_an_adapter_trains_the_head_too_and_comes_back(saved: str, capsys: pytest.CaptureFixture[str]):
    rows = [{"prompt": "a", "chosen": "b", "rejected": f"c{i}"} for i in range(4)]
    config = LoraConfig(r=4, target_modules=["q_proj"])
    args = RewardConfig(**FIELDS | {"learning_rate": 0.01, "output_dir": scratch()})
    trainer = RewardTrainer(saved, args, train_dataset=rows, processing_class=TOKENIZER, peft_config=config)
    names = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert any("score.modules_to_save" in name for name in names) and config.modules_to_save is None
    trainer.train()
    trainer.save_model()
    batch = trainer.collator([trainer.train_dataset[i] for i in range(3)])["batch"]
    again = trained(args.output_dir, rows)
    for each in (trainer.model, again.model):
        each.eval()
    with torch.no_grad():
        found, want = (each.model(token_batch=batch, score_request=ScoreRequest()).logps for each in (again, trainer))
    torch.testing.assert_close(found, want, rtol=0, atol=1e-6)
    capsys.readouterr()
    out = Path(scratch()) / "merged"
    assert main(["merge", "--model_name_or_path", args.output_dir, "--output_dir", str(out)]) == 0
    merged = AutoModelForSequenceClassification.from_pretrained(out)
    torch.testing.assert_close(merged.score.weight, trainer.model.get_base_model().score.weight.detach())


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2"])
def test_families(family: str):
    rows = [{"prompt_ids": [3, 4, 5], "chosen_ids": [6 + i, 7], "rejected_ids": [8, 9, 10 + i]} for i in range(4)]
    trainer = trained(as_reward(tiny_model(family)), rows)
    assert trainer.layout == "packed" and all(math.isfinite(loss) for loss in run(trainer).losses)


def test_bfloat16_products_leave_rewards_in_float32():
    rows = [{"prompt_ids": [3, 4, 5], "chosen_ids": [6 + i, 7], "rejected_ids": [8, 9, 10 + i]} for i in range(4)]
    trainer = trained(as_reward(tiny_model("qwen3")), rows, bf16=True, max_steps=1)
    trainer.train()
    batch = trainer.collator([trainer.train_dataset[0]])["batch"]
    with torch.no_grad():
        logps = trainer.model_wrapped(token_batch=batch, score_request=ScoreRequest()).logps
    assert logps.dtype == torch.float32 and not torch.equal(logps, logps.bfloat16().float())


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_models_of_another_task():
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    with pytest.raises(ModelError, match="has no head of labels; give its name, or load it with AutoModelForSequenceC"):
        trained(tiny_model("qwen3"), rows)
    two = as_reward(tiny_model("qwen3"))
    two.score = torch.nn.Linear(32, 2, bias=False)
    with pytest.raises(ModelError, match=r"gives 2 labels; .* num_labels=1"):
        trained(two, rows)
    with pytest.raises(ModelError, match="gives labels and no log-probabilities"):
        SFTTrainer(as_reward(tiny_model("qwen3")), SFTConfig(**FIELDS | {"output_dir": scratch()}),
                   train_dataset=token_rows(), processing_class=TOKENIZER)  # fmt: skip


def test_rows_that_are_refused_or_dropped(capsys: pytest.CaptureFixture[str]):
    model = as_reward(tiny_model("qwen3"))
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(ConfigError, match="'ref_chosen_logps', and a reward model has no reference"):
        trained(model, [row | {"ref_chosen_logps": 1.0, "ref_rejected_logps": 1.0}])
    with pytest.raises(DataError, match="pairs need 'chosen' and 'rejected'"):
        trained(model, [{"prompt": "a", "completion": "b"}])
    with pytest.raises(EmptyDataError, match="1 chosen and rejected are equal, and 1 are longer than `max_length` 8"):
        trained(model, [row | {"rejected": "b"}, row | {"chosen": "b" * 20}], max_length=8)
    trained(model, [row, row | {"rejected": "b"}, row | {"chosen": "b" * 20}], max_length=8)
    said = capsys.readouterr().err
    assert "1 of 3 pairs" in said and "1 with equal responses dropped; 1 longer than `max_length` dropped" in said


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_length", 1), ("center_rewards_coefficient", -1.0), ("center_rewards_coefficient", math.inf)],
)
def test_fields_that_are_refused(field: str, value: Any):
    with pytest.raises(ConfigError, match=f"`{field}` is {value}"):
        RewardConfig(**FIELDS | {"output_dir": scratch(), field: value})


# ---- posttrain score -------------------------------------------------------------------------------------------------


def scored(saved: str, tmp_path: Path, rows: list[dict[str, Any]], *more: str) -> list[dict[str, Any]]:
    data, out = tmp_path / "scored.jsonl", tmp_path / "rewards.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    line = ["score", "--model_name_or_path", saved, "--dataset_name", str(data), "--output_file", str(out), *more]
    assert main(line) == 0
    return [json.loads(text) for text in out.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("adapted", [False, True])
def test_scores_are_those_of_the_ids_in_training(saved: str, tmp_path: Path, adapted: bool):
    """Pairs and single rows, by the model's own pooled output; a pair that training drops has none."""
    args = RewardConfig(**FIELDS | {"learning_rate": 0.05, "output_dir": str(tmp_path / "judge")})
    config = LoraConfig(r=4, target_modules=["q_proj"]) if adapted else None
    trainer = RewardTrainer(saved, args, train_dataset=CHATS, processing_class=TOKENIZER, peft_config=config)
    trainer.train()
    trainer.save_model()
    folder = str(args.output_dir)
    found = scored(folder, tmp_path, [*CHATS, CHATS[0] | {"rejected": CHATS[0]["chosen"]}], "--use_cpu", "true")
    judge = trainer.model.eval()
    judge.config.pad_token_id = None
    pairs, _ = prepare_pairs(CHATS, TOKENIZER, AT_END)
    with torch.no_grad():
        want = [judge(input_ids=torch.tensor([row["input_ids"]])).logits.item() for row in pairs]
    assert [x for line in found[:2] for x in (line["chosen_reward"], line["rejected_reward"])] == pytest.approx(
        want, abs=1e-4
    )
    assert found[2] == {"row": 2, "chosen_reward": None, "rejected_reward": None, "margin": None}
    singles = [
        {"prompt": each["prompt"], "completion": each[side]} for each in CHATS for side in ("chosen", "rejected")
    ]
    alone = scored(folder, tmp_path, singles, "--use_cpu", "true", "--max_tokens_per_forward", "1")
    assert [line["reward"] for line in alone] == pytest.approx(want, abs=1e-4)
    cut = scored(folder, tmp_path, singles, "--use_cpu", "true", "--max_length", "40")
    lengths = [len(row["input_ids"]) for row in pairs]
    assert [line["reward"] is None for line in cut] == [length > 40 for length in lengths]


def test_scoring_refuses(saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    line = ["score", "--model_name_or_path", saved, "--dataset_name", str(data)]
    for more, message in (
        ([], "`output_file` is not set"),
        (["--output_file", str(tmp_path / "no" / "x.jsonl")], "its folder does not exist"),
        (["--output_file", str(tmp_path / "x.jsonl")], "which is no reward model"),
        (["--output_file", str(tmp_path / "x.jsonl"), "--max_length", "0"], "`max_length` is 0"),
    ):
        assert main([*line, *more]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "x.jsonl").exists()


# ---- several ranks ---------------------------------------------------------------------------------------------------


def uneven(strategy: str | None, **fields: Any) -> list[float]:
    """Five rows, two passes: the last step has one."""
    settings = STRATEGIES[strategy] if strategy else {}
    with clean():
        return run(reward(rows=token_rows(5), max_steps=-1, num_train_epochs=2, **fields, **settings)).losses


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2", "zero3"])
def test_ranks_are_one_process(strategy: str):
    if strategy.startswith("zero"):
        pytest.importorskip("deepspeed")
    one = uneven(None, per_device_train_batch_size=4)
    first, second = POOL.run(uneven, strategy=strategy, per_device_train_batch_size=2)
    assert len(one) == 4
    assert first == second == pytest.approx(one, rel=1e-4)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_command(saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data, out = tmp_path / "rows.jsonl", tmp_path / "out"
    rows = [{"prompt": f"{i}?", "chosen": f" good {i}", "rejected": " bad"} for i in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    line = ["reward", "--model_name_or_path", saved, "--dataset_name", str(data), "--output_dir", str(out)]
    line += ["--max_steps", "1", "--logging_steps", "1", "--report_to", "none", "--use_cpu", "true", "--bf16", "false"]
    assert main([*line, "--center_rewards_coefficient", "-1"]) == 2
    assert "`center_rewards_coefficient` is -1.0" in capsys.readouterr().err
    assert main([*line, "--dry_run"]) == 0
    assert not out.exists()
    assert main([*line, "--center_rewards_coefficient", "0.01"]) == 0
    assert AutoModelForSequenceClassification.from_pretrained(out).config.num_labels == 1
