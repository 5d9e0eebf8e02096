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
        _take_template(tokenizer, chat_template_path, keep_eos=eos_token is not None)
    return tokenizer


def _take_template(tokenizer: Any, source: str, keep_eos: bool) -> None:
    """From a Jinja file, or from another tokenizer with the tokens it adds and its end of a turn."""
    path = Path(source).expanduser()
    if path.is_file():
        tokenizer.chat_template = path.read_text(encoding="utf-8")
        return
    from transformers import AutoTokenizer

    try:
        other = AutoTokenizer.from_pretrained(source)
    except Exception as error:
        raise ConfigError(
            f"`chat_template_path` is {source!r}: neither a Jinja file nor a model with a tokenizer."
        ) from error
    if not other.chat_template:
        raise ConfigError(f"`chat_template_path` is {source!r}, whose tokenizer has no chat template.")
    take_tokens(tokenizer, other)
    tokenizer.chat_template = other.chat_template
    if other.eos_token is not None and not keep_eos:
        tokenizer.eos_token = other.eos_token


def take_tokens(tokenizer: Any, other: Any) -> None:
    """Add the tokens that another tokenizer has added to its vocabulary and this one lacks, in their order."""
    known = tokenizer.get_vocab()
    for _, token in sorted(other.added_tokens_decoder.items()):
        if str(token) not in known:
            tokenizer.add_tokens([token], special_tokens=token.special)


def new_tokens(before: Any, after: Any) -> list[int]:
    """Ids that a tokenizer has and the one it was made from had not."""
    return sorted(set(after.get_vocab().values()) - set(before.get_vocab().values()))
