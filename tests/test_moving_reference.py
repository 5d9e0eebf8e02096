"""TR-DPO: a reference that follows the policy, and is found again wherever its checkpoint lies."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from laws.runs import TRAINERS, run
from peft import LoraConfig

from posttrain.errors import ConfigError

EVERY_STEP: dict[str, Any] = {"sync_ref_model": True, "ref_model_sync_steps": 1, "save_strategy": "steps"}


def moving(method: str, folder: Path, adapted: bool) -> Any:
    """4 steps that save after 2; the adapter goes on from weights that are not zero."""
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False) if adapted else None
    torch.manual_seed(0)
    fields = EVERY_STEP | {"max_steps": 4, "save_steps": 2, "learning_rate": 1.0, "output_dir": str(folder)}
    return TRAINERS[method](peft_config=config, **fields)


def reference(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in trainer.reference.tensors().items()}


@pytest.mark.parametrize("method", ["dpo", "kto"])
@pytest.mark.parametrize("adapted", [False, True])
def test_it_goes_on_from_a_checkpoint_wherever_that_lies(method: str, adapted: bool, tmp_path: Path):
    whole = moving(method, tmp_path / "whole", adapted)
    start = reference(whole)
    losses = run(whole).losses
    moved = reference(whole)
    assert any(not torch.equal(weight, start[name]) for name, weight in moved.items())
    shutil.move(tmp_path / "whole", tmp_path / "elsewhere")
    resumed = moving(method, tmp_path / "another", adapted)
    assert run(resumed, resume=str(tmp_path / "elsewhere" / "checkpoint-2")).losses == losses
    for name, weight in reference(resumed).items():
        assert torch.equal(weight, moved[name]), name


def test_it_changes_what_is_learned(tmp_path: Path):
    still = TRAINERS["dpo"](max_steps=4, learning_rate=1.0)
    assert run(moving("dpo", tmp_path, False)).losses[1:] != pytest.approx(run(still).losses[1:], rel=1e-4)


def test_a_checkpoint_without_it_is_refused(tmp_path: Path):
    fields: dict[str, Any] = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "output_dir": str(tmp_path)}
    run(TRAINERS["dpo"](**fields))
    with pytest.raises(ConfigError, match=r"`sync_ref_model` is on and there is no .*checkpoint-1/reference.pt"):
        run(TRAINERS["dpo"](**fields | EVERY_STEP), resume=f"{tmp_path}/checkpoint-1")
