"""The engine around a run: evaluation, streaming, models in every form, precision, saving, logging."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_fixtures import byte_tokenizer
from datasets import Dataset, IterableDataset
from laws.runs import bit_equal, run, same, scratch, sft
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from tiny import tiny_model, token_rows
from transformers import AutoModelForCausalLM, TrainerCallback

from posttrain import SFTConfig, SFTTrainer
from posttrain.errors import ConfigError

LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"]}


def plain_logits(model: Any) -> torch.Tensor:
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits.float()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A model and its tokenizer on disk."""
    tiny_model("qwen3").save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


# ---- evaluation ------------------------------------------------------------------------------------------------------


def test_c76_several_eval_sets_keep_their_names(tmp_path):
    """C76: each set under its own name, prepared once, no mixing; the best model may be chosen by one of them."""
    a, b = token_rows(4, seed=1), token_rows(6, seed=2)
    alone = {name: sft(eval_rows=rows).evaluate()["eval_loss"] for name, rows in (("a", a), ("b", b))}
    trainer = sft(
        eval_rows={"a": a, "b": b},
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="best",
        metric_for_best_model="eval_a_loss",
        load_best_model_at_end=True,
        output_dir=str(tmp_path),
    )
    prepared = dict(trainer.eval_dataset)
    metrics = trainer.evaluate()
    assert metrics["eval_a_loss"] == pytest.approx(alone["a"], rel=1e-6)
    assert metrics["eval_b_loss"] == pytest.approx(alone["b"], rel=1e-6)
    assert "eval_loss" not in metrics
    trainer.train()
    assert trainer.eval_dataset == prepared
    losses = [line["eval_a_loss"] for line in trainer.state.log_history if "eval_a_loss" in line]
    assert trainer.state.best_metric == pytest.approx(min(losses))


def test_rows_given_to_evaluate_are_prepared():
    rows = token_rows(4, seed=1)
    trainer = sft()
    want = sft(eval_rows=rows).evaluate()["eval_loss"]
    assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(want, rel=1e-6)
    assert trainer.evaluate({"x": rows})["eval_x_loss"] == pytest.approx(want, rel=1e-6)
    assert trainer.evaluate(rows, metric_key_prefix="test")["test_loss"] == pytest.approx(want, rel=1e-6)


def test_evaluation_leaves_training_untouched():
    """Evaluating every step changes no loss, no weight and no metric of the training lines."""
    settings: dict[str, Any] = {"peft_config": LoraConfig(**LORA, lora_dropout=0.3), "optim": "adamw_torch"}
    quiet = run(seeded(lambda: sft(**settings)))
    busy = run(seeded(lambda: sft(eval_rows=token_rows(3, seed=5), eval_strategy="steps", eval_steps=1, **settings)))
    bit_equal(quiet, busy)
    for one, other in zip(quiet.logs, busy.logs, strict=True):
        assert one["entropy"] == other["entropy"]


