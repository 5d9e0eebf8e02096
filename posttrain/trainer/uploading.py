"""What of `output_dir` never goes to the hub: rows of the data set, the machine, and what only this run needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import transformers.trainer as upstream

PRIVATE = (
    ".lock*",
    ".incomplete/*",
    "failed-step-*",
    "environment.json",
    "resolved_config*.yaml",
    "log.jsonl",
    "completions.jsonl",
    "report.html",
)
"""Patterns as `huggingface_hub` matches them: * passes over folders too."""


class _Discreet:
    """The hub's API, whose uploads of a folder leave the private files out."""

    def __init__(self, api: Any) -> None:
        self._api = api

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def upload_folder(self, *args: Any, ignore_patterns: Any = None, **kwargs: Any) -> Any:
        given = [ignore_patterns] if isinstance(ignore_patterns, str) else list(ignore_patterns or ())
        return self._api.upload_folder(*args, ignore_patterns=[*given, *PRIVATE], **kwargs)


@contextlib.contextmanager
def private_files_kept() -> Iterator[None]:
    """Inside, the base class uploads nothing private: it takes the whole `output_dir`, and has no seam for patterns."""
    own = upstream.hf_api
    upstream.hf_api = lambda *args, **kwargs: _Discreet(own(*args, **kwargs))
    try:
        yield
    finally:
        upstream.hf_api = own
