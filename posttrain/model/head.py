"""The output projection, whatever module it is: plain, under an adapter, trained in full, quantized.

The head goes through its *modules*, whose hooks (FSDP2, ZeRO-3) gather their weights for a forward and, called back
through the tensors that a forward returns, for its backward. So the scoring function runs in place of a module's
forward, and answers with a tuple of tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from posttrain.errors import ModelError
from posttrain.loss.linear import HeadSpec, head_scores, module_scores
from posttrain.loss.projection import Operands
from posttrain.parallel.params import whole
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


def output_head(model: Any) -> Any:
    """The module on top of the model: its output projection, else the head that gives labels; None where it has
    neither."""
    projection = model.get_output_embeddings()
    return label_head(model) if projection is None else projection


LABEL_HEADS = ("score", "classifier")
"""What transformers calls a head of labels."""


def label_head(model: Any) -> Any:
    """What AutoModelForSequenceClassification and AutoModelForTokenClassification put on the hidden states; None for a
    model that has an output projection."""
    found = [getattr(model, name, None) for name in LABEL_HEADS]
    modules = [module for module in found if isinstance(module, nn.Module)]
    return modules[0] if modules and model.get_output_embeddings() is None else None


def labels_of(head: Any) -> int | None:
    """How many labels a head gives; None where it does not say."""
    inner = getattr(head, "original_module", head)
    return getattr(getattr(inner, "base_layer", inner), "out_features", None)


def check_head(model: PreTrainedModel) -> None:
    """Raise `ModelError` for a model that has no output projection and no head of labels."""
    if not isinstance(output_head(model), nn.Module):
        raise ModelError(
            f"`model` is a {type(model).__name__}, which has no output projection to a vocabulary; load it with "
            "AutoModelForCausalLM."
        )


def label_values(model: Any, hidden: Tensor) -> Tensor:
    """[N, L] in float32: what the head of labels gives of hidden states [N, H]. The product is in float32, since a
    reward in bfloat16 has two digits."""
    head, dropout = label_head(model), getattr(model, "dropout", None)
    if isinstance(dropout, nn.Dropout):
        hidden = dropout(hidden)

    def score(given: Operands) -> tuple[Tensor]:
        found = linear(given.hidden.float(), given.weight.float(), None if given.bias is None else given.bias.float())
        if given.narrow is not None and given.wide is not None:
            found = found + given.narrow.float() @ given.wide.float().T
        return (found,)

    with torch.autocast(hidden.device.type, enabled=False):
        return _with_operands(head, hidden, score)[0] if is_known(head) else head(hidden).float()


def score_hidden(head: Any, hidden: Tensor, targets: Tensor, spec: HeadSpec, request: ScoreRequest) -> TokenScores:
    """Score hidden states [N, H] with the head module, exactly as its own forward would."""

    if is_known(head):

        def score(given: Operands) -> tuple[Tensor, ...]:
            return _tensors(head_scores(given, targets, spec, request))

        return _scores(_with_operands(head, hidden, score), request)
    if torch.is_grad_enabled() and any(parameter.numel() == 0 for parameter in head.parameters()):
        raise ModelError(
            f"the output projection is a {type(head).__module__}.{type(head).__name__} whose weights ZeRO-3 has "
            "partitioned, and its chunks cannot be computed twice then: use plain LoRA on it, or ZeRO-2."
        )
    vocabulary = int(getattr(head, "out_features", None) or head.weight.shape[0])
    return module_scores(lambda h: head(h), hidden, targets, vocabulary, spec, request)


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

_Score = Callable[[Operands], tuple[Tensor, ...]]


def _kind(head: Any) -> str:
    """linear, saved, tokens, lora or other; by its forward, since FSDP2 gives a module a class of its own."""
    forwards: dict[Any, str] = {nn.Linear.forward: "linear"}
    if "peft" in sys.modules:
        from peft.tuners.lora.layer import Linear as LoraLinear
        from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

        forwards[LoraLinear.forward] = "lora"
        for wrapper, kind in ((ModulesToSaveWrapper, "saved"), (TrainableTokensWrapper, "tokens")):
            if isinstance(head, wrapper):
                return kind
    return forwards.get(type(head).forward, "other")


def is_known(head: Any) -> bool:
    """Whether operands say all of what the head computes. What they do not say is left to its own forward: merged
    adapters that are switched off (it takes them out first), variants of LoRA, biases that peft leaves out."""
    kind = _kind(head)
    if kind == "saved":
        return is_known(_saved_module(head))
    if kind == "tokens":
        layer, names = head.token_adapter, _active(head.token_adapter, head.token_adapter.token_indices)
        ids = [i for name in names for i in layer.token_indices[name]]
        fits = not names or (layer.get_base_layer().bias is None and len(set(ids)) == len(ids))
        return fits and not (layer.disable_adapters and layer.merged) and is_known(layer.get_base_layer())
    if kind == "lora":
        plain = not any(name in head.lora_variant or head.lora_bias[name] for name in _active(head, head.lora_A))
        return plain and not (head.disable_adapters and head.merged) and is_known(head.base_layer)
    return kind == "linear"


def _with_operands(head: Any, hidden: Tensor, score: _Score) -> tuple[Tensor, ...]:
    """Call `score` with what a known head multiplies, inside the forward of every module that holds a part of it."""
    run = {"saved": _with_saved, "tokens": _with_tokens, "lora": _with_lora, "linear": _with_linear}[_kind(head)]
    return within(head, hidden, lambda h: run(head, h, score))


def _with_linear(head: Any, hidden: Tensor, score: _Score) -> tuple[Tensor, ...]:
    return score(Operands(hidden, whole(head.weight), None if head.bias is None else whole(head.bias)))


def _with_saved(head: Any, hidden: Tensor, score: _Score) -> tuple[Tensor, ...]:
    return _with_operands(_saved_module(head), hidden, score)


def _saved_module(head: Any) -> nn.Module:
    """The module that a `modules_to_save` wrapper calls: the active adapter's copy, or the original."""
    active = head.active_adapters
    on = active and not head.disable_adapters and all(name in head.modules_to_save for name in active)
    return head.modules_to_save[active[0]] if on else head.original_module


