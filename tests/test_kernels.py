"""Kernels of others around our head: torch.compile, Liger, transformers' hub kernels; and noise on embeddings."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from types import MethodType
from typing import Any

import pytest
import torch
from laws.runs import Run, run, same, sft
from peft import LoraConfig
from tiny import tiny_model, token_rows
from torch import nn

from posttrain import SFTConfig
from posttrain.data.forest import build_forest
from posttrain.errors import ConfigError, ModelError
from posttrain.model.attention import FOREST
from posttrain.model.noise import EmbeddingNoise, token_lengths
from posttrain.model.scoring import Scoring, bind_head
from posttrain.types import Row, ScoreRequest, Segments

# ---- torch.compile ---------------------------------------------------------------------------------------------------


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


def lora() -> Any:
    return LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)


def train(compiled: str | None, setting: dict[str, Any], **fields: Any) -> Run:
    if compiled is not None:
        fields |= {"torch_compile": True, "torch_compile_backend": compiled}
    make = {"model": tiny_model(setting.get("family", "qwen3")), "peft_config": lora() if setting.get("lora") else None}
    with torch.random.fork_rng():
        torch.manual_seed(1)  # the adapter's weights
        built = sft(**make, rows=token_rows(prefix=20), **fields)
    found = run(built)
    assert not any("forward" in vars(m) for m in built.model.modules() if "DecoderLayer" in type(m).__name__)
    return found


@pytest.mark.parametrize(
    "setting",
    [
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "activation_memory_mb": 1, "lora": True},
        {"layout": "padded", "family": "gemma3"},
        pytest.param({"activation_offloading": True, "family": "gemma3"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_compiled_is_eager(setting: dict[str, Any], dynamo: Any):
    fields = {k: v for k, v in setting.items() if k not in ("lora", "family")}
    eager = train(None, setting, **fields)
    assert not dynamo["stats"]
    same(eager, train("aot_eager", setting, **fields))
    assert dynamo["stats"]["unique_graphs"] > 0


def test_new_lengths_do_not_compile_again(dynamo: Any):
    """Six steps of six lengths, with one segment, several, and a shared prefix."""
    graphs: list[int] = []
    rows = token_rows(1).from_list(
        [{"input_ids": [5 + (i * n) % 200 for i in range(n)]} for n in (9, 14, 22, 31, 47, 63)]
    )
    built = sft(
        model=tiny_model("qwen3", num_hidden_layers=3),
        rows=rows,
        per_device_train_batch_size=1,
        max_steps=6,
        torch_compile=True,
        torch_compile_backend="eager",
    )
    own = built.strategy.backward

    def backward(model: Any, loss: Any, synchronise: bool) -> None:
        graphs.append(dynamo["stats"]["unique_graphs"])
        own(model, loss, synchronise)

    built.strategy.backward = backward
    built.train()
    assert len(graphs) == 6
    # For all three layers together: before and after attention, and where the break leaves and enters its module.
    assert set(graphs) == {4}


@pytest.mark.slow
def test_compiled_by_inductor_is_eager(dynamo: Any):
    setting = {"gradient_checkpointing": True}
    same(train(None, setting, **setting), train("inductor", setting, **setting), tolerance=1e-4)
    assert dynamo["stats"]["unique_graphs"] > 0


def test_evaluation_and_generation_run_beside_compiled_layers(dynamo: Any):
    built = sft(eval_rows=token_rows(), torch_compile=True, torch_compile_backend="eager", eval_strategy="epoch")
    before = built.evaluate()["eval_loss"]
    built.train()
    assert built.evaluate()["eval_loss"] < before
    out = built.model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False, eos_token_id=-1)
    assert out.shape == (1, 6)


def test_a_model_without_layers_of_transformers_is_not_compiled():
    from posttrain.model.compiling import compile_layers

    with pytest.raises(ConfigError, match="`torch_compile`"):
        compile_layers(nn.Sequential(nn.Linear(2, 2)), "eager", None)


# ---- precision -------------------------------------------------------------------------------------------------------


def test_a_second_trainer_on_the_same_model_computes_in_bf16_too():
    model, seen = tiny_model("qwen3"), []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    for _ in range(2):
        seen.clear()
        sft(model=model, bf16=True, max_steps=1).train()
        assert set(seen) == {torch.bfloat16}


# ---- noise on embeddings ---------------------------------------------------------------------------------------------


def noise_of(lengths: list[int], layout: str, alpha: float, hidden: int = 512) -> list[torch.Tensor]:
    """The noise each sequence's embeddings got: [L, H] each."""
    model = tiny_model("qwen3", hidden_size=hidden).train()
    if layout != "padded":
        model.set_attn_implementation(FOREST)
    bind_head(model, Scoring(layout))
    batch = build_forest([Row([5 + i % 200 for i in range(n)], [1.0] * n) for n in lengths], share=False)
    seen: list[torch.Tensor] = []
    embedding = model.get_input_embeddings()
    first = embedding.register_forward_hook(lambda m, a, out: seen.append(out.detach().clone()))
    noise = EmbeddingNoise(model, alpha)
    last = embedding.register_forward_hook(lambda m, a, out: seen.append(out.detach().clone()))
    torch.manual_seed(0)
    model(token_batch=batch, score_request=ScoreRequest())
    added = seen[1] - seen[0]
    model.eval()
    model(token_batch=batch, score_request=ScoreRequest())
    assert torch.equal(seen[3], seen[2]), "no noise in evaluation"
    for handle in (first, last, noise):
        handle.remove()
    if layout == "padded":
        return [added[i, :n] for i, n in enumerate(lengths)]
    return list(added[0].split(lengths))


