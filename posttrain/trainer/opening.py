"""What every leaf does before its engine is made: tokenizer, rows, model, and that they fit each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from posttrain.data.stream import StreamItems
from posttrain.data.tokenizer import new_tokens, set_up_tokenizer
from posttrain.errors import ConfigError
from posttrain.model.load import check_model_source, embedding_rows, learned_positions, load_tokenizer, prepare_model
from posttrain.trainer.auditing import audit_at_start
from posttrain.trainer.callbacks import StreamCount
from posttrain.trainer.config import BaseConfig, load_options, share_prefixes
from posttrain.trainer.loading import check_ids
from posttrain.trainer.randomness import seeded

Config = TypeVar("Config", bound=BaseConfig)


@dataclass(frozen=True)
class Opened:
    """A model and its data, ready for the engine."""

    model: Any
    tokenizer: Any
    layout: Any
    share: bool  # whether common prefixes are computed once
    train_items: Any
    eval_items: Any
    audits: list[Any]  # callbacks: what keeps the audit of the chat template, and says what a stream held


def open_run(
    args: BaseConfig,
    model: Any,
    processing_class: Any,
    train_dataset: Any,
    eval_dataset: Any,
    items: Callable[[Any, Any, str], Any],
    peft_config: Any = None,
    quantization_config: Any = None,
    formatting_func: Callable[[dict[str, Any]], Any] | None = None,
) -> Opened:
    """Check, read and load, the cheap things first. `items(tokenizer, rows, name)` prepares a set.

    Raises `ConfigError`, `DataError` and `ModelError`, each naming the field.
    """
    check_model_source(model, load_options(args), peft_config, quantization_config)
    tokenizer = processing_class or load_tokenizer(model, load_options(args))
    fields = (getattr(args, name, None) for name in ("eos_token", "pad_token", "chat_template_path"))
    ours = set_up_tokenizer(tokenizer, *fields)
    audits = audit_at_start(ours, args, model, formatting_func, train_dataset, eval_dataset)
    train_items = None if train_dataset is None else items(ours, train_dataset, "train")
    if isinstance(train_items, StreamItems):
        audits = [*audits, StreamCount(train_items.report)]
    eval_items = None
    if isinstance(eval_dataset, dict):
        eval_items = {name: items(ours, rows, name) for name, rows in eval_dataset.items()}
    elif eval_dataset is not None:
        eval_items = items(ours, eval_dataset, "eval")
    with seeded(args.seed):
        prepared = prepare_model(
            model, load_options(args), peft_config, quantization_config, new_tokens(tokenizer, ours)
        )
    limits = embedding_rows(prepared), learned_positions(prepared)
    for each in (train_items, *(eval_items.values() if isinstance(eval_items, dict) else [eval_items])):
        check_ids(each, *limits)
    share = share_prefixes(args, prepared)
    return Opened(prepared.model, ours, prepared.layout, share, train_items, eval_items, audits)


def config_of(args: Any, kind: type[Config]) -> Config:
    """The arguments, or the default ones. Raises `ConfigError` for those of another class."""
    if args is None:
        return kind(output_dir="trainer_output")
    if not isinstance(args, kind):
        raise ConfigError(f"`args` is a {type(args).__name__}; give a {kind.__name__}, which has all of its fields.")
    return args


def refuse_given(**values: Any) -> None:
    """Raise `ConfigError` for arguments of other libraries' trainers that have no meaning here."""
    for field, value in values.items():
        if value is not None:
            raise ConfigError(
                f"`{field}` is given; batches here are packed forests: leave it out, see docs/extending.md."
            )
