"""Where two parts meet: mixtures resume whole, and what would train nothing or hang is refused at the start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import build
from laws.runs import bit_equal, run, scratch, sft
from tiny import tiny_model, token_rows

from posttrain.errors import ConfigError, ModelError
from posttrain.model.router import balance_losses
from posttrain.model.saved import restore_weights
from posttrain.trainer import refusals
from posttrain.trainer.refusals import refuse_combinations
from posttrain.types import LossOutput


@pytest.mark.parametrize("family", ["qwen3-moe", "llama"])
def test_a_model_resumes_with_all_of_its_weights(family: str):
    """A family may save its weights under other names than the model's: fused experts, above all."""
    rows, folder = token_rows(8), scratch()
    fields: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}
    whole = run(sft(build(family), rows, output_dir=folder, **fields))
    again = run(sft(build(family), rows, output_dir=folder, **fields), resume=f"{folder}/checkpoint-2")
    bit_equal(
        type(whole)(whole.losses[-1:], weights=whole.weights), type(again)(again.losses[-1:], weights=again.weights)
    )


def test_a_checkpoint_that_lacks_a_weight_is_refused(tmp_path):
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text().replace('"num_hidden_layers": 1', '"num_hidden_layers": 2')
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match=r"lacks 'model\.layers\.1"):
        restore_weights(tiny_model(), str(tmp_path))


def test_a_balance_loss_that_would_train_nothing_is_refused():
    kwargs = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(ConfigError, match="use_reentrant"):
        sft(build("qwen3-moe"), router_aux_loss_coef=0.1, **kwargs)
    sft(build("qwen3-moe"), router_aux_loss_coef=0.0, **kwargs)
    with pytest.raises(ModelError, match="router_aux_loss_coef"):
        balance_losses([], torch.zeros(3, dtype=torch.long), torch.ones(1, 1), 2)
    with pytest.raises(ConfigError, match="router_aux_loss_coef"):
        sft(router_aux_loss_coef=-0.1)


def test_a_loss_step_without_the_balance_loss_is_an_error():
    trainer = sft(build("qwen3-moe"), router_aux_loss_coef=0.1)
    step = trainer.loss_step
    trainer.loss_step = lambda model, exp: LossOutput(step(model, exp).total)  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="aux_loss"):
        trainer.train()


def test_what_would_wait_for_another_rank_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(refusals, "world_size", lambda: 2)
    sharded: Any = SimpleNamespace(sharded=True)
    args = sft().args
    refuse_combinations(args, build("llama"), sharded, 0.0)
    refuse_combinations(args, build("phi3-longrope"), sharded, 0.0)  # the ranks agree on its two regimes
    with pytest.raises(ConfigError, match="dynamic rotary"):
        refuse_combinations(args, build("qwen3-dynamic"), sharded, 0.0)
    refuse_combinations(args, build("qwen3.5"), sharded, 0.0)  # FSDP2 gathers a layer at once
    args.deepspeed_plugin = object()
    with pytest.raises(ConfigError, match="token mixers"):
        refuse_combinations(args, build("qwen3.5"), sharded, 0.0)
    args.torch_compile = True
    with pytest.raises(ConfigError, match="torch_compile"):
        refuse_combinations(args, build("llama"), sharded, 0.0)
    args.torch_compile, args.fp16 = False, True
    with pytest.raises(ConfigError, match="fp16"):
        refuse_combinations(args, build("llama"), sharded, 0.0)
