"""The output projection, whatever module it is: plain, under an adapter, trained in full, quantized.

The head goes through its *modules*, whose hooks (FSDP2, ZeRO-3) gather their weights for a forward and, called back
through the tensors that a forward returns, for its backward. So the scoring function runs in place of a module's
forward, and answers with a tuple of tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from posttrain.errors import ModelError
from posttrain.loss.linear import HeadSpec, head_scores, module_scores
from posttrain.loss.projection import Operands
from posttrain.types import ScoreRequest, TokenScores

_SCALES: dict[str, Callable[[float], float]] = {
    "logit_scale": lambda x: x,  # Cohere
    "output_multiplier": lambda x: x,
    "lm_head_multiplier": lambda x: x,  # Falcon-H1
    "logits_scaling": lambda x: 1.0 / x,  # Granite
}
"""Fields of a config that multiply the logits."""


def head_spec(config: Any, chunk_tokens: int | None = None, memory_bytes: int = 1 << 30) -> HeadSpec:
    """Read from a model's config what follows its output projection: a scale, or Gemma's `final_logit_softcapping`.

    What is missed here is caught by the probe, which compares with the model's own logits.
    """
    text, scale = config.get_text_config(), 1.0
    for name, of in _SCALES.items():
        if getattr(text, name, None) is not None:
            scale = of(float(getattr(text, name)))
    return HeadSpec(scale, getattr(text, "final_logit_softcapping", None), chunk_tokens, memory_bytes)


def check_head(model: PreTrainedModel) -> None:
    """Raise `ModelError` for a model that has no output projection."""
    if not isinstance(model.get_output_embeddings(), nn.Module):
        raise ModelError(
            f"`model` is a {type(model).__name__}, which has no output projection to a vocabulary; load it with "
            "AutoModelForCausalLM."
        )


def score_hidden(head: Any, hidden: Tensor, targets: Tensor, spec: HeadSpec, request: ScoreRequest) -> TokenScores:
    """Score hidden states [N, H] with the head module, exactly as its own forward would."""

    def score(given: Operands) -> Any:
        return _tensors(head_scores(given, targets, spec, request))

    found = _with_operands(head, hidden, score)
    if found is None:
        vocabulary = int(getattr(head, "out_features", None) or head.weight.shape[0])
        if torch.is_grad_enabled() and any(parameter.numel() == 0 for parameter in head.parameters()):
            raise ModelError(
                f"the output projection is a {type(head).__module__}.{type(head).__name__} whose weights ZeRO-3 has "
                "partitioned, and its chunks cannot be computed twice then: use plain LoRA on it, or ZeRO-2."
            )
        return module_scores(lambda h: head(h), hidden, targets, vocabulary, spec, request)
    return _scores(found, request)


def within(module: nn.Module, x: Tensor, fn: Callable[[Tensor], Any]) -> Any:
    """`fn(x)` in place of the module's forward: between its hooks, which have gathered its weights."""
    own = module.__dict__.get("forward")
    module.forward = fn
    try:
        return module(x)
    finally:
        del module.forward
        if own is not None:
            module.forward = own


# ---- head module → operands --------------------------------------------------------------------------------------


def _with_operands(head: Any, hidden: Tensor, score: Callable[[Operands], Any]) -> Any:
    """Call `score` with what the head multiplies, or return None for a head of which only its forward is known."""
    if type(head).forward is nn.Linear.forward:
        return within(head, hidden, lambda h: score(Operands(h, _whole(head.weight), _whole(head.bias))))
    if "peft" not in sys.modules:
        return None
    from peft.tuners.lora.layer import Linear as LoraLinear
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    if isinstance(head, ModulesToSaveWrapper):
        return _with_operands(_saved_module(head), hidden, score)
    if isinstance(head, TrainableTokensWrapper):
        return _with_trained_tokens(head, hidden, score)
    return _with_lora(head, hidden, score) if type(head) is LoraLinear else None


def _saved_module(head: Any) -> nn.Module:
    """The module that a `modules_to_save` wrapper calls: the active adapter's copy, or the original."""
    active = head.active_adapters
    on = active and not head.disable_adapters and all(name in head.modules_to_save for name in active)
    return head.modules_to_save[active[0]] if on else head.original_module


def _with_trained_tokens(head: Any, hidden: Tensor, score: Callable[[Operands], Any]) -> Any:
    """Rows of the weight replaced by trained ones. peft leaves out a bias there; such a head keeps its own forward."""
    layer = head.token_adapter
    base = layer.get_base_layer()
    names = [] if layer.disable_adapters or layer.merged else list(layer.active_adapters)
    if layer.disable_adapters and layer.merged:
        return None  # its forward takes the merged rows out first
    if not names:
        return _with_operands(base, hidden, score)
    if base.bias is not None or any(name not in layer.trainable_tokens_delta for name in names):
        return None
    index = [i for name in names for i in layer.token_indices[name]]
    if len(set(index)) < len(index):
        return None  # its forward refuses two adapters of one token
    rows = torch.cat([_whole(layer.trainable_tokens_delta[name]) for name in names])
    index = torch.tensor(index, device=rows.device)
    return _with_operands(base, hidden, lambda given: score(replace(given, index=index, rows=rows)))


def _with_lora(head: Any, hidden: Tensor, score: Callable[[Operands], Any]) -> Any:
    """W + s·B A of every active adapter. Variants (DoRA, …) keep their own forward."""
    if head.disable_adapters and head.merged:
        return None  # its forward takes the merged weights out first
    names = [n for n in head.active_adapters if n in head.lora_A and not (head.disable_adapters or head.merged)]
    if any(n in head.lora_variant or head.lora_bias[n] for n in names):
        return None
    if not names:
        return _with_operands(head.base_layer, hidden, score)
    narrow = []
    for n in names:
        x = hidden.to(head.lora_A[n].weight.dtype)
        narrow.append(head.lora_A[n](head.lora_dropout[n](x)) * head.scaling[n])

    def inside(left: list[str], wide: list[Tensor]) -> Any:
        if left:
            module = head.lora_B[left[0]]
            return within(module, hidden, lambda _: inside(left[1:], [*wide, _whole(module.weight)]))
        u, b = (torch.cat(narrow, 1), torch.cat(wide, 1)) if len(wide) > 1 else (narrow[0], wide[0])
        return _with_operands(head.base_layer, hidden, lambda given: score(replace(given, narrow=u, wide=b)))

    return inside(names, [])


def _whole(weight: Any) -> Any:
    """A weight that is still in shards is gathered; its gradient goes back to them."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


# ---- a tuple of tensors, for the hooks of the modules it passes ------------------------------------------------------


def _tensors(scores: TokenScores) -> tuple[Tensor, ...]:
    found = (scores.logps, scores.total, scores.entropy, scores.top1, scores.mean_logit)
    return tuple(x for x in found if x is not None)


def _scores(found: tuple[Tensor, ...], request: ScoreRequest) -> TokenScores:
    rest = iter(found[1:])
    return TokenScores(
        logps=found[0],
        total=next(rest) if request.objective is not None else None,
        entropy=next(rest) if request.entropy else None,
        top1=next(rest) if request.top1 else None,
        mean_logit=next(rest) if request.mean_logit else None,
    )
