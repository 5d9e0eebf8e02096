"""Checkpointing, its policies, its budget, and offload: on = off, and what each keeps, in bytes and calls."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from laws.runs import Run, run, same, sft
from peft import LoraConfig
from pool import POOL
from tiny import SHAPE, tiny_model, token_rows
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from posttrain.errors import ConfigError
from posttrain.model.checkpointing import SavedBytes, _fitting
from posttrain.parallel.offload import ActivationOffload, HostTransport, Weights

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
ON: dict[str, Any] = {"gradient_checkpointing": True}
WAYS: dict[str, dict[str, Any]] = {
    "off": {},
    "full": ON,
    "reentrant": ON | {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "reentrant budget": ON
    | {"activation_checkpointing_kwargs": {"use_reentrant": True}, "activation_memory_mb": 1, "max_steps": 3},
    "new name": {"gradient_checkpointing": None, "activation_checkpointing": True},
    "every second layer": ON | {"gradient_checkpointing_kwargs": {"every_n_layers": 2}},
    "attention": ON | {"activation_checkpointing_policy": "attention"},
    "matmul": ON | {"activation_checkpointing_policy": "matmul"},
    "budget": ON | {"activation_memory_mb": 1},
    "budget and attention": ON | {"activation_memory_mb": 1, "activation_checkpointing_policy": "attention"},
    "offload": {"activation_offloading": True},
    "offload and matmul": ON | {"activation_offloading": True, "activation_checkpointing_policy": "matmul"},
}


def moe() -> Any:
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SHAPE, **more))


def lora() -> Any:
    return LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)


SETTINGS: dict[str, Any] = {
    "packed and shared": lambda: {"model": tiny_model("qwen3"), "rows": token_rows(prefix=20)},
    "padded": lambda: {"model": tiny_model("qwen3"), "rows": token_rows(), "layout": "padded"},
    "windows": lambda: {"model": tiny_model("gemma3"), "rows": token_rows(prefix=20)},
    "lora": lambda: {"model": tiny_model("qwen3"), "rows": token_rows(prefix=20), "peft_config": lora()},
    "experts": lambda: {"model": moe(), "rows": token_rows(), "router_aux_loss_coef": 0.0},
}


def train(setting: str, **fields: Any) -> Run:
    with torch.random.fork_rng():
        torch.manual_seed(1)  # the adapter's weights
        built = sft(**({"max_steps": 2} | SETTINGS[setting]() | fields))
    return run(built)


@pytest.mark.parametrize("setting", SETTINGS)
def test_on_is_off(setting: str):
    plain = {steps: train(setting, max_steps=steps) for steps in (2, 3)}
    for name, fields in WAYS.items():
        try:
            same(plain[fields.get("max_steps", 2)], train(setting, **fields))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_every_adapter_weight_gets_a_gradient():
    """C72: under checkpointing nothing of an adapter is left out, in any layer."""
    found = train("lora", **WAYS["full"]).gradients
    assert len([name for name in found if "lora_" in name]) == 2 * 2 * 7
    assert all(g.abs().max() > 0 for name, g in found.items() if "lora_" in name)


# ---- what is kept ----------------------------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Counts operators, and knows which of the memory they made is still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.made: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self.made[storage._cdata] = weakref.ref(storage)
        return out

    def alive(self) -> int:
        return sum(storage.nbytes() for ref in self.made.values() if (storage := ref()) is not None)


def watched(steps: int = 1, **fields: Any) -> tuple[Watch, int, Any]:
    """Operators of a run, bytes alive between the forward and the backward pass of its last step, and the trainer."""
    settings = {"model": tiny_model("qwen3", num_hidden_layers=4), "rows": token_rows(longest=60, masked=False)}
    built = sft(**(settings | {"max_steps": steps, "per_device_train_batch_size": 6} | fields))
    watch, found, own = Watch(), [], built.strategy.backward

    def backward(model: Any, loss: Any, synchronise: bool) -> None:
        found.append(watch.alive())
        own(model, loss, synchronise)

    built.strategy.backward = backward
    with watch:
        built.train()
    return watch, found[-1], built


def test_a_policy_says_what_is_recomputed():
    calls = {name: watched(**WAYS[name])[0].calls for name in ("off", "full", "attention", "matmul")}
    once = calls["off"]
    assert once[ATTENTION] == 4 * 6
    assert calls["full"][ATTENTION] == 2 * once[ATTENTION]
    assert calls["attention"][ATTENTION] == calls["matmul"][ATTENTION] == once[ATTENTION]
    assert calls["full"]["mm"] == calls["attention"]["mm"] > once["mm"]
    assert calls["matmul"]["mm"] == once["mm"]


def test_memory_is_ordered():
    """Recomputing everything < keeping attention < keeping products < keeping all."""
    alive = [watched(**WAYS[name])[1] for name in ("full", "attention", "matmul", "off")]
    assert alive == sorted(alive) and len(set(alive)) == 4
    assert alive[0] < 0.6 * alive[-1]


def test_a_budget_keeps_the_last_layers_that_fit():
    _, none, _ = watched(steps=2, **WAYS["full"])
    _, some, built = watched(steps=2, **WAYS["budget"])
    _, every, _ = watched(steps=2)
    checkpoints = built.tuning.checkpoints
    assert 0 < checkpoints.kept < 4
    assert none < some < every
    assert some - none <= 1 << 20
    # One more layer would not have fitted.
    assert (some - none) * (checkpoints.kept + 1) / checkpoints.kept > 0.8 * (1 << 20)


def test_layers_are_taken_from_the_end():
    assert _fitting([4.0, 3.0, 3.0], 7.0) == 2
    assert _fitting([1.0, 9.0, 3.0], 7.0) == 1
    assert _fitting([1.0], 0.5) == 0


def kept_layers() -> tuple[int, list[float]]:
    """Ranks lay micro-batches of different lengths, about 190 tokens each."""
    ids = [[5 + i % 200 for i in range(n)] for n in (64, 64, 60, 64, 57, 64, 64, 62, 64, 64, 58, 64)]
    built = sft(
        model=tiny_model("qwen3", num_hidden_layers=4),
        rows=token_rows(1).from_list([{"input_ids": x} for x in ids]),
        per_device_train_batch_size=3,
        share_prefixes=False,
        max_steps=2,
        **WAYS["budget"],
    )
    built.train()
    return built.tuning.checkpoints.kept, list(built.tuning.checkpoints._agreed.values())


def test_ranks_keep_as_many_layers():
    first, second = POOL.run(kept_layers)
    assert first == second
    assert 0 < first[0] < 4


def test_saved_bytes_leave_weights_out():
    layer = torch.nn.Linear(64, 32)
    x = torch.randn(10, 64)
    saved = SavedBytes(layer)
    with saved, torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x).float().exp()
    assert out.dtype == torch.float32
    # The input and its products in bfloat16, and what exp keeps in float32.
    assert saved.total == 10 * 64 * 2 + 10 * 32 * 4


def test_checkpointing_ends_with_the_run():
    """A second trainer on the same model follows its own arguments; what the caller turned on stays on."""
    model = tiny_model("qwen3", num_hidden_layers=4)
    once, _, _ = watched(model=model)
    twice, _, _ = watched(model=model, **WAYS["budget and attention"])
    again, _, _ = watched(model=model)
    assert again.calls["mm"] == once.calls["mm"] < twice.calls["mm"]
    model.activation_checkpointing_enable()
    calls = [watched(model=model, **fields)[0].calls["mm"] for fields in ({}, WAYS["matmul"], {})]
    assert calls[0] == calls[2] > once.calls["mm"]


# ---- offload ---------------------------------------------------------------------------------------------------------


class Recorder(HostTransport):
    """Copies, as a device would, and remembers what it was given."""

    def __init__(self) -> None:
        self.stored: list[torch.Tensor] = []
        self.loads = 0

    def store(self, tensor: torch.Tensor) -> torch.Tensor:
        self.stored.append(tensor)
        return tensor.clone()

    def load(self, stored: torch.Tensor) -> torch.Tensor:
        self.loads += 1
        return stored

    def same(self, stored: torch.Tensor, tensor: torch.Tensor) -> bool:
        index = next(i for i, x in enumerate(self.stored) if torch.equal(x, stored)) if self.stored else -1
        return index >= 0 and super().same(self.stored[index], tensor)


def recorded(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> tuple[Recorder, Run, Any]:
    recorder = Recorder()
    monkeypatch.setattr("posttrain.parallel.offload.HostTransport", lambda: recorder)
    built = sft(**{"max_steps": 1, "rows": token_rows(longest=60), "per_device_train_batch_size": 6} | fields)
    return recorder, run(built), built


def test_offload_moves_activations_and_nothing_else(monkeypatch):
    settings = {"max_steps": 1, "rows": token_rows(longest=60), "per_device_train_batch_size": 6}
    plain = run(sft(**settings))
    recorder, moved, built = recorded(monkeypatch, activation_offloading=True)
    same(plain, moved)
    weights = Weights(built.model.parameters())
    assert recorder.stored and recorder.loads >= len(recorder.stored)
    assert not any(weights.hold(x) for x in recorder.stored)
    assert all(x.numel() * x.itemsize > 4096 for x in recorder.stored)
    assert not any(300 in x.shape for x in recorder.stored), "the head's gradients stay"


def test_with_checkpointing_only_the_inputs_of_layers_move(monkeypatch):
    recorder, _, built = recorded(monkeypatch, activation_offloading=True, **ON)
    hidden = built.model.config.hidden_size
    layers = built.model.config.num_hidden_layers
    wide = [x for x in recorder.stored if x.shape[-1] == hidden and x.dim() == 3]
    everything, _, _ = recorded(monkeypatch, activation_offloading=True)
    # The inputs of the layers; the final norm and the choice of read-outs keep a few more of the same shape.
    assert layers <= len(wide) <= len(recorder.stored) <= layers + 4
    assert sum(x.nbytes for x in recorder.stored) < 0.4 * sum(x.nbytes for x in everything.stored)


def test_a_tensor_saved_again_is_stored_once():
    recorder = Recorder()
    x = torch.randn(64, 64, requires_grad=True)
    y = x * 1.0
    with ActivationOffload([], recorder) as _:
        out = (y.sin() + y.cos()).sum()
        out.backward()
    assert len(recorder.stored) == 1 and recorder.loads == 2
    torch.testing.assert_close(x.grad, x.cos() - x.sin())


# ---- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"activation_checkpointing_policy": "matmul"}, "`activation_checkpointing` is off"),
        ({"activation_memory_mb": 8}, "`activation_memory_mb` is 8"),
        (ON | {"activation_memory_mb": 0}, "at least 1"),
        (ON | {"activation_checkpointing_policy": "atention"}, "Did you mean 'attention'"),
        (WAYS["reentrant"] | {"activation_checkpointing_policy": "attention"}, "use_reentrant"),
        (WAYS["every second layer"] | {"activation_memory_mb": 8}, "every_n_layers"),
        (ON | {"torch_compile": True, "activation_checkpointing_policy": "matmul"}, "torch_compile"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        sft(**fields)
