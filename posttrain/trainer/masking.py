"""Which values are secrets, and text without them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"
# A name of one of these, or that ends in one: hub_token, HF_TOKEN, WANDB_API_KEY. Not `pad_token` or `eos_token`.
_NAMES = re.compile(
    r"(^|.*_)(api_?key|access_?key|secret(_key)?|password|passwd|credentials?|auth_?token|hub_token|private_key)$"
    r"|^(token|.*_TOKEN|.*_KEY|.*_PAT)$"
)
_LOWER = re.compile(r"(^|.*_)(api_?key|access_?key|secret(_key)?|password|passwd|credentials?|auth_?token|hub_token)$")
# What secrets look like wherever they stand: Hugging Face, OpenAI, GitHub and AWS keys, and those in an address.
_VALUES = re.compile(r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|AKIA[A-Z0-9]{12,})")
_ADDRESS = re.compile(r"(\w+://[^\s/:@]*:)[^\s/@]+@")


def is_secret(name: str) -> bool:
    """e.g. hub_token, HF_TOKEN, WANDB_API_KEY, token -> True; pad_token, max_tokens -> False"""
    return bool(_NAMES.match(name) or _LOWER.match(name.lower()))


def masked(value: Any) -> Any:
    """The value with what looks like a secret, or has the name of one in a mapping, replaced by ***."""
    if isinstance(value, str):
        return _ADDRESS.sub(rf"\g<1>{MASK}@", _VALUES.sub(MASK, value))
    if isinstance(value, Mapping):
        return {key: MASK if item and is_secret(str(key)) else masked(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [masked(item) for item in value]
    return value


def masked_command(tokens: Sequence[str]) -> list[str]:
    """A command line without its secrets. e.g. ["--hub_token", "x", "--a=1"] -> ["--hub_token", "***", "--a=1"]"""
    out: list[str] = []
    hide = False
    for token in tokens:
        flag, equals, _ = token.partition("=")
        name = flag.removeprefix("--").replace("-", "_").rpartition(".")[2]
        named = token.startswith("--") and is_secret(name)
        if named and equals:
            out.append(f"{flag}={MASK}")
        else:
            out.append(MASK if hide and not token.startswith("--") else masked(token))
        hide = named and not equals
    return out
