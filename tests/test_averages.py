"""Reference models and averages of weights, against numbers made by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from data_fixtures import CHATML, byte_tokenizer
from peft import LoraConfig
from tiny import tiny_model, token_rows
from transformers import AutoModelForCausalLM, TrainerControl, TrainerState

from posttrain import BEMACallback, SFTConfig, SFTTrainer, SyncRefModelCallback, create_reference_model
from posttrain.errors import ConfigError, ModelError
from posttrain.model.reference import Bema


def step(callback: Any, model: Any, at: int, event: str = "on_step_end", **args: Any) -> None:
    state = TrainerState(global_step=at, is_world_process_zero=True)
    getattr(callback, event)(SimpleNamespace(**args), state, TrainerControl(), model=model)


def one_weight(value: float) -> torch.nn.Module:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    return model


def set_to(model: torch.nn.Module, value: float) -> None:
    torch.nn.init.constant_(model.get_parameter("weight"), value)


# ---- reference models ------------------------------------------------------------------------------------------------


def test_reference_is_a_frozen_copy():
    model = tiny_model()
    ids = torch.tensor([[5, 6, 7]])
    reference = create_reference_model(model.train())
    assert not reference.training and model.training
    assert not any(p.requires_grad for p in reference.parameters()) and all(p.requires_grad for p in model.parameters())
    torch.testing.assert_close(reference(input_ids=ids).logits, model.eval()(input_ids=ids).logits, rtol=0, atol=0)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    assert not torch.equal(reference.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("pattern", [None, "model.layers.{layer}"])
def test_shared_layers_are_kept_once_and_frozen(pattern: str | None):
    model = tiny_model()
    reference = create_reference_model(model, num_shared_layers=1, pattern=pattern)
    for name, weight in model.named_parameters():
        shared = name.startswith(("model.embed_tokens", "model.layers.0."))
        assert weight.requires_grad is not shared
        assert (reference.get_parameter(name).data_ptr() == weight.data_ptr()) is shared
    for wrong in ({"num_shared_layers": 2}, {"num_shared_layers": 0, "pattern": "h.{layer}"}):
        with pytest.raises(ModelError, match="no weight of the model is in a layer"):
            create_reference_model(model, **wrong)


def test_reference_moves_towards_the_model():
    model, reference = one_weight(3.0), one_weight(1.0)
    callback = SyncRefModelCallback(reference, accelerator=None)
    for at, wanted in ((1, 1.0), (2, 2.2), (3, 2.2), (4, 2.68)):  # 0.4 · 1 + 0.6 · 3; 0.4 · 2.2 + 0.6 · 3
        step(callback, model, at, ref_model_sync_steps=2, ref_model_mixup_alpha=0.6)
        assert reference.get_parameter("weight").item() == pytest.approx(wanted)
    SyncRefModelCallback.sync_target_model(model, reference, 1.0)
    assert reference.get_parameter("weight").item() == 3.0
    with pytest.raises(ModelError, match="1 weights and the model 2"):
        SyncRefModelCallback.sync_target_model(torch.nn.Linear(1, 1), reference, 0.5)
    with pytest.raises(ModelError, match=r"\(2, 1\) in the model and \(1, 1\)"):
        SyncRefModelCallback.sync_target_model(torch.nn.Linear(1, 2, bias=False), reference, 0.5)


# ---- BEMA ------------------------------------------------------------------------------------------------------------


def test_bema_by_hand():
    # ρ = 0, γ = 1, η = κ = 0.5, so α_4 = β_4 = 1/2 and α_9 = β_9 = 1/3.
    model = one_weight(1.0)
    bema = Bema(ema_power=0.5, bias_power=0.5, lag=0)
    bema.start(model)
    set_to(model, 5.0)
    bema.update(model, 4)
    assert bema.ema["weight"].item() == pytest.approx(3.0)  # 1/2 · 1 + 1/2 · 5
    assert bema.result["weight"].item() == pytest.approx(5.0)  # 3 + 1/2 · (5 − 1)
    set_to(model, 7.0)
    bema.update(model, 9)
    assert bema.ema["weight"].item() == pytest.approx(13 / 3)  # 2/3 · 3 + 1/3 · 7
    assert bema.result["weight"].item() == pytest.approx(19 / 3)  # 13/3 + 1/3 · (7 − 1)


def test_bema_factors():
    bema = Bema()  # ρ = 10, γ = 1, κ = 0.5, η = 0.2
    assert bema.beta(6) == pytest.approx(0.25) and bema.alpha(22) == pytest.approx(0.5)  # 16^−1/2, 32^−1/5
    assert Bema(multiplier=2.0).beta(3) == pytest.approx(0.25)
    assert Bema(min_ema_multiplier=0.3).beta(6) == 0.3
    assert Bema(bias_power=0.0).alpha(100) == 1.0


def test_bema_callback_keeps_its_times(monkeypatch: pytest.MonkeyPatch):
    callback, model, seen = BEMACallback(update_freq=3, update_after=2), one_weight(1.0), []
    monkeypatch.setattr(Bema, "update", lambda self, model, step: seen.append((step, self.first["weight"].item())))
    step(callback, model, 0, "on_train_begin")
    for at in range(1, 9):
        set_to(model, float(at))
        step(callback, model, at)
    assert seen == [(5, 2.0), (8, 2.0)]  # θ_0 is what the weight was at step 2
    with pytest.raises(ConfigError, match="`update_freq` is 0"):
        BEMACallback(update_freq=0)


SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 2, "max_steps": 4, "learning_rate": 1e-2, "save_steps": 2, "report_to": "none",
    "disable_tqdm": True, "bf16": False,
}  # fmt: skip


def trainer(folder: Path, callback: Any, model: Any = None, **more: Any) -> SFTTrainer:
    args = SFTConfig(output_dir=str(folder), **SETTINGS)
    tokenizer = byte_tokenizer(template=CHATML)
    return SFTTrainer(
        model or tiny_model(),
        args,
        train_dataset=token_rows(8),
        processing_class=tokenizer,
        callbacks=[callback],
        **more,
    )


def test_bema_in_a_run_is_saved_and_resumed(tmp_path: Path):
    whole = BEMACallback(update_freq=1)
    trainer(tmp_path / "a", whole).train()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "bema", dtype="float32")
    last = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "checkpoint-4", dtype="float32")
    for name, weight in saved.named_parameters():
        torch.testing.assert_close(weight, whole.bema.result[name])
        assert not torch.equal(weight, last.get_parameter(name))
    resumed = BEMACallback(update_freq=1)
    trainer(tmp_path / "b", resumed).train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    for name, weight in whole.bema.result.items():
        torch.testing.assert_close(resumed.bema.result[name], weight, rtol=0, atol=0)


def test_bema_of_tied_weights_and_of_an_adapter(tmp_path: Path):
    tied = BEMACallback(update_freq=1)
    trainer(tmp_path / "tied", tied, tiny_model(tie_word_embeddings=True)).train()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "tied" / "bema", dtype="float32")
    torch.testing.assert_close(saved.lm_head.weight.data, tied.bema.result["model.embed_tokens.weight"])
    adapter = BEMACallback(update_freq=1)
    trainer(tmp_path / "lora", adapter, peft_config=LoraConfig(r=2, target_modules=["q_proj"])).train()
    assert all("lora_" in name for name in adapter.bema.result)
    from safetensors.torch import load_file

    state = load_file(tmp_path / "lora" / "bema" / "adapter_model.safetensors")
    for name, weight in state.items():
        torch.testing.assert_close(weight, adapter.bema.result[name.replace(".weight", ".default.weight")])
