"""Self-checks before the first step: they pass on what is right, fail on their mutants, and leave no trace."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from laws.mutants import applied
from laws.runs import bit_equal, run, sft
from peft import LoraConfig
from pool import POOL
from strategies import STRATEGIES, clean
from tiny import tiny_model, token_rows
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from posttrain.data.forest import build_forest, rows_of
from posttrain.errors import ConfigError, SelfCheckError
from posttrain.model.attention import FOREST, forest_attention
from posttrain.parallel.params import whole
from posttrain.parallel.ranks import rank
from posttrain.parallel.strategy import Replicated
from posttrain.trainer import selfcheck
from posttrain.trainer.experience import Experience
from posttrain.trainer.selfcheck import SelfCheck
from posttrain.types import Row, Segments

ON: dict[str, Any] = {"skip_self_checks": None}


def verdicts(trainer: Any) -> dict[str, str]:
    return {found.name: found.verdict for found in trainer.selfchecks.findings}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 1},
        {"packing": True, "gradient_checkpointing": True},
        {"layout": "padded", "optim": "adamw_torch"},
        {"model": lambda: tiny_model("qwen3", attention_dropout=0.3), "router_aux_loss_coef": 0.0},
        {"neftune_noise_alpha": 5.0},
        {"peft_config": LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1)},
    ],
)
def test_they_pass_and_leave_no_trace(fields: dict[str, Any]):
    def build(**more: Any) -> Any:
        made = {name: value() if callable(value) else value for name, value in fields.items()}
        return sft(**{"model": tiny_model("qwen3"), **made, **more})

    checked = build(**ON)
    bit_equal(run(build()), run(checked))
    assert verdicts(checked) == {"accumulation": "pass", "gradients": "pass", "forest": "pass", "template": "skip"}


def test_what_they_found_is_in_the_checkpoint(tmp_path: Path):
    run(sft(**ON, output_dir=str(tmp_path), save_strategy="steps", save_steps=2))
    found = json.loads((tmp_path / "checkpoint-2" / "selfcheck.json").read_text())
    assert found == json.loads((tmp_path / "selfcheck.json").read_text())
    assert [line["name"] for line in found] == ["accumulation", "gradients", "forest", "template"]
    assert "1 micro-batch of 2 units against 2 of 1" in found[0]["text"]


def test_they_are_left_out_by_name():
    trainer = sft(skip_self_checks=["forest", "template"])
    run(trainer)
    assert list(verdicts(trainer)) == ["accumulation", "gradients"]


def test_a_misspelt_name_is_refused():
    with pytest.raises(ConfigError, match=r"`skip_self_checks` holds 'forrest'; the checks are accumulation, .*forest"):
        sft(skip_self_checks=["forrest"]).train()


def test_what_units_cancel_is_not_held_against_rounding():
    """Gradients of norm 1 each whose sum is 0.01, half of it rounding."""
    engine: Any = SimpleNamespace(model=tiny_model("qwen3"), args=SimpleNamespace(bf16=True, fp16=False))
    engine.more_self_checks = ()
    one, many = torch.tensor([0.01, 0.0]), torch.tensor([0.01, 0.005])
    for size, verdict in ((2.0, "pass"), (0.0, "fail")):
        passes = (selfcheck._Pass(0.5, {}, one, 0.01), selfcheck._Pass(0.5, {}, many, size))
        assert selfcheck._compare(engine, *passes, 2)[0] == verdict


def test_broken_accumulation_is_found():
    with applied("mean_of_micro_batch_means"), pytest.raises(SelfCheckError, match="accumulation: 1 micro-batch of 2"):
        run(sft(**ON))


def test_a_tensor_cut_off_is_found_and_named():
    trainer = sft(**ON)
    layer = trainer.model.model.layers[1].mlp
    layer.register_forward_hook(lambda module, args, output: output.detach())
    with pytest.raises(SelfCheckError, match=r"gradients: 4 of \d+ trainable tensors receive no gradient: .*1\.mlp"):
        run(trainer)


def test_nothing_trainable_is_found():
    trainer = sft(**ON)
    own = trainer.selfchecks.on_train_begin

    def freeze(*args: Any, **kwargs: Any) -> None:
        own(*args, **kwargs)
        trainer.model.requires_grad_(False)

    trainer.selfchecks.on_train_begin = freeze
    with pytest.raises(SelfCheckError, match="no tensor is trainable"):
        run(trainer)


def test_a_layer_that_ignores_segments_is_found(monkeypatch: pytest.MonkeyPatch):
    trainer = sft(**ON)

    def attention(module: Any, *args: Any, **kwargs: Any) -> Any:
        forest = kwargs.get("forest")
        if module.layer_idx == 1 and forest is not None:
            kwargs["forest"] = Segments((0,), (forest.end[-1],), (-1,))
        return forest_attention(module, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, FOREST, attention)
    with pytest.raises(SelfCheckError, match=r"forest: .*two rows side by side differ"):
        run(trainer)


def test_a_method_adds_its_own():
    trainer = sft(**ON)
    trainer.more_self_checks = [SelfCheck("margins", lambda units: ("fail", f"{len(units)} units are off"))]
    with pytest.raises(SelfCheckError, match="margins: 2 units are off"):
        run(trainer)


def test_only_checks_and_trains_nothing():
    trainer = sft(**ON)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    found = trainer.selfchecks.only()
    assert [f.verdict for f in found] == ["pass", "pass", "pass", "skip"] and trainer.state.global_step == 0
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    text = selfcheck.report(found)
    assert "pass  accumulation" in text and "skip  template" in text


def test_rows_come_back_whole():
    rows = [Row(list(range(20)), [0.0] * 5 + [1.0] * 15), Row([*range(17), 40, 41], [0.0] * 17 + [0.5, 2.0])]
    for share in (True, False):
        assert rows_of(build_forest(rows, share=share)) == rows


# ---- two processes ---------------------------------------------------------------------------------------------------


def train(strategy: str, **fields: Any) -> tuple[Any, dict[str, str]]:
    with clean():
        trainer = sft(**STRATEGIES[strategy], **fields)
        done = run(trainer)
        done.weights = {name: whole(p) for name, p in done.weights.items()}
        done.gradients = {}
        return done, verdicts(trainer)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", pytest.param("zero2", marks=pytest.mark.slow)])
def test_two_ranks(strategy: str):
    fields: dict[str, Any] = {"per_device_train_batch_size": 3, "rows": token_rows(12)}
    plain = POOL.run(train, strategy=strategy, **fields)
    checked = POOL.run(train, strategy=strategy, **fields, **ON)
    zero = strategy.startswith("zero")
    want = {"accumulation": "pass", "gradients": "skip" if zero else "pass", "forest": "pass", "template": "skip"}
    for (one, none), (other, found) in zip(plain, checked, strict=True):
        assert not none and found == want
        bit_equal(one, other)


@dataclass(frozen=True)
class Own(Experience):
    """An experience that is cut and never joined."""


def joined_on(sizes: list[list[int]]) -> tuple[bool, list[int]]:
    """Sizes of the rows of this rank's only micro-batch -> whether it is compared, and the rows of each part."""
    engine = SimpleNamespace(strategy=Replicated(None), args=SimpleNamespace(device=torch.device("cpu")))
    rows = [Row(list(range(3, 3 + n)), [1.0] * n) for n in sizes[rank()]]
    piece = Own(build_forest(rows))
    joined, apart = selfcheck._joined(engine, [[piece]], list(piece.split(1))[:1])
    return joined is not None, [unit.batch.num_sequences for unit in apart]


def test_ranks_take_as_many_forwards():
    assert POOL.run(joined_on, sizes=[[4, 5, 6], [4, 5]]) == [(True, [1, 1, 1]), (True, [1, 1, 0])]
    assert POOL.run(joined_on, sizes=[[4, 5, 6], [4]]) == [(False, [1]), (False, [1])]


def fail_on_one() -> str:
    trainer = sft(**ON)
    trainer.more_self_checks = [SelfCheck("odd", lambda units: ("fail" if rank() else "pass", f"rank {rank()}"))]
    try:
        run(trainer)
    except SelfCheckError as error:
        return str(error)
    return ""


def test_a_check_that_fails_on_one_rank_stops_both():
    for text in POOL.run(fail_on_one):
        assert "odd: rank 1" in text
