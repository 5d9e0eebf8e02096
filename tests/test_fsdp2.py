"""FSDP2 and DDP on two ranks: what one process does."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import strategies as s
import torch
from families import build as build_family
from laws.runs import run, scratch, sft
from pool import POOL
from tiny import tiny_model, token_rows
from transformers import TrainerState

from posttrain.errors import ConfigError, ModelError
from posttrain.parallel.params import fsdp2_plugin, whole
from posttrain.parallel.ranks import rank

BOTH = pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])


@BOTH
def test_one_process_is_two_ranks(strategy):
    facts = s.one_is_two(strategy)
    assert (facts["shards"] == facts["parameters"]) == (strategy == "fsdp2")
    assert facts["wrapper"] in ("DistributedDataParallel", "FSDPQwen3ForCausalLM")


def test_tied_embeddings_under_gradient_checkpointing():
    model = tiny_model("qwen3", tie_word_embeddings=True)
    facts = s.one_is_two("fsdp2", model=model, gradient_checkpointing=True, max_steps=2, head_memory_mb=1)
    assert facts["shards"] == facts["parameters"]


def test_weights_may_stay_gathered():
    fields = {"fsdp": True, "fsdp_config": {"reshard_after_forward": False, "activation_checkpointing": True}}
    one, _ = s.train(per_device_train_batch_size=4, output_dir=scratch(), max_steps=2)
    (two, facts), _ = POOL.run(s.train, per_device_train_batch_size=2, output_dir=scratch(), max_steps=2, **fields)
    s.same(one, two)
    assert facts["shards"] == facts["parameters"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_mutant_forgetting_the_ranks_is_caught(strategy):
    with s.caught():
        s.one_is_two(strategy, mutant="ranks_forgotten", max_steps=1)


def test_mutant_rounding_outputs_is_caught():
    with s.caught():
        s.nothing_is_rounded("fsdp2", mutant="outputs_rounded")


@BOTH
def test_a_frozen_reference(strategy):
    assert s.reference_scores_alike(strategy)["shards"] == (strategy == "fsdp2")


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp2-sharded"])
def test_an_adapter_resumed_by_two(strategy):
    s.resumed_is_whole(strategy, peft_config=s.lora())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_mixture_resumed_by_two(strategy):
    """Its folder holds the experts one by one, the model all in one tensor."""
    s.resumed_is_whole(strategy, model=build_family("qwen3-moe"))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "fsdp2-sharded"])
def test_two_resumed_by_one(strategy):
    s.resumed_by_one(strategy)


def test_an_adapter_of_two_resumed_by_one():
    s.resumed_by_one("fsdp2-sharded", peft_config=s.lora())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_one_resumed_by_two(strategy):
    s.ones_resumed_by_two(strategy)


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp2-sharded"])
def test_the_best_model_is_loaded_at_the_end(strategy):
    """Weights of step 1 are the best by a metric that only grows."""
    for folder, found in POOL.run(best_model, strategy=strategy, folder=scratch()):
        assert folder.endswith("checkpoint-1")
        assert found


def best_model(strategy: str, folder: str) -> tuple[str, bool]:
    fields = s.STRATEGIES[strategy] | {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    trainer = sft(
        eval_rows=token_rows(3, seed=5),
        save_strategy="steps",
        load_best_model_at_end=True,
        metric_for_best_model="num",
        greater_is_better=False,
        output_dir=folder,
        **fields,
    )
    own = trainer.evaluate
    seen: list[torch.Tensor] = []

    def evaluate(*args: Any, **kwargs: Any) -> dict[str, float]:
        seen.append(whole(next(trainer.model.parameters()).detach()).clone())
        return own(*args, **kwargs) | {"eval_num": float(trainer.state.global_step)}

    trainer.evaluate = evaluate
    trainer.train()
    last = whole(next(trainer.model.parameters()).detach())
    return str(trainer.state.best_model_checkpoint), torch.equal(last, seen[0]) and not torch.equal(last, seen[-1])


# ---- refused ---------------------------------------------------------------------------------------------------------


def build(**fields: Any) -> str:
    with s.clean():
        try:
            sft(**fields)
        except ConfigError as error:
            return str(error)
    return ""


def test_fsdp1_is_refused():
    for told in POOL.run(build, fsdp=True, fsdp_config={"version": 1}):
        assert "version 1" in told
        assert "`version: 2`" in told


PASSED_OVER = {
    "min_num_params": {"min_num_params": 1000},
    "SIZE_BASED_WRAP": {"auto_wrap_policy": "SIZE_BASED_WRAP"},
}


@pytest.mark.parametrize("name", PASSED_OVER)
def test_what_would_be_passed_over_is_refused(name):
    for told in POOL.run(build, fsdp=True, fsdp_config=dict(PASSED_OVER[name])):
        assert name in told


def test_one_process_under_the_launcher_is_told(monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert fsdp2_plugin(None, sft().args) is None
    assert "one process has nothing to shard" in capsys.readouterr().err


def test_weights_without_values_are_refused():
    for told in POOL.run(on_meta):
        assert "meta device" in told


def on_meta() -> str:
    trainer = sft(fsdp=True)
    trainer.model.lm_head.to("meta")
    try:
        trainer.train()
    except ModelError as error:
        return str(error)
    return ""


def test_fsdp_asked_by_the_launcher(monkeypatch):
    first, _ = POOL.run(launched, version="2")
    assert first == "FSDP"
    first, _ = POOL.run(launched, version="1")
    assert "fsdp_version: 2" in first


def launched(version: str) -> str:
    """A trainer in the environment `accelerate launch` makes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_FSDP", "true")
        patch.setenv("FSDP_VERSION", version)
        try:
            return sft().accelerator.distributed_type.value
        except ConfigError as error:
            return str(error)


