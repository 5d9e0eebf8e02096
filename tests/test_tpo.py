"""TPO: pairs with a third response, which is learned by likelihood (arXiv 2405.16681)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_fixtures import CHATML, byte_tokenizer
from datasets import Dataset
from laws.runs import pairs_from, run, same
from pool import POOL
from strategies import clean
from test_dpo import dpo, plain_pairs
from tiny import tiny_model, token_rows
from torch.nn.functional import logsigmoid

from posttrain.data.pairs import PairOptions, prepare_pairs
from posttrain.errors import ConfigError, DataError, EmptyDataError

TOKENIZER = byte_tokenizer(template=CHATML)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "reference"


def triples(count: int = 8, weighed: bool = False) -> Dataset:
    """Pairs of token ids with a third response, whose length differs from the others'."""
    rows = pairs_from(token_rows(count)) if weighed else plain_pairs(count)
    thirds = [[7 + at, *row["chosen_ids"], *range(9, 9 + at % 4)] for at, row in enumerate(rows)]
    rows = rows.add_column("reference_ids", thirds)
    return rows.remove_columns("margin") if weighed else rows


def rows_of(rows: Any, **options: Any) -> tuple[list[list[int]], Any, Any]:
    found, report = prepare_pairs(rows, TOKENIZER, PairOptions(third=True, **options))
    return found["input_ids"], found, report


def ids(prompt: list[int], *responses: list[int]) -> dict[str, list[int]]:
    names = ("chosen_ids", "rejected_ids", "reference_ids")
    return {"prompt_ids": prompt, **dict(zip(names, responses, strict=True))}


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_three_responses_follow_one_prompt():
    tokens, found, _ = rows_of([{"prompt": "ab", "chosen": "c", "rejected": "de", "reference": "f", "margin": 0.5}])
    eos = TOKENIZER.eos_token_id
    assert tokens == [[*TOKENIZER("ab" + text)["input_ids"], eos] for text in ("c", "de", "f")]
    assert found["weights"] == [[0, 0, 1, 1], [0, 0, 1, 1, 1], [0, 0, 1, 1]]
    values = np.asarray(found["values"][:])
    assert np.array_equal(values[:, 2], [np.nan, np.nan, 0.0], equal_nan=True)  # nothing to compare the third with
    assert found["source"] == [0, 0, 0]
    turns = [[{"from": "human", "value": "Hi"}, {"from": "gpt", "value": text}] for text in ("A", "B", "C")]
    chat = dict(zip(("chosen", "rejected", "reference"), turns, strict=True))
    expected = [
        TOKENIZER.apply_chat_template(
            [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}],
            tokenize=True,
            return_dict=False,
        )
        for text in "ABC"
    ]
    assert rows_of([chat])[0] == expected


def test_the_prompt_is_what_all_three_begin_with():
    inside = rows_of([{"chosen": "ab cd", "rejected": "ab ce", "reference": "ab d"}])
    apart = rows_of([{"prompt": "ab", "chosen": " cd", "rejected": " ce", "reference": " d"}])
    assert inside[0] == apart[0] and inside[1]["weights"] == apart[1]["weights"]


def test_the_third_response_is_cut_dropped_and_counted_like_the_others():
    tokens, _, report = rows_of([ids(list(range(10, 18)), [1, 2], [3, 4], [5, 6, 7, 8])], max_length=10)
    assert [len(each) for each in tokens] == [8, 8, 10] and tokens[0][0] == 12  # the longest says how much gives way
    assert (report.prompts_cut, report.tokens_cut) == (1, 6)
    tokens, _, report = rows_of([ids([1], [5], [6], [7, 8, 9])], max_length=3, truncation_mode="keep_end")
    assert tokens == [[1, 5], [1, 6], [1, 8, 9]] and report.responses_cut == 1
    _, _, report = rows_of([ids([1], [2], [3], []), ids([1], [2], [3], [2]), ids([1], [2], [3], [4])])
    assert (report.rows_in, report.rows_kept, report.rows_empty, report.third_equal) == (3, 2, 1, 1)
    assert "1 whose column 'reference' is one of the two responses kept" in report.summary()
    with pytest.raises(EmptyDataError, match="1 have an empty response"):
        rows_of([ids([1], [2], [3], [])])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], "no column 'reference', and `loss_type` 'tpo'"),
        ([{"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}], "no column 'reference_ids'"),
        ([{"prompt": "a", "chosen": "b", "rejected": "c", "reference": None}], "Row 0 .* 'reference' holds None"),
        ([{"chosen": "b", "rejected": "c", "reference": [{"role": "user"}]}], "'chosen' and 'reference' is text"),
        ([ids([1], [2], [3], ["x"])], "Row 0 of the train set: column 'reference_ids'"),
    ],
)
def test_bad_rows(rows: Any, message: str):
    with pytest.raises(DataError, match=message):
        rows_of(rows)


def test_a_third_response_that_no_loss_reads_is_said_and_changes_nothing(capsys: pytest.CaptureFixture[str]):
    same(run(dpo(rows=plain_pairs())), run(dpo(rows=triples())), tolerance=0.0)
    assert "column 'reference' is not read: no loss learns from a third response" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"tpo_alpha=2\.0 has no effect"):
        dpo(tpo_alpha=2.0)


# ---- the loss --------------------------------------------------------------------------------------------------------


