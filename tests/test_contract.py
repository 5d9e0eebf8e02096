"""The seams of transformers and accelerate the engine stands on. When one moves upstream, the test that fails names it.

`OVERRIDDEN`: methods the engine replaces, called by the base class with these parameters. `USED`: functions the engine
calls, or the base class on its behalf, and the parameters relied on. `ORDER`: what the training loop does in order.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
import transformers.trainer
from laws.runs import run, scratch, sft
from torch.utils.data import DataLoader
from transformers import AttentionInterface, AttentionMaskInterface, Trainer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from posttrain.trainer import saving
from posttrain.trainer.engine import Engine

OVERRIDDEN: dict[str, list[str]] = {
    "get_batch_samples": ["self", "epoch_iterator", "num_batches", "device"],
    "training_step": ["self", "model", "inputs", "num_items_in_batch"],
    "compute_loss": ["self", "model", "inputs", "return_outputs", "num_items_in_batch"],
    "evaluation_loop": [
        "self",
        "dataloader",
        "description",
        "prediction_loss_only",
        "ignore_keys",
        "metric_key_prefix",
    ],
    "prediction_step": ["self", "model", "inputs", "prediction_loss_only", "ignore_keys"],
    "_get_grad_norm": ["self", "model", "grad_norm"],
    "log": ["self", "logs", "start_time"],
    "_save_checkpoint": ["self", "model", "trial"],
    "_init_training_state": [
        "self",
        "max_steps",
        "num_update_steps_per_epoch",
        "num_train_epochs",
        "resume_from_checkpoint",
        "trial",
    ],
    "_save_optimizer_and_scheduler": ["self", "output_dir"],
    "_load_from_checkpoint": ["self", "resume_from_checkpoint", "model"],
    "_load_optimizer_and_scheduler": ["self", "checkpoint"],
    "_load_best_model": ["self"],
    "_prepare_for_training": ["self", "max_steps", "train_dataloader", "resume_from_checkpoint"],
    "create_accelerator_and_postprocess": ["self"],
    "_build_accelerator_args": ["self", "kwargs"],
    "save_model": ["self", "output_dir", "_internal_call"],
    "train": ["self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
    "_inner_training_loop": [
        "self",
        "batch_size",
        "args",
        "resume_from_checkpoint",
        "trial",
        "ignore_keys_for_eval",
    ],
    "get_train_dataloader": ["self"],
    "get_eval_dataloader": ["self", "eval_dataset"],
    "floating_point_ops": ["self", "inputs"],
    "_track_num_input_tokens": ["self", "inputs"],
    "_set_signature_columns_if_needed": ["self"],
}

USED: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "Trainer._wrap_model": (Trainer._wrap_model, ["self", "model", "training", "dataloader"]),
    "Trainer.compute_loss_context_manager": (Trainer.compute_loss_context_manager, ["self"]),
    "Trainer._load_rng_state": (Trainer._load_rng_state, ["self", "checkpoint"]),
    "Trainer._save_rng_state": (Trainer._save_rng_state, ["self", "output_dir"]),
    "Trainer._save_scaler": (Trainer._save_scaler, ["self", "output_dir"]),
    "Trainer._push_from_checkpoint": (Trainer._push_from_checkpoint, ["self", "checkpoint_folder"]),
    "Trainer._get_output_dir": (Trainer._get_output_dir, ["self", "trial"]),
    "accelerate.skip_first_batches": (accelerate.skip_first_batches, ["dataloader", "num_batches"]),
    "Accelerator.no_sync": (accelerate.Accelerator.no_sync, ["self", "model"]),
    "Accelerator._prepare_fsdp2": (accelerate.Accelerator._prepare_fsdp2, ["self", "args"]),
    "Accelerator.prepare_optimizer": (accelerate.Accelerator.prepare_optimizer, ["self", "optimizer"]),
    "Accelerator.backward": (accelerate.Accelerator.backward, ["self", "loss", "kwargs"]),
    "Accelerator.prepare_model": (
        accelerate.Accelerator.prepare_model,
        ["self", "model", "device_placement", "evaluation_mode"],
    ),
    "AttentionInterface.register": (AttentionInterface.register, ["key", "value"]),
    "AttentionMaskInterface.register": (AttentionMaskInterface.register, ["key", "value"]),
    "sdpa_attention_forward": (
        sdpa_attention_forward,
        ["module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal", "kwargs"],
    ),
}

# Called by the training loop in this order, once a step or micro-batch.
ORDER = [
    "skip_first_batches(",
    "set_epoch(epoch)",
    "self.get_batch_samples(epoch_iterator, num_batches, self.args.device)",
    "self._load_rng_state(",
    "self.training_step(model, inputs, num_items_in_batch)",
    "self.floating_point_ops(inputs)",
    "self._track_num_input_tokens(inputs)",
    "self._get_grad_norm(model, grad_norm=grad_norm)",
    "self.optimizer.step()",
    "model.zero_grad()",
    "self._maybe_log_save_evaluate(",
]


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_signature_of_an_overridden_method(name):
    assert hasattr(Trainer, name), f"seam `Trainer.{name}` is gone: engine.py overrides what nothing calls"
    found = parameters(getattr(Trainer, name))
    assert found == OVERRIDDEN[name], f"seam `Trainer.{name}` takes {found}; engine.py expects {OVERRIDDEN[name]}"


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_the_override_takes_what_the_base_class_gives(name):
    own, base = (inspect.signature(getattr(owner, name)) for owner in (Engine, Trainer))
    assert name in vars(Engine), f"seam `{name}`: engine.py does not override it any more; take it off this list"
    variadic = any(p.kind is p.VAR_POSITIONAL for p in own.parameters.values())
    if not variadic:
        assert list(own.parameters) == list(base.parameters), f"seam `{name}`"


def test_every_override_is_on_the_list():
    public = {n for n, v in vars(Engine).items() if callable(v) and n in vars(Trainer) and not n.startswith("__")}
    missing = public - OVERRIDDEN.keys() - {"get_test_dataloader"}  # its base is not called
    assert not missing, f"engine.py overrides {sorted(missing)}: add the expected signatures here"


@pytest.mark.parametrize("name", USED)
def test_signature_of_a_function_relied_on(name):
    function, expected = USED[name]
    found = [p for p in parameters(function) if p != "cls"]
    assert [p for p in found if p in expected] == expected, f"`{name}` takes {found}; posttrain relies on {expected}"


def test_order_of_the_training_loop():
    source = inspect.getsource(Trainer._run_epoch)
    at = -1
    for call in ORDER:
        found = source.find(call, at + 1)
        assert found >= 0, f"`Trainer._run_epoch`: {call!r} is gone or no longer after the call before it in ORDER"
        at = found


def test_a_checkpoint_holds_what_the_base_class_saves():
    """`save_checkpoint` writes it in the base class's stead: what is saved there, and only that, is saved here."""
    called = set(re.findall(r"self\.(_?save\w*|store_flos|_push\w*)\(", inspect.getsource(Trainer._save_checkpoint)))
    ours = inspect.getsource(saving)
    for name in called:
        assert f"trainer.{name}" in ours, f"`Trainer._save_checkpoint` calls {name}, and saving.py does not"
    parts = {"save_model", "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state"}
    assert called == parts | {"store_flos", "_push_from_checkpoint"}