def test_a_strategy_does_not_leak_into_the_next_trainer():
    for first, second in POOL.run(two_trainers):
        assert (first, second) == ("FSDP", "MULTI_CPU")


def two_trainers() -> tuple[str, str]:
    first = sft(fsdp=True)
    kind = first.accelerator.distributed_type.value
    run(first)
    second = sft()
    run(second)
    return kind, second.accelerator.distributed_type.value


def test_a_layer_that_does_not_exist_is_refused():
    for told in POOL.run(wrong_layer):
        assert "NoSuchLayer" in told


def wrong_layer() -> str:
    try:
        run(sft(fsdp=True, fsdp_config={"transformer_layer_cls_to_wrap": ["NoSuchLayer"]}))
    except ConfigError as error:
        return str(error)
    return ""


# ---- both ranks, or neither ------------------------------------------------------------------------------------------


def test_a_checkpoint_is_marked_complete_when_every_rank_has_written():
    for files in POOL.run(files_when_marked, folder=scratch()):
        assert files is None or {"rng_state_0.pth", "rng_state_1.pth", "optimizer.pt"} <= set(files)


def files_when_marked(folder: str) -> list[str] | None:
    """What lies in the checkpoint as rank 0 marks it, where rank 1 is slow. None on rank 1."""
    trainer = sft(fsdp=True, max_steps=1, save_strategy="steps", save_steps=1, output_dir=folder)
    found: list[list[str]] = []
    own, torch_save = TrainerState.save_to_json, torch.save

    def save_to_json(self: Any, path: str) -> None:
        found.append(os.listdir(Path(path).parent))
        own(self, path)

    def slow_save(value: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.5 * rank())
        torch_save(value, path, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainerState, "save_to_json", save_to_json)
        patch.setattr(torch, "save", slow_save)
        trainer.train()
    return found[0] if found else None


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_logits_of_uneven_evaluations(strategy):
    """A rank without rows in the last batch takes part all the same."""
    one = rows_seen("ddp")
    for two in POOL.run(rows_seen, strategy=strategy):
        assert two == pytest.approx(one, rel=1e-5)


def rows_seen(strategy: str) -> list[float]:
    with s.clean():
        trainer = sft(eval_rows=token_rows(5, seed=3), per_device_eval_batch_size=2, **s.STRATEGIES[strategy])
        trainer.compute_metrics = lambda given: {"rows": len(given.predictions), "sum": float(given.predictions.std())}
        found = trainer.evaluate()
        return [found["eval_rows"], found["eval_sum"], found["eval_loss"]]


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_padded_rows(strategy):
    s.one_is_two(strategy, layout="padded", max_steps=2)


def test_an_evaluation_that_fails_leaves_training_as_it_was():
    trainer = sft(eval_rows=token_rows(3))
    trainer.train()
    before = trainer.window, trainer.meter
    trainer.loss_step = lambda model, exp: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.evaluate()
    assert (trainer.window, trainer.meter) == before


def test_several_gpus_of_one_process_are_not_wrapped_in_data_parallel(monkeypatch):
    trainer = sft()
    trainer.args._n_gpu = 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.warns(UserWarning, match="--num_processes 2"):
        trainer.args._check_geometry()
    assert trainer.args.n_gpu == 1
    assert type(trainer._wrap_model(trainer.model)) is type(trainer.model)
