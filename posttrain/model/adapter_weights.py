"""The tensors a folder holds of a model, under the names they have there."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from posttrain.model.adapters import is_adapted


def saved_tensors(model: Any) -> dict[str, Tensor]:
    """Saved name → the model's own tensor: of the whole model, or under peft of its active adapter."""
    if not is_adapted(model):
        return model.state_dict()
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, adapter_name=model.active_adapters[0], save_embedding_layers=False)


def tied_names(model: Any) -> frozenset[str]:
    """Names that a folder leaves out, being second names of tensors it has."""
    return frozenset(getattr(model, "all_tied_weights_keys", None) or ())
