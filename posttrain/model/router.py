"""The balance loss of a mixture of experts, one sequence at a time.

Letters: T tokens, E experts, K segments, S sequences.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import ModelError
from posttrain.parallel.ranks import say

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""How configs name the number of experts."""

_FORMULA = ("gate_logits", "num_experts", "top_k", "attention_mask")


def experts_per_token(model: Any) -> int | None:
    """How many experts a token goes to, for a family whose own training has a balance loss; else None.

    Dense models have none, and neither have families balanced by a bias on the router (DeepSeek-V3, GLM-4-MoE).
    """
    # A sharded model has a class of FSDP2's making before its own.
    homes = (vars(sys.modules[cls.__module__]) for cls in type(model).__mro__)
    own = next((found for home in homes if (found := home.get("load_balancing_loss_func"))), None)
    if own is None or tuple(inspect.signature(own).parameters) != _FORMULA:  # Doge has another formula
        return None
    named = (model, model.config.get_text_config())  # a multimodal model names it in its text's config alone
    return next((found for each in named if (found := getattr(each, "num_experts_per_tok", None))), None)


def balance_coefficient(model: Any, wanted: float) -> float:
    """`router_aux_loss_coef` as it is applied to the model: 0 where there is no such loss; says so for experts."""
    if wanted and experts_per_token(model) is not None:
        return wanted
    text = model.config.get_text_config()
    if wanted and any((getattr(text, name, None) or 0) for name in EXPERT_COUNTS):
        say(f"router_aux_loss_coef: not applied, {type(model).__name__} has no balance loss")
    return 0.0


def balance_losses(logits: Sequence[Tensor], owner: Tensor, paths: Tensor, top_k: int) -> Tensor:
    """Switch Transformer's balance loss (arXiv 2101.03961, eq. 4-6) of each sequence → [S], fp32.

    L = E Σ_e f_e P_e, over the tokens of one sequence in all layers: f_e the choices of expert e a token (their sum is
    `top_k`), P_e its mean probability. This is what transformers computes for a batch of that one sequence.

    `logits` [T, E] of each layer; `owner` [T] the segment of each token, K for padding; `paths` [S, K] 1 where a
    segment is part of a sequence.
    """
    K = paths.shape[1]
    if not len(logits):
        raise ModelError(
            "`router_aux_loss_coef` is set, and no router of this model let its logits be read: set it to 0, and "
            "leave out `torch_compile` and the model's own kernels to have the balance loss."
        )
    E = logits[0].shape[-1]
    chosen, mass = (torch.zeros(K + 1, E, device=owner.device) for _ in range(2))
    for layer in logits:
        p = torch.softmax(layer.reshape(-1, E).float(), -1)
        picks = torch.zeros_like(p).scatter_(1, p.detach().topk(top_k, -1).indices, 1.0)
        chosen.index_add_(0, owner, picks)
        mass = mass.index_add(0, owner, p)
    tokens = torch.zeros(K + 1, device=owner.device).index_add_(0, owner, torch.ones_like(owner, dtype=torch.float))
    count = len(logits) * (paths @ tokens[:K])[:, None].clamp(min=1)
    return E * (((paths @ chosen[:K]) / count) * ((paths @ mass[:K]) / count)).sum(-1)
