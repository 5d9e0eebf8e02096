"""Process reward models: where steps end, the loss at them, metrics, scoring and refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from data_fixtures import CHATML, byte_tokenizer
from laws.runs import FIELDS, as_prm, as_reward, prm, run, scratch
from peft import LoraConfig
from pool import POOL
from strategies import STRATEGIES, clean
from tiny import tiny_model, token_rows
from transformers import AutoModelForTokenClassification

from posttrain import PRMConfig, PRMTrainer
from posttrain.cli.main import main
from posttrain.data.stepwise import StepOptions, prepare_steps
from posttrain.errors import ConfigError, DataError, EmptyDataError, ModelError
from posttrain.trainer.prm import step_metrics

TOKENIZER = byte_tokenizer(template=CHATML)
ROW = {"prompt": "3*4+1=", "completions": ["3*4=12", "12+1=14"], "labels": [True, False]}


def trained(model: Any, rows: list[dict[str, Any]], **fields: Any) -> PRMTrainer:
    fields = FIELDS | {"learning_rate": 0.01, "output_dir": scratch()} | fields
    return PRMTrainer(model, PRMConfig(**fields), train_dataset=rows, processing_class=TOKENIZER)


def prepared(rows: list[dict[str, Any]], **options: Any) -> tuple[list[tuple[str, list[float]]], Any]:
    found, report = prepare_steps(rows, TOKENIZER, StepOptions(**options))
    return [(TOKENIZER.decode(row["input_ids"]), row["weights"]) for row in found], report


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_a_step_is_judged_at_its_separator():
    (text, weights), *_ = prepared([ROW | {"sample_weight": 2.0}])[0]
    assert text == "3*4+1=3*4=12\n12+1=14\n"
    assert {i: w for i, w in enumerate(weights) if w} == {12: 2.0, 20: -2.0}


def test_the_last_token_of_a_longer_separator():
    (text, weights), *_ = prepared([ROW], separator=" ок")[0]  # Cyrillic: five bytes
    assert text.startswith("3*4+1=3*4=12 ок12+1")
    assert [i for i, w in enumerate(weights) if w] == [16, 28]


def test_a_chat_is_rendered_up_to_the_answer():
    (text, weights), *_ = prepared([ROW | {"prompt": [{"role": "user", "content": "3*4+1?"}]}])[0]
    assert text == "<|im_start|>user\n3*4+1?<|im_end|>\n<|im_start|>assistant\n3*4=12\n12+1=14\n"
    assert [w for w in weights if w] == [1.0, -1.0] and weights[-1] == -1.0


def test_ids_of_a_step_do_not_depend_on_those_that_follow():
    """A tokenizer that writes two newlines as one token."""
    rows = [
        {"prompt": "a", "completions": [*steps], "labels": [True] * len(steps)} for steps in (["b"], ["b", "\n\nc"])
    ]
    tokenizer = byte_tokenizer(merges=[("Ċ", "Ċ")])
    one, two = (row["input_ids"] for row in prepare_steps(rows, tokenizer, StepOptions())[0])
    assert two[: len(one)] == one


def test_ids_that_come_tokenized():
    found, report = prepare_steps(
        [{"input_ids": [5, 6, 7, 8, 9], "labels": [-100, -100, 1, -100, 0]}], TOKENIZER, StepOptions(max_length=4)
    )
    assert found[0]["input_ids"] == [5, 6, 7] and found[0]["weights"] == [0.0, 0.0, 1.0]
    assert (report.steps, report.steps_cut, report.tokens) == (1, 1, 3)


def test_what_is_cut_is_counted():
    found, report = prepared([ROW, ROW | {"sample_weight": 0.0}], max_length=20)
    assert found == [("3*4+1=3*4=12\n", [0.0] * 12 + [1.0])]
    assert report.summary() == (
        "train: 1 of 2 rows, 13 tokens; 1 steps, 1 correct; 2 steps beyond the limit dropped; 1 rows without a step "
        "left dropped; only one class: nothing tells the model what is correct from what is not"
    )
    assert prepared([ROW], max_completion_length=7)[0] == found
    last = prepared([ROW], last_only=True)[0]
    assert [(i, w) for i, w in enumerate(last[0][1]) if w] == [(20, -1.0)]
    with pytest.raises(EmptyDataError, match="in none of its 1 rows is a step left"):
        prepared([ROW], last_only=True, max_length=20)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"labels": [True]}, "2 steps and 'labels' 1"),
        ({"labels": [1, 2]}, "write a list of true and false"),
        ({"completions": "3*4=12"}, "write a list of texts, one a step"),
        ({"prompt": None}, "column 'prompt'"),
        ({"sample_weight": -1.0}, "sample_weight"),
    ],
)
def test_rows_that_are_refused(row: dict[str, Any], message: str):
    with pytest.raises(DataError, match=message):
        prepared([ROW | row])


def test_columns_that_are_refused():
    with pytest.raises(DataError, match="rows need 'prompt', 'completions'"):
        prepared([{"prompt": "a", "completion": "b", "label": True}])
    with pytest.raises(DataError, match="write 1 or 0 where a step ends"):
        prepared([{"input_ids": [5, 6], "labels": [5, 6]}])


# ---- loss and metrics ------------------------------------------------------------------------------------------------


def test_metrics_by_hand():
    logits, correct = torch.tensor([[0.0, 2.0], [0.0, 1.0], [3.0, 0.0]]), torch.tensor([True, False, False])
    found = {name: float(mean.total) / mean.weight for name, mean in step_metrics(logits, correct).items()}
    p, q, r = (1 / (1 + math.exp(-x)) for x in (2.0, 1.0, -3.0))
    assert found == pytest.approx(
        {"accuracy": 2 / 3, "accuracy/correct": 1.0, "accuracy/incorrect": 0.5, "confidence": (p + q + 1 - r) / 3,
         "brier": ((1 - p) ** 2 + q**2 + r**2) / 3}
    )  # fmt: skip
    assert "accuracy/correct" not in step_metrics(logits[1:], correct[1:])


def test_a_rule_is_learned():
    """A step that ends in "+" is correct: held-out accuracy of both classes well above chance."""
    rows = [
        {"prompt": f"{i:02d}:", "completions": [f"{n}{sign}" for n, sign in zip("123", signs, strict=True)],
         "labels": [sign == "+" for sign in signs]}
        for i in range(20)
        for signs in ("+-+", "-+-", "--+", "++-")
    ]  # fmt: skip
    trainer = PRMTrainer(
        as_prm(tiny_model("qwen3")),
        PRMConfig(**FIELDS | {"optim": "adamw_torch", "learning_rate": 3e-3, "max_steps": 40, "max_grad_norm": 1.0,
                              "per_device_train_batch_size": 16, "logging_steps": 40, "output_dir": scratch()}),
        train_dataset=[row for i, row in enumerate(rows) if i % 5],
        eval_dataset=[row for i, row in enumerate(rows) if i % 5 == 0],
        processing_class=TOKENIZER,
    )  # fmt: skip
    trainer.train()
    found = trainer.evaluate()
    assert found["eval_accuracy/correct"] > 0.8 and found["eval_accuracy/incorrect"] > 0.8


# ---- models ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("qwen3").save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


def test_models_of_another_task():
    with pytest.raises(ModelError, match="has no head of labels; give its name, or load it with AutoModelForTokenC"):
        trained(tiny_model("qwen3"), [ROW])
    with pytest.raises(ModelError, match="num_labels=2"):
        trained(as_reward(tiny_model("qwen3")), [ROW])


@pytest.mark.parametrize(("field", "value"), [("max_length", 0), ("max_completion_length", 0), ("step_separator", "")])
def test_fields_that_are_refused(field: str, value: Any):
    with pytest.raises(ConfigError, match=f"`{field}` is"):
        PRMConfig(**FIELDS | {"output_dir": scratch(), field: value})


# ---- scoring ---------------------------------------------------------------------------------------------------------


def scored(model: str, tmp_path: Path, rows: list[dict[str, Any]], *more: str) -> list[dict[str, Any]]:
    data, out = tmp_path / "rows.jsonl", tmp_path / "rewards.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    line = ["score", "--model_name_or_path", model, "--dataset_name", str(data), "--output_file", str(out), *more]
    assert main([*line, "--use_cpu", "true"]) == 0
    return [json.loads(text) for text in out.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("adapted", [False, True])
def test_scores_are_probabilities_at_the_ids_of_training(saved: str, tmp_path: Path, adapted: bool):
    args = PRMConfig(**FIELDS | {"learning_rate": 0.05, "output_dir": str(tmp_path / "judge")})
    config = LoraConfig(r=4, target_modules=["q_proj"]) if adapted else None
    rows = [ROW, ROW | {"prompt": "12+2=", "completions": ["14"], "labels": [True]}]
    trainer = PRMTrainer(saved, args, train_dataset=rows, processing_class=TOKENIZER, peft_config=config)
    trainer.train()
    trainer.save_model()
    unlabelled = [{name: row[name] for name in ("prompt", "completions")} for row in rows]
    found = scored(str(args.output_dir), tmp_path, unlabelled, "--max_tokens_per_forward", "1")
    judge = trainer.model.eval()
    for line, row in zip(found, prepare_steps(rows, TOKENIZER, StepOptions())[0], strict=True):
        with torch.no_grad():
            logits = judge(input_ids=torch.tensor([row["input_ids"]])).logits[0]
        at = [i for i, weight in enumerate(row["weights"]) if weight]
        assert line["step_rewards"] == pytest.approx(logits.softmax(-1)[at, 1].tolist(), abs=1e-4)
    cut = scored(str(args.output_dir), tmp_path, unlabelled, "--max_length", "14")
    assert [[x is None for x in line["step_rewards"]] for line in cut] == [[False, True], [False]]


def test_scoring_refuses_another_judge(saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    as_reward(tiny_model("qwen3")).save_pretrained(tmp_path / "reward")
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps(ROW) + "\n")
    line = ["score", "--model_name_or_path", str(tmp_path / "reward"), "--dataset_name", str(data)]
    assert main([*line, "--output_file", str(tmp_path / "x.jsonl")]) == 2
    assert "which is no process reward model" in capsys.readouterr().err


# ---- several ranks ---------------------------------------------------------------------------------------------------


def uneven(strategy: str | None, **fields: Any) -> list[float]:
    """Five rows, two passes: the last step has one."""
    settings = STRATEGIES[strategy] if strategy else {}
    with clean():
        return run(prm(rows=token_rows(5), max_steps=-1, num_train_epochs=2, **fields, **settings)).losses


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero3"])
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
    data.write_text("".join(json.dumps(ROW) + "\n" for _ in range(4)), encoding="utf-8")
    line = ["prm", "--model_name_or_path", saved, "--dataset_name", str(data), "--output_dir", str(out)]
    line += ["--max_steps", "1", "--logging_steps", "1", "--report_to", "none", "--use_cpu", "true", "--bf16", "false"]
    assert main([*line, "--step_separator", ""]) == 2
    assert "`step_separator` is empty" in capsys.readouterr().err
    assert main([*line, "--dry_run"]) == 0
    assert not out.exists()
    assert main(line) == 0
    assert AutoModelForTokenClassification.from_pretrained(out).config.num_labels == 2
