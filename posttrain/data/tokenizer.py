"""The tokenizer, set up once: end and padding tokens, chat template."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError, suggest


def set_up_tokenizer(
    tokenizer: Any, eos_token: str | None = None, pad_token: str | None = None, chat_template_path: str | None = None
) -> Any:
    """Apply the fields of a config to a tokenizer and return it. Padding falls back to the end token: padding is never
    a target here, so an end token that pads is still trained where it ends a row.

    Raises `ConfigError` for a token that is not in the vocabulary, or a template that is not there.
    """
    tokenizer = copy.deepcopy(tokenizer)  # the caller's stays as it is
    for field, token in (("eos_token", eos_token), ("pad_token", pad_token)):
        if token is None:
            continue
        if token not in tokenizer.get_vocab():
            near = suggest(token, tokenizer.all_special_tokens)
            raise ConfigError(f"`{field}` is {token!r}, which is not in the tokenizer's vocabulary.{near}")
        setattr(tokenizer, field, token)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template_path is not None:
        tokenizer.chat_template = _read_template(chat_template_path)
    return tokenizer


def _read_template(source: str) -> str:
    path = Path(source).expanduser()
    if path.is_file():
        return path.read_text(encoding="utf-8")
    from transformers import AutoTokenizer

    try:
        template = AutoTokenizer.from_pretrained(source).chat_template
    except Exception as error:
        raise ConfigError(
            f"`chat_template_path` is {source!r}: neither a Jinja file nor a model with a tokenizer."
        ) from error
    if not template:
        raise ConfigError(f"`chat_template_path` is {source!r}, whose tokenizer has no chat template.")
    return template