def seeded(build: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_compute_metrics_gets_padded_logits_and_labels(size):
    seen = {}

    def accuracy(prediction: Any) -> dict[str, float]:
        logits, labels = prediction.predictions, prediction.label_ids
        seen.update(logits=logits, labels=labels)
        at = labels[:, 1:] != -100
        return {"accuracy": float((logits[:, :-1].argmax(-1) == labels[:, 1:])[at].mean())}

    rows = token_rows(5, seed=1)
    trainer = sft(eval_rows=rows, per_device_eval_batch_size=size)
    trainer.compute_metrics = accuracy
    metrics = trainer.evaluate()
    assert metrics["eval_accuracy"] == pytest.approx(metrics["eval_mean_token_accuracy"], abs=1e-6)
    assert seen["logits"].shape == (5, max(map(len, rows["input_ids"])), 300)
    for row, labels in zip(rows, seen["labels"], strict=True):
        n = len(row["labels"])
        assert labels[1:n].tolist() == row["labels"][1:]
        assert (labels[n:] == -100).all()


def test_preprocess_logits_for_metrics_keeps_memory_small():
    shapes = []

    def metrics(prediction: Any) -> dict[str, float]:
        shapes.append(prediction.predictions.shape)
        return {"ids": float(np.mean(prediction.predictions))}

    trainer = sft(eval_rows=token_rows(5, seed=1), per_device_eval_batch_size=2)
    trainer.compute_metrics = metrics
    trainer.preprocess_logits_for_metrics = lambda logits, labels: logits.argmax(-1)
    assert "eval_ids" in trainer.evaluate()
    assert len(shapes[0]) == 2


def test_predict_gives_metrics_of_the_set():
    rows = token_rows(4, seed=1)
    want = sft(eval_rows=rows).evaluate()["eval_loss"]
    assert sft().predict(rows).metrics["test_loss"] == pytest.approx(want, rel=1e-6)


def test_an_eval_stream_is_evaluated_to_its_end_or_refused_by_name():
    stream = token_rows(4, seed=1).to_iterable_dataset()
    want = sft(eval_rows=token_rows(4, seed=1)).evaluate()["eval_loss"]
    try:
        trainer = sft(eval_rows=stream)
    except ConfigError as error:
        assert "eval_dataset" in str(error)
    else:
        assert trainer.evaluate()["eval_loss"] == pytest.approx(want, rel=1e-6)


# ---- data ------------------------------------------------------------------------------------------------------------


class Sources(TrainerCallback):
    """Rows of the data set each optimizer step used."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.steps = trainer, []
        trainer.add_callback(self)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps.append(self.trainer.window.sources)


def sources(**settings: Any) -> list[tuple[int, ...]]:
    trainer = sft(learning_rate=0.0, **settings)
    found = Sources(trainer)
    trainer.train()
    return found.steps


def test_every_row_once_an_epoch_and_every_epoch_in_its_own_order():
    steps = sources(max_steps=-1, num_train_epochs=2)
    assert len(steps) == 12
    first, second = sum(steps[:6], ()), sum(steps[6:], ())
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second


def test_sequential_order():
    assert sum(sources(max_steps=6, train_sampling_strategy="sequential"), ()) == tuple(range(12))


def test_c70_the_data_seed_orders_rows_and_nothing_else():
    """C70: changing only the data seed changes the order and not the initial weights."""
    assert sources(data_seed=1) != sources(data_seed=2)
    assert sources(data_seed=1) == sources(data_seed=1, seed=3)
    adapters = [sft(data_seed=seed, peft_config=LoraConfig(**LORA)).model.state_dict() for seed in (1, 2)]
    assert all(torch.equal(value, adapters[1][name]) for name, value in adapters[0].items())


def test_steps_of_an_epoch_count_short_windows():
    """13 rows, 2 × 2 a step: 3 full steps and one of a single row."""
    steps = sources(rows=token_rows(13), gradient_accumulation_steps=2, max_steps=-1, num_train_epochs=1)
    assert [len(step) for step in steps] == [4, 4, 4, 1]
    steps = sources(
        rows=token_rows(13),
        gradient_accumulation_steps=2,
        max_steps=-1,
        num_train_epochs=1,
        dataloader_drop_last=True,
    )
    assert [len(step) for step in steps] == [4, 4, 4]


def test_max_steps_goes_over_several_epochs():
    assert len(sources(max_steps=8)) == 8


def test_loader_workers_change_nothing():
    same(run(sft()), run(sft(dataloader_num_workers=1)), tolerance=0.0)


def counted(rows: int) -> tuple[IterableDataset, list[int]]:
    """A stream that notes which rows were pulled."""
    pulled: list[int] = []

    def generate() -> Any:
        for index, row in zip(range(rows), itertools.cycle(token_rows(12)), strict=False):
            pulled.append(index)
            yield {**row, "difficulty": 0.5, "id": f"row {index}"}

    return IterableDataset.from_generator(generate), pulled


@pytest.mark.parametrize("packing", [False, True])
def test_c24_streaming_pulls_few_rows(packing):
    """C24: 3 steps over a stream of 5000 rows with unknown columns."""
    stream, pulled = counted(5000)
    trained = run(sft(rows=stream, packing=packing, max_steps=3))
    assert len(trained.losses) == 3
    assert all(np.isfinite(trained.losses))
    assert len(pulled) < 2500


def test_c24_a_stream_needs_a_step_limit():
    with pytest.raises(ConfigError, match="max_steps"):
        sft(rows=counted(10)[0], max_steps=-1)


def test_a_stream_trains_as_the_rows_would():
    rows = token_rows()
    listed = run(sft(rows=rows, max_steps=3, train_sampling_strategy="sequential"))
    same(listed, run(sft(rows=rows.to_iterable_dataset(), max_steps=3)), tolerance=1e-6)


def test_a_short_stream_starts_again():
    assert len(run(sft(rows=token_rows(3).to_iterable_dataset(), max_steps=5)).losses) == 5


@pytest.mark.parametrize("packing", [False, True])
def test_a_stream_resumes_where_it_was(packing, tmp_path):
    settings: dict[str, Any] = {
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "output_dir": str(tmp_path),
        "packing": packing,
    }
    whole = run(sft(rows=token_rows().to_iterable_dataset(), **settings))
    rest = run(sft(rows=token_rows().to_iterable_dataset(), **settings), resume=str(tmp_path / "checkpoint-2"))
    bit_equal(whole, rest)


# ---- the model in every form -----------------------------------------------------------------------------------------


def trainer_on(model: Any, **fields: Any) -> SFTTrainer:
    """Without a tokenizer given: it is the model's own."""
    defaults = {"output_dir": scratch(), "use_cpu": True, "bf16": False, "report_to": "none"}
    return SFTTrainer(model, SFTConfig(**defaults | fields), train_dataset=token_rows())


def test_model_by_path_object_and_adapter_train_alike(folder):
    want = run(sft())
    same(want, run(sft(model=folder)), tolerance=1e-6)
    same(want, run(sft(model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))), tolerance=1e-6)