@pytest.mark.parametrize("layout", ["packed-unshared", "padded"])
def test_noise_is_scaled_by_each_sequence(layout: str):
    """Algorithm 1: uniform within α / √(L H), for each sequence's own L, whatever lies beside it or pads it."""
    lengths, alpha, hidden = [40, 10, 90], 5.0, 512
    for length, noise in zip(lengths, noise_of(lengths, layout, alpha, hidden), strict=True):
        bound = alpha / math.sqrt(length * hidden)
        assert noise.abs().max() <= bound * (1 + 1e-4)
        assert noise.abs().max() > 0.99 * bound
        # A uniform's standard deviation is bound / √3.
        assert noise.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)
        assert abs(noise.mean().item()) < 0.05 * bound


def test_lengths_of_tokens():
    assert token_lengths(Segments((0, 3), (3, 5), (-1, -1)), None).tolist() == [[3, 3, 3, 2, 2]]
    assert token_lengths(None, torch.tensor([[1, 1, 1], [0, 1, 1]])).tolist() == [[3], [2]]
    assert token_lengths(None, None) is None


def test_noise_in_a_run():
    """The first loss differs, sharing is off, evaluation is as it was, and the hooks are gone afterwards."""
    rows = token_rows(prefix=20)
    plain = run(sft(rows=rows, max_steps=1))
    built = sft(rows=rows, max_steps=1, neftune_noise_alpha=5.0, eval_rows=token_rows())
    before = built.evaluate()["eval_loss"]
    noisy = run(built)
    assert noisy.logs[0]["shared_share"] == 0
    assert noisy.losses[0] != pytest.approx(plain.losses[0], rel=1e-6)
    assert not built.model.get_input_embeddings()._forward_hooks
    assert before == pytest.approx(sft(eval_rows=token_rows()).evaluate()["eval_loss"], rel=1e-6)


def test_noise_and_shared_prefixes_are_refused():
    with pytest.raises(ConfigError, match="`neftune_noise_alpha`"):
        sft(neftune_noise_alpha=5.0, share_prefixes=True)


# ---- Liger -----------------------------------------------------------------------------------------------------------


