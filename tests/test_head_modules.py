"""The head as any module: adapters on it, copies trained in full, trained tokens. Scores and gradients against the
model's own logits and autograd."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoHaConfig, LoraConfig, PeftModel, get_peft_model
from pool import POOL
from tiny import tiny_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import posttrain.model.head as head_room
from posttrain.data.forest import build_forest
from posttrain.errors import ModelError
from posttrain.loss.linear import HeadSpec
from posttrain.loss.nll import nll
from posttrain.model.head import check_head, score_hidden, within
from posttrain.model.load import LoadOptions, base_model, prepare_model
from posttrain.types import Row, ScoreRequest

IDS = [[5, 9, 11, 200, 7, 33, 250], [5, 9, 60, 61, 2], [100, 299, 3, 3, 8, 41]]
LORA: dict[str, Any] = {"r": 3, "lora_alpha": 7, "lora_dropout": 0.0, "target_modules": ["lm_head", "q_proj"]}


def shaken(model: Any, size: float = 0.3) -> Any:
    """Every trainable weight moved away from where it starts, by the same amounts each time."""
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += size * torch.randn(p.shape, generator=draw).to(p.dtype)
    return model


def wrapped(config: Any, tied: bool = False, **overrides: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return shaken(get_peft_model(tiny_model("llama", tie_word_embeddings=tied, **overrides), config))


def two_adapters() -> Any:
    model = wrapped(LoraConfig(**LORA))
    model.add_adapter("other", LoraConfig(**LORA | {"r": 2, "lora_alpha": 3}))
    model.base_model.set_adapter(["default", "other"])
    return shaken(model)


def other_adapter_is_active() -> Any:
    model = wrapped(LoraConfig(**LORA))
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    model.set_adapter("other")
    return shaken(model)


def disabled() -> Any:
    model = wrapped(LoraConfig(**LORA | {"modules_to_save": ["embed_tokens"]}))
    model.base_model.disable_adapter_layers()
    return model.requires_grad_(True)


def with_bias(config: Any) -> Any:
    model = tiny_model("llama")
    model.lm_head = nn.Linear(32, 300)
    return shaken(get_peft_model(model, config))


TOKENS = [7, 33, 250, 2]
ON_TOKENS: dict[str, Any] = {"r": 3, "target_modules": ["q_proj"], "lora_dropout": 0.0}
KNOWN: dict[str, Callable[[], Any]] = {
    "plain": lambda: tiny_model("llama"),
    "tied": lambda: tiny_model("llama", tie_word_embeddings=True),
    "lora": lambda: wrapped(LoraConfig(**LORA)),
    "rslora": lambda: wrapped(LoraConfig(**LORA, use_rslora=True)),
    "lora on a bias": lambda: with_bias(LoraConfig(**LORA)),
    "lora, tied": lambda: wrapped(LoraConfig(**LORA), tied=True),
    "lora on both sides, tied": lambda: wrapped(
        LoraConfig(**LORA | {"target_modules": ["lm_head", "embed_tokens"], "ensure_weight_tying": True}), tied=True
    ),
    "two adapters": two_adapters,
    "inactive on the head": other_adapter_is_active,
    "disabled": disabled,
    "saved head": lambda: wrapped(LoraConfig(**ON_TOKENS, modules_to_save=["lm_head"])),
    "saved head, tied": lambda: wrapped(LoraConfig(**ON_TOKENS, modules_to_save=["lm_head"]), tied=True),
    "saved both": lambda: wrapped(LoraConfig(**ON_TOKENS, modules_to_save=["lm_head", "embed_tokens"])),
    "saved both, kept tied": lambda: wrapped(
        LoraConfig(**ON_TOKENS, modules_to_save=["embed_tokens"], ensure_weight_tying=True), tied=True
    ),
    "tokens": lambda: wrapped(LoraConfig(**ON_TOKENS, trainable_token_indices=TOKENS)),
    "tokens, tied": lambda: wrapped(LoraConfig(**ON_TOKENS, trainable_token_indices=TOKENS), tied=True),
    "tokens of the head": lambda: wrapped(
        LoraConfig(**ON_TOKENS, trainable_token_indices={"lm_head": TOKENS, "embed_tokens": [4]})
    ),
}
OPAQUE: dict[str, Callable[[], Any]] = {
    "dora": lambda: wrapped(LoraConfig(**LORA, use_dora=True)),
    "lora with a bias": lambda: with_bias(LoraConfig(**LORA, lora_bias=True)),
    "loha": lambda: wrapped(LoHaConfig(r=2, target_modules=["lm_head"])),
    "dora, tied": lambda: wrapped(LoraConfig(**LORA, use_dora=True), tied=True),
}


def prepared(model: Any) -> Any:
    return prepare_model(model, LoadOptions(layout="packed")).model.train()


def batch() -> Any:
    return build_forest([Row(ids, [1.0] * len(ids)) for ids in IDS], share=True)


def own_logps(model: Any, like: Any) -> Tensor:
    """From the logits of the model's own forward, a row at a time, in the batch's order."""
    found = []
    for ids in IDS:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        logp = torch.log_softmax(logits.float() if logits.dtype != torch.float64 else logits, -1)
        found.append(logp.gather(1, torch.tensor(ids)[1:, None])[:, 0])
    assert torch.equal(like.targets, torch.tensor([t for ids in IDS for t in ids[1:]]))
    return torch.cat(found)


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


def ours(model: Any, planned: bool) -> tuple[Tensor, dict[str, Tensor]]:
    b = batch()
    weights = torch.linspace(0.2, 1.4, len(b.targets))
    request = ScoreRequest(objective=(lambda lp, i: nll(lp, weights[i])) if planned else None, entropy=True, top1=True)
    scores = model(token_batch=b, score_request=request)
    total = scores.total if planned else nll(scores.logps, weights).sum()
    assert scores.entropy.shape == scores.top1.shape == scores.logps.shape
    return scores.logps.detach(), gradients(model, total)


def reference(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    logps = own_logps(model, batch())
    weights = torch.linspace(0.2, 1.4, len(logps)).to(logps.dtype)
    return logps.detach(), gradients(model, (-weights * logps).sum())


def agree(model: Any, planned: bool, tolerance: float = 2e-5) -> None:
    got_logps, got = ours(model, planned)
    want_logps, want = reference(model)
    torch.testing.assert_close(got_logps, want_logps, rtol=0, atol=tolerance)
    # A weight that plays no part has no gradient in autograd, and may have one of zeros here.
    assert {n for n, g in got.items() if g.any()} == {n for n, g in want.items() if g.any()} != set()
    for name, g in want.items():
        torch.testing.assert_close(got[name], g, rtol=0, atol=tolerance * max(1.0, g.abs().max().item()), msg=name)


@pytest.mark.parametrize("planned", [True, False], ids=["planned", "deferred"])
@pytest.mark.parametrize("kind", KNOWN)
def test_operands_of_a_known_head(kind: str, planned: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(head_room, "module_scores", None)  # none of these may fall back to the head's own forward
    agree(prepared(KNOWN[kind]()), planned)


@pytest.mark.parametrize("planned", [True, False], ids=["planned", "deferred"])
@pytest.mark.parametrize("kind", OPAQUE)
def test_any_other_head_goes_through_its_own_forward(kind: str, planned: bool):
    agree(prepared(OPAQUE[kind]()), planned)


@pytest.mark.parametrize("planned", [True, False], ids=["planned", "deferred"])
@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "lm_head"]], ids=["", "lora"])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_head_goes_through_its_own_forward(bits: int, targets: list[str], planned: bool, tmp_path: Any):
    """bitsandbytes leaves the head alone unless it is told otherwise."""
    tiny_model("llama", hidden_size=64, head_dim=16).save_pretrained(tmp_path)
    fields: dict[str, Any] = {f"load_in_{bits}bit": True, "llm_int8_skip_modules": ["norm"]}
    quantization = BitsAndBytesConfig(**fields, bnb_4bit_compute_dtype="float32", bnb_4bit_quant_type="nf4")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantization)
    assert type(model.lm_head).__name__ == {4: "Linear4bit", 8: "Linear8bitLt"}[bits]
    torch.manual_seed(0)
    config = LoraConfig(**LORA | {"target_modules": targets})
    model = prepare_model(model, LoadOptions(layout="packed"), config).model.train()
    agree(shaken(model, 0.05), planned, 2e-5 if bits == 4 else 2e-2)  # 8 bits: products are rounded by the row


@pytest.mark.parametrize("planned", [True, False], ids=["planned", "deferred"])
@pytest.mark.parametrize("kind", ["lora", "tokens, tied"])
def test_an_adapter_merged_for_a_while(kind: str, planned: bool):
    model = prepared(KNOWN[kind]())
    before = ours(model, planned)[0]
    model.merge_adapter()
    agree(model.requires_grad_(True), planned)
    torch.testing.assert_close(ours(model, planned)[0], before, rtol=0, atol=2e-5)
    model.unmerge_adapter()
    agree(model, planned)


@pytest.mark.parametrize("kind", ["lora", "tokens, tied", "saved head", "dora"])
@pytest.mark.parametrize("spec", [HeadSpec(chunk_tokens=1), HeadSpec(chunk_tokens=5), HeadSpec(memory_bytes=1)])
@pytest.mark.parametrize("planned", [True, False], ids=["planned", "deferred"])
def test_chunks_and_memory_change_nothing(kind: str, spec: HeadSpec, planned: bool):
    model = prepared((KNOWN | OPAQUE)[kind]())
    whole_logps, whole = ours(model, planned)
    scoring = base_model(model)._posttrain_scoring
    object.__setattr__(scoring, "spec", spec)
    logps, found = ours(model, planned)
    torch.testing.assert_close(logps, whole_logps, rtol=0, atol=1e-6)
    for name, g in whole.items():
        torch.testing.assert_close(found[name], g, rtol=0, atol=1e-5 * max(1.0, g.abs().max().item()), msg=name)


@pytest.mark.parametrize("kind", ["lora", "two adapters", "saved head", "tokens, tied", "dora"])
@pytest.mark.parametrize("autocast", [False, True], ids=["bf16 base", "autocast"])
def test_bfloat16_errs_no_more_than_the_models_own_forward(kind: str, autocast: bool):
    """Against float64. The products are in bfloat16 in both."""
    model = shaken(prepared((KNOWN | OPAQUE)[kind]()), -0.25)  # a small adapter, as in life
    if not autocast:
        for p in model.parameters():
            p.data = p.data if p.requires_grad and kind != "saved head" else p.data.bfloat16()
    exact_logps, exact = reference(copy.deepcopy(model).double())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got_logps, got = ours(model, planned=True)
        own_logps_, own = reference(model)

    def error(found: dict[str, Tensor]) -> float:
        total = sum((found[n] - g).square().sum() for n, g in exact.items())
        return float(total.sqrt() / sum(g.square().sum() for g in exact.values()).sqrt())

    assert (got_logps - exact_logps).norm() <= 1.4 * (own_logps_ - exact_logps).norm() + 1e-3
    assert error(got) <= 1.4 * error(own) + 1e-3


def large_products(model: Any) -> list[tuple[torch.Size, torch.Size, torch.dtype]]:
    """Of a planned forward and backward of the head alone, those with the vocabulary in both operands or the result."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.addmm_.default):
                a, b = args[-2:]
                if 300 in (*a.shape, *b.shape):
                    seen.append((a.shape, b.shape, a.dtype))
            return func(*args, **(kwargs or {}))

    hidden = torch.randn(17, 32, requires_grad=True)
    targets = torch.arange(17)
    with Watch():
        scores = score_hidden(
            base_model(model).get_output_embeddings(), hidden, targets, HeadSpec(), ScoreRequest(lambda lp, i: -lp)
        )
        assert scores.total is not None
        scores.total.backward()
    return seen


