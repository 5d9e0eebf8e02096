"""New tokens: rows for them, trained under an adapter too, and configs that name the tokenizer's ends."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

TOKEN_MULTIPLE = 64
"""Rows of a resized embedding: tensor cores work on such sizes."""


def make_room(model: Any, ids: Iterable[int], multiple: int | None = None) -> None:
    """Resize a model's embeddings, and its head, so that every id has a row. New rows start at the mean of the old
    ones, with their spread. Models that have rows to spare stay as they are."""
    highest = max(ids, default=-1)
    if highest >= rows_of(model.get_input_embeddings()):
        model.resize_token_embeddings(highest + 1, pad_to_multiple_of=multiple)


def rows_of(embedding: Any) -> int:
    """Rows of an embedding's weight, which ZeRO-3 may have cut up."""
    weight = embedding.weight
    return int(getattr(weight, "ds_shape", weight.shape)[0])


def with_trained_tokens(model: Any, peft_config: Any, ids: list[int]) -> Any:
    """A LoRA configuration that trains the rows of some tokens too, at both ends of the model; one that says itself
    what it trains of them stays as it is."""
    unset = getattr(peft_config, "trainable_token_indices", ()) is None
    ends = {"embedding": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    names = {end: name for end, module in ends.items() for name, found in model.named_modules() if found is module}
    saved = {str(name).rpartition(".")[2] for name in getattr(peft_config, "modules_to_save", None) or ()}
    if not unset or saved & {name.rpartition(".")[2] for name in names.values()}:
        return peft_config
    if ends["head"] is not None and ends["head"].weight is ends["embedding"].weight:
        del names["head"]  # tied: peft trains the same rows there
    config = copy.copy(peft_config)
    config.trainable_token_indices = {name.rpartition(".")[2]: list(ids) for name in names.values()}
    return config


def end_with(model: Any, tokenizer: Any) -> None:
    """End turns, and generation, with the tokenizer's end token, and pad with its padding token. Other tokens at which
    generation stops stay."""
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    generation = getattr(model, "generation_config", None)
    for config in {id(c): c for c in (model.config, model.config.get_text_config(), generation) if c}.values():
        if eos is not None:
            stops = config.eos_token_id
            config.eos_token_id = eos if not isinstance(stops, list) else [eos, *(i for i in stops if i != eos)]
        if pad is not None:
            config.pad_token_id = pad
