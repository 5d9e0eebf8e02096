"""Which values are secrets, and text without them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"
# A name of one of these, or that ends in one: access_token, WANDB_API_KEY, X-Api-Key.
_NAMES = re.compile(
    r"(^|.*_)(api_?key|access_?key|private_?key|secret(_key)?|password|passwd|passphrase|credentials?|authorization"
    r"|(auth)?token)$"
)
_VARIABLES = re.compile(r".*_(TOKEN|KEY|PAT)$")
# Tokens of text, which tokenizers and their kin name: eos_token, image_token, end_of_turn_token.
_OF_TEXT = re.compile(
    r"(^|.*_)(pad|padding|eos|bos|unk|sep|cls|mask|start|end|stop|turn|image|audio|video|vision|boi|eoi|boa|eoa|sot|eot"
    r"|eom|prefix|suffix|middle|think|special|first|last|per|new|text)_token$"
)
# What secrets look like wherever they stand: Hugging Face, OpenAI, GitHub and AWS keys, and those in an address.
_VALUES = re.compile(r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|AKIA[A-Z0-9]{12,})")
_ADDRESS = re.compile(r"(\w+://[^\s/:@]*:)[^\s/@]+@")


def is_secret(name: str) -> bool:
    """e.g. hub_token, HF_TOKEN, WANDB_API_KEY, token -> True; pad_token, max_tokens -> False"""
    plain = name.lower().replace("-", "_")
    return bool(_VARIABLES.match(name) or (_NAMES.match(plain) and not _OF_TEXT.match(plain)))


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