def test_tokenizer_is_found_beside_the_model(folder):
    assert trainer_on(folder).processing_class.vocab_size == byte_tokenizer().vocab_size
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert trainer_on(model).processing_class.vocab_size == byte_tokenizer().vocab_size


def test_c71_an_already_wrapped_model_trains():
    """C71: only the adapter moves."""
    wrapped = get_peft_model(tiny_model("qwen3"), LoraConfig(**LORA))
    before = {n: p.detach().clone() for n, p in wrapped.named_parameters()}
    after = run(sft(model=wrapped)).weights
    moved = {n for n, p in after.items() if not torch.equal(p, before[n])}
    assert moved
    assert moved == {n for n in after if "lora_" in n}


def test_wrapped_before_and_by_the_trainer_are_the_same():
    config = LoraConfig(**LORA)
    inside = run(seeded(lambda: sft(peft_config=config)))
    outside = run(seeded(lambda: sft(model=get_peft_model(tiny_model("qwen3"), config))))
    assert inside.losses[0] == pytest.approx(outside.losses[0], rel=1e-6)


def test_model_init_kwargs_reach_the_model(folder):
    trainer = trainer_on(folder, model_init_kwargs={"attn_implementation": "eager", "attention_dropout": 0.25})
    assert trainer.model.config.attention_dropout == 0.25
    assert trainer.layout == "padded"
    with pytest.raises(ConfigError, match="model_init_kwargs"):
        sft(model_init_kwargs={"attention_dropout": 0.1})


def shared_share(**settings: Any) -> float:
    return run(sft(rows=token_rows(prefix=20), max_steps=1, **settings)).logs[0]["shared_share"]


def test_prefixes_are_shared_unless_dropout_would_tell():
    """With dropout, shared and separate continuations differ: sharing is then off unless asked for."""
    assert shared_share() > 0.2
    assert shared_share(share_prefixes=False) == 0
    assert shared_share(model=tiny_model("qwen3", attention_dropout=0.1)) == 0
    assert shared_share(peft_config=LoraConfig(**LORA, lora_dropout=0.1)) == 0
    assert shared_share(peft_config=LoraConfig(**LORA, lora_dropout=0.1), share_prefixes=True) > 0.2
    assert shared_share(peft_config=LoraConfig(**LORA)) > 0.2


