"""DPO: pairs, references, losses and their refusals; cases C33 to C40."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_fixtures import CHATML, byte_tokenizer
from datasets import Dataset
from laws.runs import FIELDS, pairs_from, run, scratch
from peft import LoraConfig
from pool import POOL
from strategies import STRATEGIES, clean
from tiny import tiny_model, token_rows

from posttrain import DPOConfig, DPOTrainer
from posttrain.cli.main import main
from posttrain.data.pairs import PairOptions, prepare_pairs
from posttrain.errors import ConfigError, DataError, EmptyDataError, SelfCheckError
from posttrain.loss.preference import PREFERENCE
from posttrain.model.handle import StartingWeights, WithoutAdapter

TOKENIZER = byte_tokenizer(template=CHATML)
LN2 = math.log(2)
LORA: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "down_proj"]}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "reference"


def dpo(
    model: Any = None, rows: Any = None, ref_model: Any = None, peft_config: Any = None, **fields: Any
) -> DPOTrainer:
    eval_rows = fields.pop("eval_rows", None)
    fields = FIELDS | {"learning_rate": 0.1, "output_dir": scratch()} | fields
    return DPOTrainer(
        tiny_model("qwen3") if model is None else model,
        ref_model,
        DPOConfig(**fields),
        train_dataset=plain_pairs() if rows is None else rows,
        eval_dataset=eval_rows,
        processing_class=TOKENIZER,
        peft_config=peft_config,
    )


def plain_pairs(count: int = 8, seed: int = 0) -> Dataset:
    """Pairs of token ids without margins and weights."""
    return pairs_from(token_rows(count, seed=seed)).remove_columns(["margin", "sample_weight"])


def rows_of(rows: Any, **options: Any) -> tuple[list[list[int]], list[list[float]], Any]:
    found, report = prepare_pairs(rows, TOKENIZER, PairOptions(**options))
    return found["input_ids"], found["weights"], report


def ids(prompt: list[int], chosen: list[int], rejected: list[int]) -> dict[str, list[int]]:
    return {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_c33_chats_are_one_render_each():
    prompt = [{"role": "user", "content": "2+2?"}]
    row = {"prompt": prompt, "chosen": [{"role": "assistant", "content": "4"}]}
    row["rejected"] = [{"role": "assistant", "content": "five"}]
    tokens, weights, _ = rows_of([row])
    for found, weight, side in zip(tokens, weights, ("chosen", "rejected"), strict=True):
        text = TOKENIZER.apply_chat_template(prompt + row[side], tokenize=False)
        assert found == TOKENIZER(text, add_special_tokens=False)["input_ids"]
        opening = TOKENIZER.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        border = len(TOKENIZER(opening, add_special_tokens=False)["input_ids"])
        assert not any(weight[:border]) and weight[border] == 1.0
    implicit = [{"chosen": prompt + row["chosen"], "rejected": prompt + row["rejected"]}]
    assert rows_of(implicit)[:2] == (tokens, weights)


def test_text_with_and_without_prompt_ends_with_one_eos():
    tokens, weights, _ = rows_of([{"prompt": "ab", "chosen": "c", "rejected": "de"}])
    assert [len(each) for each in tokens] == [4, 5]
    assert weights == [[0, 0, 1, 1], [0, 0, 1, 1, 1]]
    assert all(each[-1] == TOKENIZER.eos_token_id for each in tokens)
    assert rows_of([{"chosen": "abc", "rejected": "abde"}])[0] == tokens


def test_c34_keep_end_of_rows_of_different_length():
    tokens, _, report = rows_of([ids([1], [5, 6], [5, 7, 8, 9, 10, 11, 12])], max_length=4, truncation_mode="keep_end")
    assert tokens == [[1, 5, 6], [1, 10, 11, 12]]
    assert (report.responses_cut, report.prompts_cut, report.tokens_cut) == (1, 0, 4)
    logs = run(dpo(rows=[ids([1], [5, 6], [5, 7, 8, 9, 10, 11, 12])], max_length=4, truncation_mode="keep_end")).logs
    assert all(math.isfinite(value) for line in logs for value in line.values())


def test_c35_prompt_gives_way_no_more_than_needed():
    tokens, weights, report = rows_of([ids(list(range(10, 18)), [1, 2, 3, 4], [5, 6])], max_length=10)
    assert tokens == [[12, 13, 14, 15, 16, 17, 1, 2, 3, 4], [12, 13, 14, 15, 16, 17, 5, 6]]
    assert weights[0] == [0.0] * 6 + [1.0] * 4
    assert (report.prompts_cut, report.responses_cut) == (1, 0)


def test_c36_rows_without_a_response_and_equal_ones_are_dropped_and_counted():
    rows = [ids([1, 2], [], [3]), ids([1, 2], [4], [4]), ids([1, 2], [4], [3]), ids([9] * 20, [4], [3])]
    tokens, _, report = rows_of(rows, max_length=2)
    assert tokens == [[2, 4], [2, 3], [9, 4], [9, 3]]
    assert (report.rows_in, report.rows_kept, report.rows_empty, report.rows_equal) == (4, 2, 1, 1)
    assert "1 with an empty response dropped; 1 with equal responses dropped" in report.summary()
    # Cut to one token each, the responses are the same.
    assert rows_of([*rows, ids([1], [4, 5], [4, 6])], max_length=2)[2].rows_equal == 2
    with pytest.raises(EmptyDataError, match="in 1 chosen and rejected are equal"):
        rows_of(rows[1:2])
    for loss in ("ipo", "sft", "simpo"):
        assert math.isfinite(run(dpo(rows=rows, max_length=2, loss_type=loss, max_steps=1)).losses[0])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "pairs need 'chosen' and 'rejected'"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "Row 0 of the train set: column 'rejected' holds None"),
        (ids([1], ["x"], [2]), "Row 0 of the train set: column 'chosen_ids'"),
        ({"chosen": "ab", "rejected": "ac", "margin": "much"}, "column 'margin' is 'much'"),
        ({"chosen": "ab", "rejected": "ac", "sample_weight": -1.0}, "column 'sample_weight' is -1.0"),
        ({"chosen": "ab", "rejected": "ac", "ref_chosen_logps": -1.0}, "give both, or none"),
    ],
)
def test_bad_rows(row: dict[str, Any], message: str):
    with pytest.raises(DataError, match=message):
        rows_of([row])


# ---- references ------------------------------------------------------------------------------------------------------


def test_c37_precomputed_is_live(cache: Path):
    settings: dict[str, Any] = {"max_steps": 5, "skip_self_checks": None}
    live, found = run(dpo(**settings)), run(dpo(precompute_ref_log_probs=True, **settings))
    assert live.losses[0] == pytest.approx(LN2, abs=1e-6)
    assert min(live.losses) < 0.9 * LN2
    assert found.losses == pytest.approx(live.losses, abs=1e-5)
    assert len(list(cache.iterdir())) == 1


def test_ld_alpha_is_in_the_precomputed_reference_too():
    live, found = (run(dpo(ld_alpha=0.3, precompute_ref_log_probs=on)) for on in (False, True))
    assert live.losses[0] == pytest.approx(LN2, abs=1e-6)
    assert found.losses == pytest.approx(live.losses, abs=1e-5)


def test_a_number_under_ld_alpha_is_of_the_pair_it_was_found_in():
    """How much of a response counts depends on its twin."""
    rows = [ids([1, 2], list(range(10, 20)), [3] * count) for count in (2, 6)]
    fields: dict[str, Any] = {"rows": rows, "ld_alpha": 0.3, "ref_model": tiny_model("qwen3", seed=1), "max_steps": 1}
    live, found = (run(dpo(precompute_ref_log_probs=on, **fields)) for on in (False, True))
    assert found.losses == pytest.approx(live.losses, abs=1e-5)


def test_cache_is_found_again_and_scored_anew_when_something_changed(cache: Path, capsys: pytest.CaptureFixture[str]):
    def scored(**settings: Any) -> str:
        dpo(precompute_ref_log_probs=True, **settings)
        line = next(line for line in "".join(capsys.readouterr()).splitlines() if "reference log-prob" in line)
        return line.partition("probabilities of ")[2].partition(" pairs")[0]

    rows = plain_pairs()
    assert scored(rows=rows) == "0 of 8"
    assert scored(rows=rows.shuffle(seed=1)) == "8 of 8"
    assert scored(rows=rows.select([3, 5])) == "2 of 2"
    assert scored(rows=plain_pairs(10)) == "8 of 10"
    assert scored(rows=rows, model=tiny_model("qwen3", seed=1)) == "0 of 8"
    assert scored(rows=rows, ld_alpha=0.5) == "0 of 8"
    assert scored(rows=rows, max_length=8) != "8 of 8"
    files = sorted(cache.iterdir())
    assert len(files) == 3 and all(file.suffix == ".npz" and len(file.stem) == 32 for file in files)
    for file in files:
        file.write_bytes(file.read_bytes()[:50])  # as a file system may leave it
    assert scored(rows=rows) == "0 of 8"
    with np.load(max(cache.iterdir(), key=lambda file: file.stat().st_size)) as held:
        assert len(held["keys"]) == 16


def test_c38_new_rows_after_training_with_precompute():
    trainer = dpo(precompute_ref_log_probs=True, eval_rows=plain_pairs(4, seed=2))
    run(trainer)
    assert trainer.reference is None
    assert trainer.evaluate()["eval_rewards/margins"] != 0
    with pytest.raises(ConfigError, match="these rows came after the reference was let go"):
        trainer.evaluate(plain_pairs(4, seed=3))
    adapted = dpo(precompute_ref_log_probs=True, peft_config=LoraConfig(**LORA))
    run(adapted)
    assert adapted.evaluate(plain_pairs(4, seed=3))["eval_rewards/margins"] != 0


@pytest.mark.parametrize("fresh", [True, False])
def test_c39_an_adapter_is_its_own_reference(fresh: bool):
    """A fresh one, whose base is the reference, and one that is trained further, which is not its base."""
    trainer = dpo(peft_config=LoraConfig(init_lora_weights=fresh, **LORA), skip_self_checks=None)
    assert isinstance(trainer.reference, WithoutAdapter if fresh else StartingWeights)
    logs = run(trainer).logs
    assert logs[0]["loss"] == pytest.approx(LN2, abs=1e-6)
    assert [logs[0][f"rewards/{name}"] for name in ("chosen", "rejected")] == pytest.approx([0, 0], abs=1e-6)
    assert logs[-1]["rewards/margins"] != 0
    verdicts = {found.name: found.verdict for found in trainer.selfchecks.findings}
    assert verdicts["reference"] == verdicts["accumulation"] == "pass"


def test_a_reference_that_is_not_the_start_fails_the_self_check():
    trainer = dpo(skip_self_checks=None)
    with torch.no_grad():
        trainer.reference.model.lm_head.weight.mul_(1.5)
    with pytest.raises(SelfCheckError, match="reference: a token's log-probability under policy and reference differs"):
        trainer.train()
    other = dpo(ref_model=tiny_model("qwen3", seed=1), skip_self_checks=None)
    assert run(other).losses[0] != pytest.approx(LN2, abs=1e-3)
    assert next(f.verdict for f in other.selfchecks.findings if f.name == "reference") == "skip"


def test_references_that_are_refused():
    model = tiny_model("qwen3")
    with pytest.raises(ConfigError, match="`ref_model` is the object given as `model`"):
        dpo(model=model, ref_model=model)
    with pytest.raises(ConfigError, match="`ref_model` is given and the model has an adapter"):
        dpo(ref_model=tiny_model("qwen3"), peft_config=LoraConfig(**LORA))
    with pytest.raises(ConfigError, match="compares with no reference; leave it out"):
        dpo(ref_model=tiny_model("qwen3"), loss_type="simpo")
    assert dpo(loss_type="simpo").reference is None


# ---- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [name for name, row in PREFERENCE.items() if not row.third])  # tpo: test_tpo.py
def test_every_loss_trains_and_accumulates(loss: str):
    """Also those that look at the whole optimizer batch: 1 × 4 = 4 × 1, in pieces."""
    more: dict[str, Any] = {"label_smoothing": 0.1} if loss == "exo_pair" else {}
    more["max_steps"] = 2
    one = run(dpo(loss_type=loss, per_device_train_batch_size=4, **more))
    four = run(
        dpo(
            loss_type=loss,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=4,
            max_tokens_per_forward=20,
            **more,
        )
    )
    assert four.losses == pytest.approx(one.losses, rel=1e-4)
    assert one.losses[0] != one.losses[-1]


def test_delta_of_bco_is_the_running_mean_of_rewards_and_is_resumed():
    folder = scratch()
    settings: dict[str, Any] = {"loss_type": "bco_pair", "max_steps": 4, "output_dir": folder}
    settings |= {"save_strategy": "steps", "save_steps": 2}
    trainer = dpo(**settings)
    whole = run(trainer)
    means = [(line["rewards/chosen"] + line["rewards/rejected"]) / 2 for line in whole.logs]
    assert trainer.delta.value == pytest.approx(sum(means) / 4, rel=1e-4)
    assert trainer.delta.count == 16
    resumed = dpo(**settings)
    assert run(resumed, resume=f"{folder}/checkpoint-2").losses == whole.losses
    assert resumed.delta.value == trainer.delta.value


def test_wpo_weighs_pairs_by_what_the_policy_would_write():
    plain, weighed = (run(dpo(use_weighting=on, max_steps=1)) for on in (False, True))
    assert 0 < weighed.losses[0] < plain.losses[0]


def test_c40_metrics_weigh_by_pairs():
    """Micro-batches of 3 pairs and of 1 = one of 4."""
    rows = plain_pairs(4)
    ref = tiny_model("qwen3", seed=1)
    settings: dict[str, Any] = {"rows": rows, "ref_model": ref, "max_steps": 1}
    one = run(dpo(per_device_train_batch_size=4, **settings)).logs[0]
    two = run(dpo(per_device_train_batch_size=3, gradient_accumulation_steps=2, **settings)).logs[0]
    assert 0 < one["rewards/accuracies"] <= 1
    for name in one:
        if name.startswith(("rewards/", "logps/", "lengths/")):
            assert two[name] == pytest.approx(one[name], rel=1e-4), name


def test_dropout_is_off_and_sharing_stays_on():
    model = tiny_model("qwen3", attention_dropout=0.5)
    trainer = dpo(model=model, peft_config=LoraConfig(lora_dropout=0.5, **LORA), skip_self_checks=None)
    assert trainer.collator.share
    assert run(trainer).losses[0] == pytest.approx(LN2, abs=1e-6)
    kept = dpo(model=tiny_model("qwen3", attention_dropout=0.5), disable_dropout=False)
    assert not kept.collator.share
    assert kept.model.config.attention_dropout == 0.5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_type": "sigmod"}, "Did you mean 'sigmoid'"),
        ({"loss_type": []}, "`loss_type` is empty"),
        ({"loss_type": ["sft", "sft"]}, "names 'sft' twice"),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, "has 1 weights, and `loss_type` 2 losses"),
        ({"label_smoothing": 0.1, "loss_type": "ipo"}, "label_smoothing=0.1 has no effect"),
        ({"discopop_tau": 0.1}, "discopop_tau=0.1 has no effect"),
        ({"f_alpha_divergence_coef": 0.9}, "set 'alpha_divergence'"),
        ({"ld_alpha": 1.5}, "must be between 0 and 1"),
        ({"beta": 0.0}, "must be above 0"),
        ({"max_length": 1}, "set 2 or more"),
        ({"sync_ref_model": True, "precompute_ref_log_probs": True}, "are both on"),
        ({"precompute_ref_log_probs": True, "loss_type": "orpo"}, "compares with no reference"),
        ({"ref_model_sync_steps": 4}, "`sync_ref_model` is off"),
        ({"precompute_ref_batch_size": 4}, "`precompute_ref_log_probs` is off"),
    ],
)
def test_fields_that_do_not_go_together(fields: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        DPOConfig(output_dir="unused", use_cpu=True, **fields)


def test_columns_that_would_have_no_effect():
    rows = plain_pairs().add_column("margin", [1.0] * 8)
    with pytest.raises(ConfigError, match="column 'margin', and `loss_type` ipo reads none"):
        dpo(rows=rows, loss_type="ipo")
    rows = plain_pairs().add_column("ref_chosen_logps", [-1.0] * 8).add_column("ref_rejected_logps", [-2.0] * 8)
    with pytest.raises(ConfigError, match="compares with no reference"):
        dpo(rows=rows, loss_type="simpo")
    logs = run(dpo(rows=rows, max_steps=1)).logs
    assert logs[0]["rewards/chosen"] == pytest.approx(0.1 * (logs[0]["logps/chosen"] + 1), rel=1e-4)


# ---- two processes ---------------------------------------------------------------------------------------------------


def uneven(strategy: str | None, **settings: Any) -> list[float]:
    """5 pairs, 4 a step: in the second step one rank has a pair and the other none."""
    fields = STRATEGIES[strategy] if strategy else {}
    with clean():
        return run(dpo(rows=plain_pairs(5), max_steps=-1, num_train_epochs=2, **fields, **settings)).losses


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2"])
def test_ranks_with_uneven_pairs_are_one_process(strategy: str):
    if strategy == "zero2":
        pytest.importorskip("deepspeed")
    settings = {"loss_type": ["sigmoid", "aot"]}  # one that looks at the whole optimizer batch too
    one = uneven(None, per_device_train_batch_size=4, **settings)
    first, second = POOL.run(uneven, strategy=strategy, per_device_train_batch_size=2, **settings)
    assert len(one) == 4
    assert first == second == pytest.approx(one, rel=1e-4)


def adapted(strategy: str | None, **settings: Any) -> list[float]:
    return uneven(strategy, peft_config=LoraConfig(init_lora_weights=False, **LORA), **settings)


def test_a_trained_adapter_under_fsdp2():
    torch.manual_seed(0)
    losses = POOL.run(adapted, strategy="fsdp2", per_device_train_batch_size=2)
    assert losses[0] == losses[1]
    assert losses[0][0] == pytest.approx(LN2, abs=1e-5)
    assert losses[0][-1] != losses[0][0]


def precomputed(strategy: str | None, cache: str) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POSTTRAIN_CACHE", cache)
        return uneven(strategy, per_device_train_batch_size=2, precompute_ref_log_probs=True)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_precompute_what_one_does(strategy: str, tmp_path: Path):
    one = uneven(None, per_device_train_batch_size=4)
    for losses in POOL.run(precomputed, strategy=strategy, cache=str(tmp_path)):
        assert losses == pytest.approx(one, rel=1e-4)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model, data, out = tmp_path / "model", tmp_path / "pairs.jsonl", tmp_path / "out"
    tiny_model("qwen3").save_pretrained(model)
    TOKENIZER.save_pretrained(model)
    rows = [{"prompt": f"{i}?", "chosen": f" good {i}", "rejected": " bad"} for i in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    line = ["dpo", "--model_name_or_path", str(model), "--dataset_name", str(data), "--output_dir", str(out)]
    line += ["--max_steps", "1", "--logging_steps", "1", "--report_to", "none", "--use_cpu", "true", "--bf16", "false"]
    assert main([*line, "--loss_type", "ipo", "--label_smoothing", "0.0"]) == 2
    assert "label_smoothing=0.0 has no effect on loss_type=['ipo']" in capsys.readouterr().err
    assert main([*line, "--dry_run"]) == 0
    assert not out.exists()
    assert main(line) == 0
    assert {"model.safetensors", "resolved_config.yaml", "environment.json"} <= {file.name for file in out.iterdir()}
    logged = [json.loads(text) for text in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert next(each["loss"] for each in logged if "loss" in each) == pytest.approx(LN2, abs=1e-6)