def by_hand(model: Any, rows: Any, beta: float, alpha: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """−log σ(β(log π_w − log π_l)) − α log π(y₃)/|y₃|, a weighted mean over pairs, row by row in float64; its
    gradients."""
    model = copy.deepcopy(model).double()
    total, weights = torch.zeros((), dtype=torch.float64), 0.0
    for row in rows:
        logps = []
        for side in ("chosen_ids", "rejected_ids", "reference_ids"):
            tokens, border = torch.tensor(row["prompt_ids"] + row[side]), len(row["prompt_ids"])
            found = model(input_ids=tokens[None]).logits[0, border - 1 : -1].log_softmax(-1)
            logps.append(found.gather(1, tokens[border:, None]).sum())
        w, l, third = logps
        total = total + row["sample_weight"] * (-logsigmoid(beta * (w - l)) - alpha * third / len(row["reference_ids"]))
        weights += row["sample_weight"]
    loss = total / weights
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_loss_and_gradients_are_those_by_hand():
    rows, fields = triples(weighed=True), {"loss_type": "tpo", "beta": 0.3, "tpo_alpha": 0.7, "max_steps": 1}
    expected, gradients = by_hand(tiny_model("qwen3"), rows, 0.3, 0.7)
    found = run(dpo(rows=rows, per_device_train_batch_size=8, **fields))
    assert found.losses[0] == pytest.approx(expected.item(), rel=1e-5)
    assert found.gradients.keys() == gradients.keys()
    for name, value in gradients.items():
        scale = max(value.abs().max().item(), 1e-3)
        torch.testing.assert_close(found.gradients[name].double(), value, rtol=0, atol=2e-5 * scale)
    trainer = dpo(rows=rows, per_device_train_batch_size=8, **fields)
    batch = next(iter(trainer.get_train_dataloader()))["batch"]
    assert batch.num_sequences == 24 and trainer.reference is None


@pytest.mark.parametrize(
    "loss", [["tpo"], ["tpo", "sigmoid"], ["tpo", "aot", "bco_pair"], ["aot_unpaired", "tpo", "sft"]]
)
def test_mixes_train_and_accumulate(loss: list[str]):
    """Also with losses over the whole optimizer batch, WPO and LD-DPO: 1 × 4 = 4 × 1, in pieces that hold a pair."""
    fields: dict[str, Any] = {"rows": triples(), "loss_type": loss, "max_steps": 2, "use_weighting": True}
    fields["ld_alpha"] = 0.5
    one = run(dpo(per_device_train_batch_size=4, **fields))
    four = run(dpo(per_device_train_batch_size=1, gradient_accumulation_steps=4, max_tokens_per_forward=20, **fields))
    same(one, four, tolerance=1e-4)
    assert one.losses[0] != one.losses[-1]


def test_a_mix_is_the_sum_of_its_losses():
    """The third response moves neither rewards nor the statistics of losses that compare pairs."""
    pairs, with_third = (
        run(dpo(rows=triples(), ref_model=tiny_model("qwen3", seed=1), loss_type=loss, max_steps=1)).logs[0]
        for loss in (["sigmoid", "aot", "bco_pair"], ["sigmoid", "aot", "bco_pair", "tpo"])
    )
    shared = [name for name in pairs if name.startswith(("rewards/", "logps/", "lengths/", "loss/"))]
    assert len(shared) == 11
    for name in shared:
        assert with_third[name] == pytest.approx(pairs[name], rel=1e-5), name
    assert with_third["loss"] == pytest.approx(pairs["loss"] + with_third["loss/tpo"], rel=1e-5)
    assert {"logps/reference", "lengths/reference"} <= with_third.keys() - pairs.keys()
    assert with_third["lengths/reference"] > with_third["lengths/chosen"]


def test_the_reference_of_a_mix_scores_the_pair_alone(cache: Path):
    """Live, precomputed, or the rows' own: the third response is compared with nothing, and its number is not kept."""
    fields: dict[str, Any] = {"rows": triples(), "loss_type": ["sigmoid", "tpo"], "skip_self_checks": None}
    live, found = run(dpo(**fields)), run(dpo(precompute_ref_log_probs=True, **fields))
    assert found.losses == pytest.approx(live.losses, abs=1e-5)
    (file,) = cache.iterdir()
    with np.load(file) as held:
        assert len(held["keys"]) == 16 and (held["values"] < 0).all()
    rows = triples().add_column("ref_chosen_logps", [-1.0] * 8).add_column("ref_rejected_logps", [-2.0] * 8)
    log = run(dpo(rows=rows, loss_type=["sigmoid", "tpo"], max_steps=1)).logs[0]
    assert log["rewards/rejected"] == pytest.approx(0.1 * (log["logps/rejected"] + 2), rel=1e-4)
    dpo(rows=rows, loss_type=["sigmoid", "tpo"], precompute_ref_log_probs=True)
    with np.load(file) as held:
        assert len(held["keys"]) == 16  # the rows' own are no log-probabilities of this reference


def uneven(**settings: Any) -> list[float]:
    with clean():
        return run(dpo(rows=triples(5), loss_type=["tpo", "aot"], max_steps=-1, num_train_epochs=1, **settings)).losses


def test_two_ranks_are_one():
    one = uneven(per_device_train_batch_size=4)
    first, second = POOL.run(uneven, per_device_train_batch_size=2)
    assert len(one) == 2
    assert first == second == pytest.approx(one, rel=1e-4)
