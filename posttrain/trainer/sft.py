"""Supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from posttrain.errors import ConfigError
from posttrain.trainer.config import BaseConfig


@dataclass
class SFTConfig(BaseConfig):
    """Arguments of `SFTTrainer`."""

    learning_rate: float = 2e-5
    """Peak learning rate of AdamW."""
    chat_template_path: str | None = None
    """A Jinja file, or a model or folder, whose chat template is used instead of the tokenizer's own."""
    dataset_text_field: str = "text"
    """Column that holds plain text."""
    dataset_kwargs: dict[str, Any] | str | None = None
    """`skip_prepare_dataset: true` takes rows as they are; nothing else is accepted."""
    eos_token: str | None = None
    """Token that ends a text or a completion. Unset: the tokenizer's."""
    max_length: int | None = 1024
    """Longest sequence, in tokens; longer rows are cut. With packing, also the capacity of a bin. `None`: no limit."""
    truncation_mode: Literal["keep_start", "keep_end"] = "keep_start"
    """Which end of a long row is kept."""
    shuffle_dataset: bool = False
    """Shuffle the rows once, with `data_seed`, before packing."""
    packing: bool = False
    """Fill bins of `max_length` tokens with whole rows; a micro-batch is then that many bins. Rows never see each other."""
    packing_strategy: Literal["bfd", "bfd_split", "wrapped"] = "bfd"
    """bfd: best fit decreasing, long rows cut. bfd_split: long rows continue in another bin. wrapped: rows cut at bin
    borders, so that every bin is full."""
    padding_free: bool = False
    """Accepted for compatibility: the packed layout never pads."""
    eval_packing: bool | None = None
    """Pack the evaluation set. Unset: as `packing`."""
    completion_only_loss: bool | None = None
    """Train only on completions. Unset: on for prompt-completion rows."""
    assistant_only_loss: bool = False
    """Train only on what the assistant says in a chat, its stop token included."""
    loss_type: Literal["nll", "chunked_nll", "dft"] | None = None
    """nll (also named chunked_nll; the default) or dft."""
    pad_token: str | None = None
    """Token used for padding. Unset: the tokenizer's, else its end token."""

    _VALID_DICT_FIELDS = [*BaseConfig._VALID_DICT_FIELDS, "dataset_kwargs"]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(f"`max_length` is {self.max_length}; a target needs one token before it: set at least 2.")
        if self.packing and self.max_length is None:
            raise ConfigError("`packing` is on and `max_length` is None; set `max_length` to the capacity of a bin.")
