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
        path = Path(chat_template_path).expanduser()
        if path.is_file():
            tokenizer.chat_template = path.read_text(encoding="utf-8")
        else:
            what = "which is neither a Jinja file nor a model with a tokenizer"
            take_template(tokenizer, "chat_template_path", chat_template_path, what, keep_eos=eos_token is not None)
    return tokenizer


def take_template(tokenizer: Any, field: str, source: str, unreadable: str, keep_eos: bool = False) -> None:
    """Give a tokenizer the chat template of the one at `source`, the tokens that one has added to its vocabulary and
    this one lacks, in their order, and its end of a turn.

    Raises `ConfigError` naming the field: the source is `unreadable`, or has no template.
    """
    from transformers import AutoTokenizer

    path = Path(source).expanduser()
    try:
        other = AutoTokenizer.from_pretrained(str(path) if path.is_dir() else source)
    except Exception as error:
        raise ConfigError(f"`{field}` is {source!r}, {unreadable}: {(str(error).splitlines() or [''])[0]}") from error
    if not other.chat_template:
        raise ConfigError(f"`{field}` is {source!r}, whose tokenizer has no chat template.")
    known = tokenizer.get_vocab()
    for _, token in sorted(other.added_tokens_decoder.items()):
        if str(token) not in known:
            tokenizer.add_tokens([token], special_tokens=token.special)
    tokenizer.chat_template = other.chat_template
    if other.eos_token is not None and not keep_eos:
        tokenizer.eos_token = other.eos_token


def new_tokens(before: Any, after: Any) -> list[int]:
    """Ids that a tokenizer has and the one it was made from had not."""
    return sorted(set(after.get_vocab().values()) - set(before.get_vocab().values()))