def config(**fields: Any) -> SFTConfig:
    return SFTConfig(output_dir="out", use_cpu=True, bf16=False, report_to="none", **fields)


def test_ligers_choice_is_kept_but_for_the_head():
    assert config(use_liger_kernel=True).liger_kernel_config == {
        "fused_linear_cross_entropy": False,
        "cross_entropy": False,
    }
    chosen = config(use_liger_kernel=True, liger_kernel_config={"rope": False}).liger_kernel_config
    assert chosen == {"rope": False, "fused_linear_cross_entropy": False, "cross_entropy": False}


@pytest.mark.parametrize("name", ["fused_linear_cross_entropy", "cross_entropy"])
def test_ligers_head_is_refused(name: str):
    with pytest.raises(ConfigError, match=f"turns '{name}' on"):
        config(use_liger_kernel=True, liger_kernel_config={name: True})


LIGER = """
import os
os.environ["TRITON_INTERPRET"] = "1"  # read when liger is imported: its kernels run as Python on a CPU
from laws.runs import run, same, sft
from tiny import tiny_model, token_rows
from transformers.integrations.liger import apply_liger_kernel
import sys

family = sys.argv[1]
fields = {"max_steps": 2, "rows": token_rows(4, longest=8), "per_device_train_batch_size": 2}
plain = run(sft(model=tiny_model(family), **fields))
# Triton's interpreter stumbles over the kernels of the norm and of the gate; that of the rotary embedding runs.
some = {"rms_norm": False, "swiglu": False}
same(plain, run(sft(model=tiny_model(family), use_liger_kernel=True, liger_kernel_config=some, **fields)), 1e-4)
rope = sys.modules[type(tiny_model(family)).__module__].apply_rotary_pos_emb
assert rope.__module__.startswith("liger_kernel"), rope.__module__

built = sft(model=tiny_model(family), **fields)
from posttrain import SFTConfig
chosen = SFTConfig(output_dir="out", use_cpu=True, bf16=False, report_to="none", use_liger_kernel=True)
apply_liger_kernel(built.model, chosen.liger_kernel_config)
layer = built.model.model.layers[0]
assert layer.mlp.forward.__module__.startswith("liger_kernel")
assert layer.input_layernorm.forward.__module__.startswith("liger_kernel")
assert built.model.forward.__module__ == built.model.lm_head.forward.__module__ == "posttrain.model.scoring"
print("as it should be")
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_liger_patches_layers_and_leaves_our_head(family: str):
    """In a process of its own: Liger changes modules of transformers for good."""
    pytest.importorskip("liger_kernel")
    done = subprocess.run([sys.executable, "-c", LIGER, family], capture_output=True, text=True, env=dict(os.environ))
    assert "as it should be" in done.stdout, done.stderr[-3000:]


# ---- hub kernels -----------------------------------------------------------------------------------------------------


def test_the_head_survives_kernels_put_on_layers():
    """As `kernels.kernelize` does: the forward of every layer it knows is replaced on the instance."""
    plain = run(sft(max_steps=2))
    model = tiny_model("qwen3")
    calls = []
    built = sft(model=model, max_steps=2)
    for module in model.modules():
        if type(module).__name__ == "Qwen3RMSNorm":

            def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
                calls.append(self)
                return type(self).forward(self, x)

            module.forward = MethodType(forward, module)
    same(plain, run(built))
    assert len(calls) == 2 * (2 * 4 + 1)


@pytest.mark.skipif(importlib.util.find_spec("kernels") is not None, reason="the package is installed")
@pytest.mark.parametrize("asked", [{"use_kernels": True}, {"attn_implementation": "kernels-community/flash-attn2"}])
def test_hub_kernels_without_their_package_are_an_error(asked: dict[str, Any], tmp_path: Any):
    tiny_model("qwen3").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="kernels"):
        sft(model=str(tmp_path), model_init_kwargs=asked)