def test_an_adapter_on_the_head_costs_its_rank_and_no_matrix_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True, raising=False)
    model = prepared(KNOWN["lora"]())
    with torch.autocast("cpu", torch.bfloat16):
        seen = large_products(model)
    # logits h Wᵀ + u Bᵀ; d u, d B, d h: five, all bf16, and none forms dW or B A, [300, 32].
    assert len(seen) == 5 and {dtype for *_, dtype in seen} == {torch.bfloat16}
    assert not [1 for a, b, _ in seen if (a[0], b[1]) in ((300, 32), (32, 300))]


def test_trained_tokens_form_no_gradient_of_the_whole_weight():
    seen = large_products(prepared(KNOWN["tokens, tied"]()))
    assert len(seen) == 2  # logits and d hidden


def test_dropout_on_the_head_drops_in_training_only():
    model = prepared(wrapped(LoraConfig(**LORA | {"lora_dropout": 0.5, "target_modules": ["lm_head"]})))
    torch.manual_seed(0)
    first, second = ours(model, True)[0], ours(model, True)[0]
    assert not torch.allclose(first, second)
    model.eval()
    torch.testing.assert_close(ours(model, True)[0], own_logps(model, batch()).detach(), rtol=0, atol=2e-5)


def test_dropout_on_the_head_is_that_of_peft():
    """The same mask where both draw it over the same hidden states; gradients too."""
    model = wrapped(LoraConfig(**LORA | {"lora_dropout": 0.5})).train()
    head: Any = model.get_base_model().lm_head
    targets = torch.arange(17)
    hidden = torch.randn(17, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    torch.manual_seed(5)
    logps = torch.log_softmax(head(hidden), -1).gather(1, targets[:, None])[:, 0]
    want = torch.autograd.grad(-logps.sum(), [hidden, head.lora_A["default"].weight, head.lora_B["default"].weight])
    torch.manual_seed(5)
    scores = score_hidden(head, hidden, targets, HeadSpec(), ScoreRequest(lambda lp, i: -lp))
    assert scores.total is not None
    got = torch.autograd.grad(scores.total, [hidden, head.lora_A["default"].weight, head.lora_B["default"].weight])
    torch.testing.assert_close(scores.logps, logps.detach(), rtol=0, atol=1e-5)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_no_readouts_still_backpropagate():
    for kind in ("lora", "tokens, tied", "dora"):
        model = prepared((KNOWN | OPAQUE)[kind]())
        scores = model(token_batch=build_forest([]), score_request=ScoreRequest(lambda lp, i: lp))
        found = gradients(model, scores.total)
        assert scores.total == 0 and found and not any(g.any() for g in found.values())


def test_no_gradient_is_formed_without_grad():
    for kind in ("lora", "tokens, tied", "dora"):
        model = prepared((KNOWN | OPAQUE)[kind]())
        with torch.no_grad():
            scores = model(token_batch=batch(), score_request=ScoreRequest(lambda lp, i: -lp))
        assert not scores.total.requires_grad


def test_a_weight_in_shards_is_gathered_and_its_gradient_goes_back():
    """On a mesh of one process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        draw = torch.Generator().manual_seed(0)
        for placement in (Shard(0), Replicate()):
            full = torch.randn(40, 8, generator=draw)
            head = nn.Linear(8, 40, bias=False)
            head.weight = nn.Parameter(distribute_tensor(full, mesh, [placement]))
            hidden, targets = torch.randn(5, 8, generator=draw), torch.arange(5)
            scores = score_hidden(head, hidden, targets, HeadSpec(), ScoreRequest(lambda lp, i: -lp))
            assert scores.total is not None
            scores.total.backward()
            want = full.clone().requires_grad_()
            torch.nn.functional.cross_entropy(hidden @ want.t(), targets, reduction="sum").backward()
            grad: Any = head.weight.grad
            assert grad.placements == (placement,)
            torch.testing.assert_close(grad.full_tensor(), want.grad)
    finally:
        dist.destroy_process_group()


def sharded(kind: str, planned: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """On one rank of two: layers, head and the rest in units of FSDP2."""
    from torch.distributed.fsdp import fully_shard

    model = prepared(KNOWN[kind]())
    mesh = init_device_mesh("cpu", (2,))
    base = base_model(model)
    for layer in base.model.layers:
        fully_shard(layer, mesh=mesh)
    if "tied" not in kind:
        fully_shard(base.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    with mock.patch.object(head_room, "module_scores", None):
        logps, found = ours(model, planned)
    return logps, {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}


@pytest.mark.parametrize("kind", ["plain", "tied", "lora", "saved both", "tokens, tied"])
@pytest.mark.parametrize("planned", [True, False], ids=["planned", "deferred"])
def test_a_sharded_model_scores_as_a_whole_one(kind: str, planned: bool):
    want_logps, want = ours(prepared(KNOWN[kind]()), planned)
    for logps, found in POOL.run(sharded, kind=kind, planned=planned):
        torch.testing.assert_close(logps, want_logps, rtol=0, atol=2e-5)
        assert {n for n, g in want.items() if g.any()} <= found.keys()
        for name, g in want.items():
            torch.testing.assert_close(found[name], g, rtol=0, atol=2e-5 * max(1.0, g.abs().max().item()), msg=name)


def test_the_hooks_of_every_module_see_the_call_and_its_tensors():
    """FSDP2 and ZeRO-3 gather weights in these hooks, and find the tensors to wait for in what a forward returns."""
    model = prepared(KNOWN["lora"]())
    head: Any = base_model(model).lm_head
    seen: dict[str, int] = {}
    for name, module in head.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda m, args, name=name: seen.__setitem__(name, len(args)))
            module.register_forward_hook(
                lambda m, args, out, name=name: seen.__setitem__(
                    name + " out", sum(isinstance(x, Tensor) for x in (out if isinstance(out, tuple) else (out,)))
                )
            )
    ours(model, planned=True)
    assert seen.keys() == {
        f"{n}{out}" for n in ("base_layer", "lora_A.default", "lora_B.default") for out in ("", " out")
    }
    assert all(count >= 1 for count in seen.values())


def test_a_partitioned_head_that_would_be_computed_twice_is_refused():
    """As under ZeRO-3, where weights are empty outside of their module's hooks."""
    model = prepared(OPAQUE["dora"]())
    base_model(model).lm_head.base_layer.weight.data = torch.empty(0)
    with pytest.raises(ModelError, match=r"lora.layer.Linear.*ZeRO-3.*ZeRO-2"):
        ours(model, planned=True)


def test_within_leaves_the_module_as_it_was():
    module = nn.Linear(2, 2)
    assert within(module, torch.ones(1), lambda x: x + 1) == 2 and "forward" not in vars(module)
    module.forward = own = lambda x: x
    assert within(module, torch.ones(1), lambda x: x + 1) == 2 and vars(module)["forward"] is own
    with pytest.raises(ZeroDivisionError):
        within(module, torch.ones(1), lambda x: 1 / 0)
    assert vars(module)["forward"] is own


def test_a_model_without_a_head_is_refused():
    with pytest.raises(ModelError, match="has no output projection"):
        check_head(tiny_model("llama").model)


def test_reloaded_adapter_has_the_same_scores(tmp_path: Any):
    for kind in ("lora", "saved both", "tokens, tied", "dora"):
        model = prepared((KNOWN | OPAQUE)[kind]())
        before = own_logps(model, batch())
        model.save_pretrained(tmp_path / kind)
        base = tiny_model("llama", tie_word_embeddings="tied" in kind)
        again = prepared(PeftModel.from_pretrained(base, tmp_path / kind, is_trainable=True))
        torch.testing.assert_close(ours(again, True)[0], before.detach(), rtol=0, atol=2e-5)
