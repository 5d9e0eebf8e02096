"""Rows of a data set → token ids and the weight of each token as a target."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Any

@dataclass(frozen=True)
class SFTRowOptions:
    """What `prepare_sft` needs of the config."""
    text_field: str = "text"
    max_length: int | None = 1024
    truncation_mode: str = "keep_start"
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    keep_long: bool = False  # leave rows longer than max_length to packing (bfd_split, wrapped)

@dataclass
class PreparationReport:
    """What happened to the rows. Nothing is dropped or cut that is not counted here."""
    rows_in: int = 0
    rows_kept: int = 0
    rows_without_targets: int = 0
    rows_cut: int = 0
    tokens_cut: int = 0
    tokens: int = 0
    targets: int = 0

def prepare_sft(dataset: Any, tokenizer: Any, options: SFTRowOptions, num_proc: int | None = None, name: str = "train") -> tuple[Any, PreparationReport]:
    """Return a data set with the columns `input_ids` (list[int]) and `weights` (list[float]), and the report."""
    ...
