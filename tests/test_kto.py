"""KTO: labelled responses, the rows they are compared with, losses and refusals; cases C33, C36, C37 and C40 to C44."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from data_fixtures import CHATML, byte_tokenizer
from families import build as build_family
from laws.runs import FIELDS, run, scratch
from peft import LoraConfig
from pool import POOL
from strategies import STRATEGIES, clean
from tiny import tiny_model, token_rows

from posttrain import KTOConfig, KTOTrainer
from posttrain.cli.main import main
from posttrain.data.mismatched import mismatched
from posttrain.data.pairs import PairOptions
from posttrain.data.unpaired import prepare_unpaired
from posttrain.errors import ConfigError, DataError, EmptyDataError, SelfCheckError

TOKENIZER = byte_tokenizer(template=CHATML)
LORA: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "down_proj"]}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "reference"


def ids(prompt: list[int], completion: list[int], label: bool, **more: Any) -> dict[str, Any]:
    return {"prompt_ids": prompt, "completion_ids": completion, "label": label, **more}


def labelled(count: int = 8, seed: int = 0) -> list[dict[str, Any]]:
    """Token rows whose every third is not desirable."""
    found = []
    for at, row in enumerate(token_rows(count, seed=seed)):
        border = max(1, sum(label == -100 for label in row["labels"]))
        found.append(ids(row["input_ids"][:border], row["input_ids"][border:], at % 3 != 1))
    return found


def kto(
    model: Any = None, rows: Any = None, ref_model: Any = None, peft_config: Any = None, **fields: Any
) -> KTOTrainer:
    eval_rows = fields.pop("eval_rows", None)
    fields = FIELDS | {"learning_rate": 0.1, "output_dir": scratch()} | fields
    return KTOTrainer(
        tiny_model("qwen3") if model is None else model,
        ref_model,
        KTOConfig(**fields),
        train_dataset=labelled() if rows is None else rows,
        eval_dataset=eval_rows,
        processing_class=TOKENIZER,
        peft_config=peft_config,
    )


def rows_of(rows: Any, **options: Any) -> tuple[list[list[int]], list[list[float]], Any]:
    found, report = prepare_unpaired(rows, TOKENIZER, PairOptions(**options))
    return found["input_ids"], found["weights"], report


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_c33_a_chat_is_one_render():
    prompt, answer = [{"role": "user", "content": "2+2?"}], [{"role": "assistant", "content": "4"}]
    tokens, weights, _ = rows_of([{"prompt": prompt, "completion": answer, "label": True}])
    text = TOKENIZER.apply_chat_template(prompt + answer, tokenize=False)
    assert tokens == [TOKENIZER(text, add_special_tokens=False)["input_ids"]]
    opening = TOKENIZER.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    border = len(TOKENIZER(opening, add_special_tokens=False)["input_ids"])
    assert not any(weights[0][:border]) and weights[0][border] == 1.0


def test_pairs_are_two_rows_each():
    pairs = [{"prompt": "a", "chosen": "b", "rejected": "cd"}, {"prompt": "e", "chosen": "f", "rejected": "g"}]
    found, report = prepare_unpaired(pairs, TOKENIZER, PairOptions())
    by_hand = [("a", "b", True), ("e", "f", True), ("a", "cd", False), ("e", "g", False)]
    plain = [{"prompt": p, "completion": c, "label": label} for p, c, label in by_hand]
    other, _ = prepare_unpaired(plain, TOKENIZER, PairOptions())
    key = lambda data: sorted(zip(data["input_ids"], [v[0] for v in data["values"]], strict=True))  # noqa: E731
    assert key(found) == key(other)
    assert "4 of 4 rows, 13 tokens; made of 2 pairs; 2 desirable, 2 not" in report.summary()
    # A prompt inside both responses, as text and as chats.
    turns = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": c}] for c in ("b", "cd")]
    implicit, _ = prepare_unpaired([{"chosen": turns[0], "rejected": turns[1]}], TOKENIZER, PairOptions())
    explicit = [{"prompt": t[:1], "completion": t[1:], "label": c} for t, c in zip(turns, (True, False), strict=True)]
    assert implicit["input_ids"] == prepare_unpaired(explicit, TOKENIZER, PairOptions())[0]["input_ids"]


def test_c36_the_prompt_gives_way_and_empty_responses_are_counted():
    rows = [ids([1, 2, 3, 4], [5, 6], True), ids([1, 2], [5, 6, 7, 8, 9], False), ids([1], [], True)]
    tokens, weights, report = rows_of(rows, max_length=4)
    assert tokens == [[3, 4, 5, 6], [2, 5, 6, 7]]
    assert weights == [[0, 0, 1, 1], [0, 1, 1, 1]]
    assert (report.rows_in, report.rows_kept, report.rows_empty) == (3, 2, 1)
    assert (report.prompts_cut, report.responses_cut, report.tokens_cut) == (2, 1, 5)
    assert "1 with an empty response dropped; 2 prompts and 1 responses cut, 5 tokens lost" in report.summary()
    with pytest.raises(EmptyDataError, match="all of its 1 rows have an empty response"):
        rows_of(rows[2:])


def test_c44_tools_reach_the_prompt():
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
    tokenizer = byte_tokenizer(template=template)
    row = {"prompt": [{"role": "user", "content": "2+2?"}], "completion": [{"role": "assistant", "content": "4"}]}
    tools = [{"type": "function", "function": {"name": "adder", "parameters": {}}}]
    for given in (tools, json.dumps(tools)):
        found, _ = prepare_unpaired([{**row, "label": True, "tools": given}], tokenizer, PairOptions())
        assert "adder" in tokenizer.decode(found["input_ids"][0])
    bare, _ = prepare_unpaired([{**row, "label": True}], tokenizer, PairOptions())
    assert "adder" not in tokenizer.decode(bare["input_ids"][0])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "completion": "b"}, "has no column 'label'"),
        ({"prompt": "a", "label": True}, "rows need 'prompt', 'completion' and 'label'"),
        ({"prompt": "a", "completion": "b", "label": 1}, "Row 0 of the train set: column 'label' is 1; write true"),
        ({"prompt": "a", "completion": "b", "label": None}, "column 'label' is None"),
        ({"prompt": "a", "completion": None, "label": True}, "Row 0 of the train set"),
        ({"chosen": "a", "rejected": None}, "a pair holds None for 'chosen' or 'rejected'"),
        (ids([1], [2], True, sample_weight=-1.0), "column 'sample_weight' is -1.0"),
        (ids([1], [2], True, ref_logps="low"), "column 'ref_logps' is 'low'"),
        (ids([1], ["x"], True), "Row 0 of the train set: column 'completion_ids'"),
    ],
)
def test_bad_rows(row: dict[str, Any], message: str):
    with pytest.raises(DataError, match=message):
        rows_of([row])


# ---- mismatched rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(2, 8))
def test_c41_no_row_gets_its_own_response(n: int):
    for prompts in (range(n), [0] * n, [i // 2 for i in range(n)]):
        found = mismatched(list(prompts), [("response", i) for i in range(n)])
        assert all(i != other for i, other in enumerate(found))
        assert sorted(found) == list(range(n))
    assert mismatched("aabb", "wxyz") == [2, 3, 0, 1]  # not the other response to the same prompt
    assert mismatched("abcd", "xxyy") == [2, 3, 0, 1]  # nor the same response again


def test_c41_one_row_has_no_other():
    with pytest.raises(ValueError, match="one row has no other"):
        mismatched("a", "b")


@torch.no_grad()
def logp(model: Any, prompt: list[int], response: list[int]) -> float:
    """Log-probability of a response in float64, a row at a time."""
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].double()
    return float(logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).sum())


def by_hand(rows: list[dict[str, Any]], loss: str, beta: float, weights: tuple[float, float]) -> tuple[float, float]:
    """Loss of a first step that holds all rows, and z."""
    policy, reference = tiny_model("qwen3", seed=1), tiny_model("qwen3")

    def ratio(prompt: list[int], response: list[int]) -> float:
        return logp(policy, prompt, response) - logp(reference, prompt, response)

    # No two rows have a prompt or a response in common, so each gets the response of the row after it.
    others = [rows[(i + 1) % len(rows)]["completion_ids"] for i in range(len(rows))]
    z = max(0.0, sum(ratio(row["prompt_ids"], other) for row, other in zip(rows, others, strict=True)) / len(rows))
    rewards = [beta * ratio(row["prompt_ids"], row["completion_ids"]) for row in rows]
    delta = sum(rewards) / len(rows)
    total = 0.0
    for row, reward in zip(rows, rewards, strict=True):
        sign, weight = (1, weights[0]) if row["label"] else (-1, weights[1])
        if loss == "bco":
            total += weight * math.log1p(math.exp(-sign * (reward - delta)))
        else:
            gain = sign * (reward - (beta * z if loss == "kto" else 0.0))
            total += weight / (1 + math.exp(gain))
    return total / len(rows), z


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired", "bco"])
def test_losses_are_the_ones_computed_by_hand(loss: str):
    rows = labelled(8)
    settings: dict[str, Any] = {"beta": 0.2, "desirable_weight": 1.25, "undesirable_weight": 0.5, "loss_type": loss}
    expected, z = by_hand(rows, loss, 0.2, (1.25, 0.5))
    for batch, steps in ((8, 1), (2, 4), (3, 3)):  # however the step is cut
        cut = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": steps}
        trainer = kto(tiny_model("qwen3", seed=1), rows, tiny_model("qwen3"), max_steps=1, **cut, **settings)
        log = run(trainer).logs[0]
        assert log["loss"] == pytest.approx(expected, rel=1e-5)
        if loss == "kto":
            assert z > 0 and log["kl"] == pytest.approx(z, rel=1e-4)
        else:
            assert "kl" not in log


def test_z_is_at_least_zero():
    rows, policy, reference = labelled(4), tiny_model("qwen3"), tiny_model("qwen3", seed=1)
    others = [(row["prompt_ids"], rows[(i + 1) % 4]["completion_ids"]) for i, row in enumerate(rows)]
    assert sum(logp(policy, *other) - logp(reference, *other) for other in others) < 0
    log = run(kto(policy, rows, reference, max_steps=1, per_device_train_batch_size=4)).logs[0]
    assert log["kl"] == 0.0


def test_a_mismatched_response_that_does_not_fit_loses_its_end():
    rows = [ids([1] * 6, [2, 3], True), ids([4], [5, 6, 7, 8, 9, 10, 11], False)]
    assert math.isfinite(run(kto(rows=rows, max_length=8, max_steps=1)).logs[0]["kl"])


# ---- training --------------------------------------------------------------------------------------------------------


def test_c42_one_class_leaves_no_metrics_of_the_other(capsys: pytest.CaptureFixture[str]):
    rows = [row | {"label": at < 4 or at % 2 == 0} for at, row in enumerate(labelled(8))]
    logs = run(kto(rows=rows, max_steps=2, per_device_train_batch_size=4)).logs
    first, second = logs[0], logs[1]
    assert math.isfinite(first["loss"])
    assert {"rewards/chosen", "logps/chosen", "lengths/chosen"} <= {*first}
    assert not {"rewards/rejected", "logps/rejected", "rewards/margins"} & {*first}
    assert second["rewards/margins"] == pytest.approx(second["rewards/chosen"] - second["rewards/rejected"])
    run(kto(rows=rows[:4], max_steps=1))
    assert "only one class: nothing tells the model what to prefer to what" in capsys.readouterr().err


def test_c43_a_step_of_one_row_is_refused():
    one: dict[str, Any] = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    with pytest.raises(ConfigError, match="an optimizer step holds one; raise `per_device_train_batch_size`"):
        kto(**one)
    with pytest.raises(ConfigError, match="the training set holds one; give more rows"):
        kto(rows=labelled(1))
    assert math.isfinite(run(kto(loss_type="apo_zero_unpaired", max_steps=1, **one)).losses[0])


def test_c43_the_last_row_alone_is_compared_with_another():
    rows = labelled(5)
    policy, reference = tiny_model("qwen3"), tiny_model("qwen3", seed=1)
    last = rows[4]["prompt_ids"], rows[0]["completion_ids"]
    z = logp(policy, *last) - logp(reference, *last)
    trainer = kto(policy, rows, reference, max_steps=2, learning_rate=0.0, per_device_train_batch_size=4)
    assert run(trainer).logs[1]["kl"] == pytest.approx(z, rel=1e-4) != 0.0


def test_c40_metrics_weigh_by_rows():
    rows = labelled(8)
    whole = run(kto(rows=rows, max_steps=1, per_device_train_batch_size=8, gradient_accumulation_steps=1)).logs[0]
    cut = run(kto(rows=rows, max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=4)).logs[0]
    assert whole["lengths/rejected"] == pytest.approx(sum(len(rows[i]["completion_ids"]) for i in (1, 4, 7)) / 3)
    for name in ("loss", "kl", "rewards/chosen", "logps/rejected", "lengths/chosen", "lengths/rejected", "entropy"):
        assert cut[name] == pytest.approx(whole[name], rel=1e-5, abs=1e-6), name


def test_c37_precomputed_is_live(cache: Path):
    for loss in ("apo_zero_unpaired", "bco"):
        live = run(kto(loss_type=loss, max_steps=4)).losses
        assert run(kto(loss_type=loss, max_steps=4, precompute_ref_log_probs=True)).losses == pytest.approx(
            live, rel=1e-5
        )
        assert live[0] != live[-1]
    assert len([*cache.iterdir()]) == 1
    with pytest.raises(ConfigError, match="compares with mismatched rows that are made step by step"):
        kto(precompute_ref_log_probs=True)


def test_rows_bring_their_reference():
    model = tiny_model("qwen3", seed=1)
    rows = labelled(8)
    own = [row | {"ref_logps": logp(model, row["prompt_ids"], row["completion_ids"])} for row in rows]
    live = run(kto(rows=rows, ref_model=model, loss_type="apo_zero_unpaired")).losses
    assert run(kto(rows=own, loss_type="apo_zero_unpaired")).losses == pytest.approx(live, rel=1e-4)
    with pytest.raises(ConfigError, match="column 'ref_logps', and `loss_type` 'kto' scores the reference"):
        kto(rows=own)


@pytest.mark.parametrize("fresh", [True, False])
def test_c39_an_adapter_is_its_own_reference(fresh: bool):
    trainer = kto(peft_config=LoraConfig(init_lora_weights=fresh, **LORA), skip_self_checks=None)
    logs = run(trainer).logs
    assert logs[0]["loss"] == pytest.approx(0.5, abs=1e-6)
    assert logs[0]["kl"] == pytest.approx(0, abs=1e-5)
    assert logs[-1]["rewards/chosen"] != 0
    verdicts = {found.name: found.verdict for found in trainer.selfchecks.findings}
    assert verdicts["reference"] == verdicts["accumulation"] == "pass"


def test_a_reference_that_is_not_the_start_fails_the_self_check():
    trainer = kto(skip_self_checks=None)
    with torch.no_grad():
        trainer.reference.model.lm_head.weight.mul_(1.5)
    with pytest.raises(SelfCheckError, match="reference: a token's log-probability under policy and reference differs"):
        trainer.train()


def test_delta_of_bco_is_the_running_mean_of_rewards():
    trainer = kto(loss_type="bco", max_steps=2, learning_rate=0.05, per_device_train_batch_size=4)
    rewards = 0.0
    for log, desirable in zip(run(trainer).logs, (3, 2), strict=False):
        rewards += desirable * log["rewards/chosen"] + (4 - desirable) * log["rewards/rejected"]
    assert trainer.delta.value == pytest.approx(rewards / 8, rel=1e-3) != 0.0


def test_a_budget_changes_nothing_and_experts_are_balanced():
    plain = run(kto(max_steps=2)).losses
    assert run(kto(max_steps=2, max_tokens_per_forward=40)).losses == pytest.approx(plain, rel=1e-5)
    logs = run(kto(build_family("qwen3-moe"), max_steps=1, router_aux_loss_coef=0.1)).logs
    assert logs[0]["aux_loss"] > 0


def test_evaluation_counts_every_row():
    trainer = kto(eval_rows=labelled(3, seed=4), per_device_eval_batch_size=2)
    run(trainer)
    found = trainer.evaluate()
    assert found["eval_lengths/rejected"] == len(labelled(3, seed=4)[1]["completion_ids"])
    assert math.isfinite(found["eval_loss"]) and "eval_kl" in found


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_type": "ktoo"}, "loss_type='ktoo' is not known"),
        ({"beta": 0.0}, "beta=0.0: it must be above 0"),
        ({"desirable_weight": -1.0}, "desirable_weight=-1.0: it must be at least 0"),
        ({"max_length": 1}, "`max_length` is 1"),
        ({"sync_ref_model": True, "precompute_ref_log_probs": True, "loss_type": "bco"}, "are both on"),
    ],
)
def test_bad_fields(fields: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        KTOConfig(output_dir=scratch(), **fields)


# ---- two processes ---------------------------------------------------------------------------------------------------


def uneven(strategy: str | None, **settings: Any) -> list[float]:
    """5 rows, 4 a step: those of one rank are desirable and those of the other not, then one rank has none."""
    fields = STRATEGIES[strategy] if strategy else {}
    rows = [row | {"label": at % 4 < 2} for at, row in enumerate(labelled(5))]
    with clean():
        return run(kto(rows=rows, max_steps=-1, num_train_epochs=2, **fields, **settings)).losses


@pytest.mark.parametrize("loss", ["kto", "bco"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2"])
def test_ranks_are_one_process(strategy: str, loss: str):
    if strategy == "zero2":
        pytest.importorskip("deepspeed")
    one = uneven(None, per_device_train_batch_size=4, loss_type=loss)
    first, second = POOL.run(uneven, strategy=strategy, per_device_train_batch_size=2, loss_type=loss)
    assert len(one) == 4
    assert first == second == pytest.approx(one, rel=1e-4)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model, data, out = tmp_path / "model", tmp_path / "rows.jsonl", tmp_path / "out"
    tiny_model("qwen3").save_pretrained(model)
    TOKENIZER.save_pretrained(model)
    rows = [{"prompt": f"{i}?", "completion": f" good {i}", "label": i % 2 == 0} for i in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    line = ["kto", "--model_name_or_path", str(model), "--dataset_name", str(data), "--output_dir", str(out)]
    line += ["--max_steps", "1", "--logging_steps", "1", "--report_to", "none", "--use_cpu", "true", "--bf16", "false"]
    assert main([*line, "--beta", "0"]) == 2
    assert "beta=0.0: it must be above 0" in capsys.readouterr().err
    assert main([*line, "--dry_run"]) == 0
    assert not out.exists()
    assert main(line) == 0
    assert {"model.safetensors", "resolved_config.yaml", "environment.json"} <= {file.name for file in out.iterdir()}
    logged = [json.loads(text) for text in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert next(each["loss"] for each in logged if "loss" in each) == pytest.approx(0.5, abs=1e-6)
