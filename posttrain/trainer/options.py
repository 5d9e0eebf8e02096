"""The fields of a config → the small values that the data room takes. `posttrain inspect` reads them here too, so that
it sees the rows that training sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from posttrain.data.rows import SFTRowOptions
from posttrain.errors import ConfigError


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
