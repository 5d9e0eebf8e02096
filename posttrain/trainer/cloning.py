"""A chat template taken from another tokenizer, with the tokens it needs and rows for them in the model."""

from __future__ import annotations

from typing import Any

from posttrain.data.tokenizer import take_template
from posttrain.model.tokens import TOKEN_MULTIPLE, end_with, make_room


def clone_chat_template(
    model: Any, tokenizer: Any, source_tokenizer_path: str, resize_to_multiple_of: int | None = TOKEN_MULTIPLE
) -> tuple[Any, Any, list[int]]:
    """Give a model and its tokenizer the chat template of another tokenizer, its added tokens and its end of a turn.

    The embeddings are resized to hold every token, to a multiple of `resize_to_multiple_of`; they never shrink. Returns
    the model, the tokenizer and the ids of the tokens that are new, which `trainable_token_indices` of a LoRA
    configuration takes. Raises `ConfigError` for a source without a template.

    e.g. model, tokenizer, added = clone_chat_template(model, tokenizer, "Qwen/Qwen3-0.6B")
    """
    before = set(tokenizer.get_vocab().values())
    take_template(tokenizer, "source_tokenizer_path", source_tokenizer_path, "which has no tokenizer that loads")
    ids = tokenizer.get_vocab().values()
    make_room(model, ids, resize_to_multiple_of)
    end_with(model, tokenizer)
    return model, tokenizer, sorted(set(ids) - before)
