"""Streams of pairs, labelled responses and labelled steps: the same training as the same rows whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import datasets
import pytest
from datasets import Dataset, IterableDataset
from laws.runs import FIELDS, Run, as_prm, as_reward, bit_equal, labelled_from, pairs_from, run, scratch, steps_from
from pool import POOL
from test_dpo import TOKENIZER
from tiny import tiny_model, token_rows

from posttrain import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    PRMConfig,
    PRMTrainer,
    RewardConfig,
    RewardTrainer,
)
from posttrain.data.pairs import PairOptions, prepare_pairs
from posttrain.errors import ConfigError, DataError, EmptyDataError


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def triples(rows: Any) -> Dataset:
    pairs = pairs_from(rows).remove_columns("margin")
    return pairs.add_column("reference_ids", [[5 + at, *row["chosen_ids"]] for at, row in enumerate(pairs)])


def pairs_for_kto(rows: Any) -> Dataset:
    kept = {"prompt_ids": "prompt", "chosen_ids": "chosen", "rejected_ids": "rejected"}
    pairs = pairs_from(rows).select_columns([*kept])
    return Dataset.from_list(
        [{name: " ".join(map(str, row[column])) for column, name in kept.items()} for row in pairs]
    )


# name -> trainer, config, how its rows are made, how its model is made, fields
METHODS: dict[str, tuple[Any, Any, Callable[[Any], Dataset], Callable[[Any], Any], dict[str, Any]]] = {
    "dpo": (DPOTrainer, DPOConfig, pairs_from, lambda model: model, {}),
    "tpo": (DPOTrainer, DPOConfig, triples, lambda model: model, {"loss_type": ["tpo", "sigmoid"]}),
    "kto": (KTOTrainer, KTOConfig, labelled_from, lambda model: model, {}),
    "kto of pairs": (KTOTrainer, KTOConfig, pairs_for_kto, lambda model: model, {"loss_type": "bco"}),
    "reward": (RewardTrainer, RewardConfig, pairs_from, as_reward, {}),
    "prm": (PRMTrainer, PRMConfig, steps_from, as_prm, {}),
}


def build(method: str, rows: Any = None, whole: bool = False, eval_rows: Any = None, **fields: Any) -> Any:
    """A trainer on 12 rows, as a stream of two shards."""
    trainer, config, make, model, own = METHODS[method]
    rows = make(token_rows()) if rows is None else rows
    rows = rows.to_iterable_dataset(num_shards=2) if isinstance(rows, Dataset) and not whole else rows
    fields = FIELDS | {"learning_rate": 0.01, "output_dir": scratch()} | own | fields
    return trainer(
        model(tiny_model("qwen3")),
        args=config(**fields),
        train_dataset=rows,
        eval_dataset=eval_rows,
        processing_class=TOKENIZER,
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_stream_is_the_same_rows_unshuffled(method: str):
    """8 steps of 2: the second pass begins in step 7."""
    fields = {"max_steps": 8, "train_sampling_strategy": "sequential"}
    bit_equal(run(build(method, whole=True, **fields)), run(build(method, **fields)))


@pytest.mark.parametrize("method", METHODS)
def test_a_stream_goes_on_to_the_same_bits(method: str):
    """Drawn from a window, with accumulation; within a pass, and in the second."""
    folder = scratch()
    fields = {"max_steps": 5, "gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 1}
    fields |= {"shuffle_dataset": True, "shuffle_buffer_size": 5, "optim": "adamw_torch", "learning_rate": 1e-3}
    whole = run(build(method, output_dir=folder, **fields))
    for stop in (1, 4):
        bit_equal(whole, run(build(method, **fields), resume=f"{folder}/checkpoint-{stop}"))


def ranked(method: str, **fields: Any) -> Run:
    return run(build(method, shuffle_dataset=True, shuffle_buffer_size=5, **fields))


@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_read_what_one_does(method: str):
    one = ranked(method, per_device_train_batch_size=4)
    first, second = POOL.run(ranked, method=method, per_device_train_batch_size=2)
    assert first.losses == second.losses == pytest.approx(one.losses, rel=1e-4)


def test_rows_are_pulled_as_they_are_needed():
    pulled: list[int] = []

    def make() -> Iterator[dict[str, Any]]:
        for at in range(3000):
            pulled.append(at)
            yield {"prompt_ids": [3, 4], "chosen_ids": [5 + at % 200], "rejected_ids": [7 + at % 200, 6]}

    run(build("dpo", IterableDataset.from_generator(make)))
    assert len(pulled) <= 6 + 2 * 64


# ---- counted, named, refused -----------------------------------------------------------------------------------------


def some_bad(count: int = 8) -> list[dict[str, Any]]:
    rows = [{"prompt_ids": [1, 2], "chosen_ids": [3 + at], "rejected_ids": [30 + at, 4]} for at in range(count)]
    rows[2]["chosen_ids"] = []
    rows[5]["rejected_ids"] = rows[5]["chosen_ids"]
    return rows


def test_rows_that_are_dropped_are_counted_once_and_said(capsys: pytest.CaptureFixture[str]):
    """Over three passes, and looked at before the first."""
    trainer = build("dpo", Dataset.from_list(some_bad()), max_steps=9, max_length=4)
    sources: list[int] = []
    make = trainer.experience
    trainer.experience = lambda window: sources.extend(s for b in window for s in b.source[::2]) or make(window)
    run(trainer)
    assert sources == [0, 1, 3, 4, 6, 7] * 3
    expected = "as far as the stream was read: train: 6 of 8 pairs, 42 tokens; 1 with an empty response dropped; 1 with"
    assert expected in capsys.readouterr().err
    stream, report = prepare_pairs(Dataset.from_list(some_bad()).to_iterable_dataset(), TOKENIZER, PairOptions())
    assert len(list(stream)) == 6
    whole = prepare_pairs(Dataset.from_list(some_bad()), TOKENIZER, PairOptions())[1]
    assert report == whole


def test_rows_of_supervised_fine_tuning_too(capsys: pytest.CaptureFixture[str]):
    from laws.runs import sft

    rows = [{"input_ids": [i + 1] * 4, "labels": [-100 if i == 2 else i + 1] * 4} for i in range(6)]
    run(sft(rows=Dataset.from_list(rows).to_iterable_dataset(), max_steps=6))
    assert "read: train: 5 of 6 rows, 20 tokens, 15 targets; 1 row without targets dropped" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "rows", "message"),
    [
        ("dpo", {"prompt": "a", "chosen": "b", "rejected": None}, "Row 3 of the train set: column 'rejected' holds"),
        ("tpo", {"prompt": "a", "chosen": "b", "rejected": "c", "reference": None}, "Row 3 .* 'reference' holds None"),
        ("kto", {"prompt": "a", "completion": "b", "label": None}, "Row 3 of the train set: column 'label' is None"),
        ("kto", {"prompt": "a", "chosen": "b", "rejected": None}, "Row 3 of the train set: a pair holds None"),
        ("prm", {"prompt": "a", "completions": ["b"], "labels": [True, False]}, "Row 3 of the train set: "),
    ],
)
def test_a_bad_row_is_named(method: str, rows: dict[str, Any], message: str):
    good = {"prompt": "a", "chosen": "b", "rejected": "c", "reference": "d", "completion": "b", "label": True}
    good |= {"completions": ["b"], "labels": [True]}
    table = [{name: good[name] for name in rows}] * 3 + [rows]
    with pytest.raises(DataError, match=message):
        run(build(method, Dataset.from_list(table)))


def test_a_stream_without_a_row_to_train():
    rows = Dataset.from_list([some_bad()[2]] * 3)
    with pytest.raises(EmptyDataError, match="no row with something to train: train: 0 of 3 pairs"):
        run(build("dpo", rows))


def test_an_evaluation_of_one_row_is_given_a_response_of_the_stream():
    trainer = build("kto", eval_rows=labelled_from(token_rows(1, seed=4)))
    assert "eval_kl" in trainer.evaluate()


@pytest.mark.parametrize(
    ("method", "fields", "message"),
    [
        ("dpo", {"max_steps": -1}, "`max_steps` is -1"),
        ("reward", {"eval": True}, "`eval_dataset` is a stream"),
        ("dpo", {"precompute_ref_log_probs": True}, "`precompute_ref_log_probs` is on, and the train set is a stream"),
        ("prm", {"dataloader_num_workers": 1}, "`dataloader_num_workers` must be 0"),
        ("kto", {"per_device_train_batch_size": 1}, "an optimizer step holds one"),
    ],
)
def test_what_is_refused(method: str, fields: dict[str, Any], message: str):
    rows = METHODS[method][2](token_rows()).to_iterable_dataset() if fields.pop("eval", False) else None
    with pytest.raises(ConfigError, match=message):
        run(build(method, eval_rows=rows, **fields))


def test_going_on_with_other_rows_is_refused():
    folder = scratch()
    run(build("prm", output_dir=folder, save_strategy="steps", save_steps=1))
    for changed in ({"train_on_last_step_only": True}, {"max_length": 20}, {"step_separator": ";"}):
        with pytest.raises(ConfigError, match=f"{next(iter(changed))}: "):
            run(build("prm", **changed), resume=f"{folder}/checkpoint-1")


@pytest.mark.parametrize("method", ["dpo", "tpo", "kto"])
def test_whole_rows_are_shuffled_once(method: str):
    """`shuffle_dataset` of rows in memory: pairs stay together."""
    items = build(method, whole=True, shuffle_dataset=True).train_dataset
    sources = [{source for _, source in items[at]} for at in range(len(items))]
    assert all(len(each) == 1 for each in sources)
    order = [each.pop() for each in sources]
    assert sorted(order) == list(range(12)) != order