def test_masks_are_asked_for_with_keywords_sdpa_takes():
    """`forest_mask` hands everything on to sdpa's."""
    found = parameters(sdpa_mask)
    for name in ("q_length", "kv_length", "mask_function"):
        assert name in found, f"`sdpa_mask` no longer takes {name!r}: {found}"


def test_logging_reads_the_loss_the_engine_returns():
    """The loss of a step is the sum of what `training_step` returned: it must not be divided again."""
    source = inspect.getsource(Trainer._run_epoch)
    assert "self._tr_loss += tr_loss_step" in source
    source = inspect.getsource(Trainer._maybe_log_save_evaluate)
    assert "nested_gather(tr_loss" in source
    assert ".mean()" in source, "`_maybe_log_save_evaluate` no longer averages the loss over ranks"


def test_the_base_class_goes_through_every_seam(monkeypatch):
    """A run of two steps with evaluation, and one that resumes it: each overridden method is really called."""
    called: set[str] = set()
    unused = {"prediction_step", "_set_signature_columns_if_needed"}  # ours never gets there
    for name in OVERRIDDEN.keys() - unused:
        own = getattr(Engine, name)

        def spy(self: Any, *args: Any, _own: Any = own, _name: str = name, **kwargs: Any) -> Any:
            called.add(_name)
            return _own(self, *args, **kwargs)

        monkeypatch.setattr(Engine, name, spy)
    from tiny import token_rows

    folder = scratch()
    settings: dict[str, Any] = {
        "max_steps": 2,
        "eval_rows": token_rows(2),
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "output_dir": folder,
    }
    run(sft(**settings))
    run(sft(**settings), resume=f"{folder}/checkpoint-1")
    missing = OVERRIDDEN.keys() - unused - called
    assert not missing, f"seams that transformers.Trainer no longer calls: {sorted(missing)}"


def test_micro_batches_reach_the_engine_untouched():
    """The base class neither moves nor unpacks what `get_batch_samples` returned."""
    trainer = sft(max_steps=1)
    seen: list[Any] = []
    own = trainer.training_step

    def training_step(model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        seen.append(inputs)
        return own(model, inputs, num_items_in_batch)

    trainer.training_step = training_step
    trainer.train()
    assert set(seen[0]) == {"batch"}
    assert type(seen[0]["batch"]) is list


def test_what_is_called_of_deepspeed():
    """What the calls do is tested in test_deepspeed.py."""
    engine = pytest.importorskip("deepspeed").DeepSpeedEngine
    assert parameters(engine.set_gradient_accumulation_boundary) == ["self", "is_boundary"]
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    assert parameters(DeepSpeedZeroOptimizer.scaled_global_norm) == ["self", "norm_type"]
    assert callable(DeepSpeedZeroOptimizer_Stage3._get_norm_groups)  # decorated: its signature is hidden


@pytest.mark.parametrize("skip", [1, 4])
def test_skip_first_batches_takes_our_loader(skip):
    """It keeps our sampler within reach of `set_epoch`, our collator, and the rest of the order."""
    loader = sft().get_train_dataloader()
    assert isinstance(loader, DataLoader)
    whole = [inputs["batch"].source for inputs in loader]
    skipping = accelerate.skip_first_batches(loader, skip)
    assert skipping.batch_sampler.batch_sampler is loader.batch_sampler, "`set_epoch` would not be found"
    assert [inputs["batch"].source for inputs in skipping] == whole[skip:]


def test_skip_first_batches_takes_our_stream():
    from tiny import token_rows

    rows = token_rows(12).to_iterable_dataset()
    loader = sft(rows=rows).get_train_dataloader()
    whole = [inputs["batch"].source for inputs, _ in zip(loader, range(5), strict=False)]
    skipping = accelerate.skip_first_batches(loader, 2)
    assert [inputs["batch"].source for inputs, _ in zip(skipping, range(3), strict=False)] == whole[2:]


def test_the_loop_uses_accelerates_function():
    assert transformers.trainer.skip_first_batches is accelerate.skip_first_batches