def _with_tokens(head: Any, hidden: Tensor, score: _Score) -> tuple[Tensor, ...]:
    """Rows of the weight replaced by trained ones."""
    layer = head.token_adapter
    names = _active(layer, layer.token_indices)
    if not names:
        return _with_operands(layer.get_base_layer(), hidden, score)
    rows = torch.cat([whole(layer.trainable_tokens_delta[name]) for name in names])
    index = torch.tensor([i for name in names for i in layer.token_indices[name]], device=rows.device)
    return _with_operands(layer.get_base_layer(), hidden, lambda given: score(replace(given, index=index, rows=rows)))


def _with_lora(head: Any, hidden: Tensor, score: _Score) -> tuple[Tensor, ...]:
    """W + s·B A of every active adapter."""
    names = _active(head, head.lora_A)
    narrow = []
    for name in names:
        x = head.lora_dropout[name](hidden.to(head.lora_A[name].weight.dtype))
        narrow.append(head.lora_A[name](x) * head.scaling[name])

    def inside(left: list[str], wide: list[Tensor]) -> tuple[Tensor, ...]:
        if left:
            module = head.lora_B[left[0]]
            return within(module, hidden, lambda _: inside(left[1:], [*wide, whole(module.weight)]))
        if not wide:
            return _with_operands(head.base_layer, hidden, score)
        u, b = (torch.cat(narrow, 1), torch.cat(wide, 1)) if len(wide) > 1 else (narrow[0], wide[0])
        return _with_operands(head.base_layer, hidden, lambda given: score(replace(given, narrow=u, wide=b)))

    return inside(names, [])


def _active(layer: Any, known: Iterable[str]) -> list[str]:
    """Adapters of a layer that its forward adds; none while they are switched off, or in the weight already."""
    return [] if layer.disable_adapters or layer.merged else [n for n in layer.active_adapters if n in known]


# ---- a tuple of tensors, for the hooks of the modules it passes ------------------------------------------------------


def _tensors(scores: TokenScores) -> tuple[Tensor, ...]:
    found = (scores.logps, scores.total, scores.entropy, scores.top1, scores.mean_logit, scores.log_collision)
    return tuple(x for x in found if x is not None)


def _scores(found: tuple[Tensor, ...], request: ScoreRequest) -> TokenScores:
    rest = iter(found[1:])
    return TokenScores(
        logps=found[0],
        total=next(rest) if request.objective is not None else None,
        entropy=next(rest) if request.entropy else None,
        top1=next(rest) if request.top1 else None,
        mean_logit=next(rest) if request.mean_logit else None,
        log_collision=next(rest) if request.log_collision else None,
    )
