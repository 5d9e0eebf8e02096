"""The fields of a config → the small values that the data room takes. `posttrain inspect` reads them here too, so that
it sees the rows that training sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import xxhash

from posttrain.data.origin import origin
from posttrain.data.pairs import PairOptions
from posttrain.data.rows import SFTRowOptions
from posttrain.data.stream import StreamItems
from posttrain.errors import ConfigError
from posttrain.parallel.ranks import world_size


def check_sft(args: Any) -> None:
    """Raise `ConfigError` for fields of an `SFTConfig` about rows that do not go together."""
    if args.max_length is not None and args.max_length < 2:
        raise ConfigError(f"`max_length` is {args.max_length}; a target needs one token before it: set at least 2.")
    unknown = sorted(set(args.dataset_kwargs or {}) - {"skip_prepare_dataset"})
    if unknown:
        raise ConfigError(f"`dataset_kwargs` holds {unknown[0]!r}; only `skip_prepare_dataset` is accepted.")
    if args.packing and args.max_length is None:
        raise ConfigError("`packing` is on and `max_length` is None; set `max_length` to the capacity of a bin.")
    if args.packing and args.packing_strategy == "bfd_split" and args.overflow not in (None, "split"):
        raise ConfigError(
            f"`packing_strategy` 'bfd_split' splits long rows and `overflow` is {args.overflow!r}; use 'bfd' with it, "
            "or leave `overflow` out."
        )
    if args.overflow == "split" and args.truncation_mode == "keep_end":
        raise ConfigError("`overflow` 'split' cuts nothing away, and `truncation_mode` is 'keep_end'; set one of them.")


def overflow_of(args: Any) -> str:
    """What happens to rows longer than `max_length`; unset, what `packing_strategy` has always meant."""
    splits = args.packing and args.packing_strategy in ("bfd_split", "wrapped")
    return args.overflow or ("split" if splits else "truncate")


def sft_row_options(
    args: Any, packing: bool, name: str, formatting_func: Callable[[dict[str, Any]], Any] | None = None
) -> SFTRowOptions:
    """How rows of the `name` set are encoded and cut."""
    overflow: Any = overflow_of(args)
    return SFTRowOptions(
        text_field=args.dataset_text_field,
        max_length=args.max_length,
        truncation_mode=args.truncation_mode,
        overflow=overflow,
        completion_only_loss=args.completion_only_loss,
        assistant_only_loss=args.assistant_only_loss,
        # `wrapped` cuts at the borders of bins; evaluation never does: its loss would depend on the packing.
        keep_long=packing and name == "train" and args.packing_strategy == "wrapped" and overflow == "split",
        formatting_func=formatting_func,
    )


_ROWS = ("dataset_text_field", "max_length", "truncation_mode", "completion_only_loss", "assistant_only_loss")
_ROWS += ("max_completion_length", "step_separator", "train_on_last_step_only")


def made_of(dataset: Any, args: Any, tokenizer: Any) -> dict[str, Any]:
    """What a stream comes from and what its rows are made by, in plain values that a record holds."""
    template = str(tokenizer.chat_template or "").encode()
    fields = {field.name for field in dataclasses.fields(args)}
    return {
        **origin(dataset),
        **{name: getattr(args, name) for name in _ROWS if name in fields},
        **({"overflow": overflow_of(args)} if "overflow" in fields else {}),
        "eos_token": tokenizer.eos_token,
        "chat template": xxhash.xxh3_128(template).hexdigest(),
    }


def check_references(args: Any) -> None:
    """Raise `ConfigError` for fields of a `DPOConfig` or `KTOConfig` about rows and reference that do not fit."""
    if args.max_length is not None and args.max_length < 2:
        raise ConfigError(f"`max_length` is {args.max_length}; a response needs one token before it: set 2 or more.")
    if args.precompute_ref_log_probs and args.needs("kl"):
        raise ConfigError(
            f"`precompute_ref_log_probs` is on, and `loss_type` {args.loss_type!r} compares with mismatched rows that "
            "are made step by step; turn it off, or take apo_zero_unpaired or bco."
        )
    if args.sync_ref_model and args.precompute_ref_log_probs:
        raise ConfigError(
            "`sync_ref_model` and `precompute_ref_log_probs` are both on: a reference that moves is not found once."
        )
    for name in ("sync_ref_model", "precompute_ref_log_probs"):
        if getattr(args, name) and not args.compares:
            raise ConfigError(f"`{name}` is on, and {args.loss_type} compares with no reference; leave it out.")
    if args.precompute_ref_batch_size is not None and args.precompute_ref_batch_size < 1:
        raise ConfigError(f"`precompute_ref_batch_size` is {args.precompute_ref_batch_size}; set at least 1.")
    if not 0 < args.ref_model_mixup_alpha <= 1 or args.ref_model_sync_steps < 1:
        raise ConfigError(
            f"`ref_model_mixup_alpha` is {args.ref_model_mixup_alpha} and `ref_model_sync_steps` "
            f"{args.ref_model_sync_steps}; set above 0 and at most 1, and at least 1."
        )
    needs = {
        "precompute_ref_batch_size": "precompute_ref_log_probs",
        "ref_model_mixup_alpha": "sync_ref_model",
        "ref_model_sync_steps": "sync_ref_model",
    }
    defaults = {f.name: f.default for f in dataclasses.fields(args)}
    for name, switch in needs.items():
        if getattr(args, name) != defaults[name] and not getattr(args, switch):
            raise ConfigError(f"`{name}` is {getattr(args, name)!r}, and `{switch}` is off: it has no effect.")


def pair_options(args: Any) -> PairOptions:
    """How pairs are encoded and cut, and which of their columns would have no effect."""
    references = "" if args.compares else "the loss compares with no reference"
    references = "`sync_ref_model` moves the reference" if args.sync_ref_model else references
    return PairOptions(args.max_length, args.truncation_mode, args.margins_ignored, references, third=args.needs_third)


def unpaired_options(args: Any) -> PairOptions:
    """How labelled responses are encoded and cut, and which of their columns would have no effect."""
    references = "`sync_ref_model` moves the reference" if args.sync_ref_model else ""
    if args.needs("kl"):
        references = f"`loss_type` {args.loss_type!r} scores the reference on mismatched rows too"
    return PairOptions(args.max_length, references=references)


def check_unpaired_window(args: Any, items: Any) -> None:
    """Raise `ConfigError` where an optimizer step would hold one row: KTO's z comes from rows given each other's
    responses."""
    if items is None or not args.needs("kl"):
        return
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * world_size()
    if rows < 2 or (not isinstance(items, StreamItems) and len(items) < 2):
        what = "an optimizer step holds one; raise `per_device_train_batch_size` or `gradient_accumulation_steps`"
        what = what if rows < 2 else "the training set holds one; give more rows"
        raise ConfigError(
            f"`loss_type` {args.loss_type!r} gives rows each other's responses, and {what}, or take apo_zero_unpaired "
            "or bco."
        )