# ---- precision -------------------------------------------------------------------------------------------------------


@pytest.fixture
def bf16_folder(tmp_path: Path) -> str:
    tiny_model("qwen3").to(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    byte_tokenizer().save_pretrained(tmp_path / "bf16")
    return str(tmp_path / "bf16")


def dtypes(model: Any, part: str = "") -> set[torch.dtype]:
    return {p.dtype for n, p in model.named_parameters() if part in n}


def test_full_fine_tuning_keeps_float32_master_weights(bf16_folder):
    assert dtypes(trainer_on(bf16_folder).model) == {torch.float32}


@pytest.mark.parametrize(("native", "base"), [(True, torch.bfloat16), (False, torch.float32)])
def test_under_an_adapter_the_base_keeps_its_dtype_where_it_is_native(bf16_folder, monkeypatch, capsys, native, base):
    monkeypatch.setattr("posttrain.model.load.native_bf16", lambda: native)
    model = sft(model=bf16_folder, peft_config=LoraConfig(**LORA)).model
    assert dtypes(model, "lora_") == {torch.float32}
    assert dtypes(model, "embed_tokens") == {base}
    assert ("only emulates bfloat16" in capsys.readouterr().err) is not native


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_dtype_may_be_chosen(folder, dtype):
    assert dtypes(trainer_on(folder, model_init_kwargs={"dtype": dtype}).model) == {torch.bfloat16}


def test_unknown_dtype_is_refused(folder):
    with pytest.raises(ConfigError, match=r"dtype.*'bfloat17'"):
        trainer_on(folder, model_init_kwargs={"dtype": "bfloat17"})


def test_bf16_computes_over_float32_weights():
    exact, rounded = run(sft()), run(sft(bf16=True))
    assert {p.dtype for p in rounded.weights.values()} == {torch.float32}
    assert rounded.losses == pytest.approx(exact.losses, rel=1e-2)
    assert rounded.losses != exact.losses


# ---- saving ----------------------------------------------------------------------------------------------------------


def test_saved_model_loads_without_us(tmp_path):
    trainer = sft()
    trainer.train()
    trainer.save_model(str(tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(plain_logits(loaded), plain_logits(trainer.model))
    assert (tmp_path / "tokenizer.json").is_file()


def test_saved_adapter_loads_without_us(tmp_path):
    tiny_model("qwen3").save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    trainer = sft(model=str(tmp_path / "base"), peft_config=LoraConfig(**LORA))
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    want = plain_logits(trainer.model)
    assert not torch.equal(want, plain_logits(tiny_model("qwen3")))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    torch.testing.assert_close(plain_logits(PeftModel.from_pretrained(base, str(tmp_path / "adapter"))), want)
    loaded = AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "adapter"), is_trainable=True)
    torch.testing.assert_close(plain_logits(loaded), want)
    # And it goes on: an adapter that was trained is where the next run starts.
    first = run(sft(model=loaded, max_steps=1)).losses[0]
    assert first < run(sft(max_steps=1)).losses[0] + 1e-3


# ---- logs and callbacks ----------------------------------------------------------------------------------------------


def asked_for_entropy(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[bool]:
    """Whether each head request wanted metrics."""
    import posttrain.trainer.sft as room

    asked: list[bool] = []
    own = room.ScoreRequest

    def request(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs["entropy"])
        return own(*args, **kwargs)

    monkeypatch.setattr(room, "ScoreRequest", request)
    sft(**settings).train()
    return asked


def test_metrics_are_measured_on_steps_that_log_only(monkeypatch):
    asked = asked_for_entropy(monkeypatch, max_steps=4, logging_steps=2, gradient_accumulation_steps=2)
    assert asked == [False, False, True, True] * 2


def test_the_first_step_is_measured_when_it_logs(monkeypatch):
    asked = asked_for_entropy(monkeypatch, max_steps=4, logging_steps=3, logging_first_step=True)
    assert asked == [True, False, True, False]


def test_nothing_is_measured_when_nothing_logs(monkeypatch):
    assert asked_for_entropy(monkeypatch, max_steps=2, logging_strategy="no") == [False, False]


def test_a_log_line_holds_the_mean_loss_and_the_last_measurement():
    each = run(sft(max_steps=4)).logs
    every_two = run(sft(max_steps=4, logging_steps=2)).logs
    assert [line["step"] for line in every_two] == [2, 4]
    for i, line in enumerate(every_two):
        pair = each[2 * i : 2 * i + 2]
        assert line["loss"] == pytest.approx((pair[0]["loss"] + pair[1]["loss"]) / 2, rel=1e-6)
        assert line["entropy"] == pytest.approx(pair[1]["entropy"], rel=1e-6)
        assert line["num_tokens"] == pair[1]["num_tokens"]


def test_tokens_are_counted_once():
    rows = token_rows()
    tokens = sum(map(len, rows["input_ids"]))
    for settings in ({}, {"max_tokens_per_forward": 20}, {"packing": True}, {"layout": "padded"}):
        line = run(sft(rows=rows, per_device_train_batch_size=12, max_steps=1, **settings)).logs[0]
        assert line["num_tokens"] == tokens


def test_callbacks_see_the_run_and_may_stop_it():
    class StopAtTwo(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 2

    trainer = sft(max_steps=6)
    trainer.add_callback(StopAtTwo())
    trainer.train()
    assert trainer.state.global_step == 2


def test_an_optimizer_may_be_given():
    model = tiny_model("qwen3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = SFTTrainer(
        model,
        SFTConfig(output_dir=scratch(), use_cpu=True, bf16=False, report_to="none", max_steps=1, save_strategy="no"),
        train_dataset=token_rows(),
        processing_class=byte_tokenizer(),
        optimizers=(optimizer, None),
    )
    trainer.train()
    assert trainer.optimizer.optimizer is optimizer


class ScheduleFree(torch.optim.SGD):
    """Stands for optimizers whose weights differ between training and evaluation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.modes: list[str] = []

    def train(self) -> None:
        self.modes.append("train")

    def eval(self) -> None:
        self.modes.append("eval")


def test_schedule_free_optimizers_change_mode():
    trainer = sft(max_steps=2, eval_rows=token_rows(2), eval_strategy="steps", eval_steps=1)
    optimizer = trainer.optimizer = ScheduleFree(trainer.model.parameters(), lr=0.1)
    trainer.train()
    assert optimizer.modes == ["train", "eval"] * 2


def test_the_device_cache_is_emptied(monkeypatch):
    emptied: list[int] = []
    trainer = sft(max_steps=4, torch_empty_cache_steps=2)
    for place in ("transformers.trainer", "posttrain.trainer.engine", "accelerate.utils.memory"):
        name = f"{place}.clear_device_cache"
        monkeypatch.setattr(name, lambda *a, **k: emptied.append(trainer.state.global_step), raising=False)
    trainer.train()
    assert sorted({step for step in emptied if step}) == [2]


# ---- what would be ignored, or wrong in a packed row, is refused by name ---------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("label_smoothing_factor", 0.1),
        ("auto_find_batch_size", True),
        ("ignore_data_skip", True),
    ],
)
def test_fields_that_do_not_fit_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"`{field}`"):
        sft(**{field: value})


@pytest.mark.parametrize("field", ["data_collator", "compute_loss_func"])
def test_arguments_that_do_not_fit_are_refused(field):
    with pytest.raises(ConfigError, match=f"`{field}`"):
        SFTTrainer(
            tiny_model("qwen3"),
            SFTConfig(output_dir=scratch(), use_cpu=True, bf16=False, report_to="none"),
            train_dataset=Dataset.from_list([{"input_ids": [5, 6]}]),
            processing_class=byte_tokenizer(),
            **{field: lambda *args: None},
        )
