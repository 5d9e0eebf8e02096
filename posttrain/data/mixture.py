"""Several sources as one data set: columns chosen and renamed, shares taken, laid one after another or interleaved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from posttrain.data.config import DatasetConfig, DatasetMixtureConfig
from posttrain.data.formats import format_of, without_label
from posttrain.data.joining import STOPPING_RULES, concatenate, drawn, interleave, is_stream, pack, unpack
from posttrain.data.origin import remember
from posttrain.data.sources import as_dict, load_part, local_files
from posttrain.errors import ConfigError, DataError, EmptyDataError, suggest
from posttrain.parallel.ranks import say

if TYPE_CHECKING:
    from datasets import DatasetDict, IterableDatasetDict

MIXING = ("concatenate", "interleave")
# Columns that a source may lack where another has them.
OPTIONAL = frozenset({"tools", "chat_template_kwargs"})


def get_dataset(mixture_config: DatasetMixtureConfig) -> DatasetDict | IterableDatasetDict:
    """Load every source of a mixture, and lay them one after another or interleave them.

    Where several sources all have a `fraction`, it is their share of the mixture; else the share of a source's own
    rows. The result has the split `train`, and `test` when `test_split_size` holds rows out (a fixed choice of rows).
    The order follows from the fields alone: the same fields and files give the same rows.
    e.g. get_dataset(DatasetMixtureConfig([DatasetConfig("a.jsonl"), DatasetConfig("b.jsonl", fraction=0.5)]))
    Raises `ConfigError` for a field out of range and `DataError` for a source that cannot be read or does not fit.
    """
    sources = mixture_config.datasets
    # Before anything is read: a fraction of 30 (for 30 %) should not cost a download.
    _check(mixture_config)
    shared = len(sources) > 1 and all(source.fraction is not None for source in sources)
    own = [replace(source, fraction=None) for source in sources] if shared else sources
    taken = [_take(source, mixture_config, counted=shared) for source in own]
    parts, counts = [part for part, _ in taken], [count for _, count in taken]
    if shared:
        parts, counts = _share_out(parts, counts, [source.fraction or 0.0 for source in sources])
    _check_fit(sources, parts)
    rows = _mix(mixture_config, parts)
    if mixture_config.streaming:
        remember(rows, mixture_config, [local_files(source) for source in sources])
    if mixture_config.test_split_size is None:
        return as_dict({"train": rows})
    if len(rows) < 2:
        raise DataError(f"`test_split_size` cannot split {len(rows)} row(s); give more rows or remove it.")
    return rows.train_test_split(test_size=mixture_config.test_split_size, seed=mixture_config.mixing_seed)


def _check(mixture: DatasetMixtureConfig) -> None:
    if not mixture.datasets:
        raise ConfigError("`datasets` is empty; list at least one source with a `path`.")
    _check_share("test_split_size", mixture.test_split_size, whole=False)
    for field, value, known in (
        ("mixing", mixture.mixing, MIXING),
        ("stopping_strategy", mixture.stopping_strategy, STOPPING_RULES),
    ):
        if value not in known:
            raise ConfigError(f"`{field}` is {value!r}; expected {', '.join(known)}.{suggest(str(value), known)}")
    for source in mixture.datasets:
        _check_share("fraction", source.fraction, whole=True)
        if source.weight is not None and not 0 < source.weight < float("inf"):
            raise ConfigError(f"`weight` of {source.path!r} is {source.weight}; set a number above 0, or leave it out.")
        if source.weight is not None and mixture.mixing != "interleave":
            raise ConfigError(
                f"`weight` of {source.path!r} is {source.weight} and `mixing` is concatenate, which takes every row "
                "once; set `mixing: interleave`, or `fraction` for a part of the rows."
            )
    given = [source.weight is not None for source in mixture.datasets]
    if any(given) and not all(given):
        lacking = mixture.datasets[given.index(False)].path
        raise ConfigError(f"`weight` is set on some sources and not on {lacking!r}; set it on all, or on none.")
    if mixture.test_split_size is not None and mixture.streaming:
        raise ConfigError(
            "`test_split_size` needs the number of rows and `streaming` is on; name a test split instead."
        )
    if mixture.test_split_size is not None and mixture.stopping_strategy == "all_exhausted" and _interleaves(mixture):
        raise ConfigError(
            "`test_split_size` is set and `stopping_strategy` all_exhausted repeats rows: some would be in both "
            "splits; take first_exhausted or all_exhausted_without_replacement, or name a test split."
        )


def _interleaves(mixture: DatasetMixtureConfig) -> bool:
    return mixture.mixing == "interleave" and len(mixture.datasets) > 1


def _check_share(field: str, value: float | None, whole: bool) -> None:
    if value is not None and not (0 < value < 1 or (whole and value == 1)):
        interval = "(0, 1]" if whole else "(0, 1)"
        raise ConfigError(f"`{field}` is {value}; it is a share, so set it in {interval}.")


# One source


def _take(source: DatasetConfig, mixture: DatasetMixtureConfig, counted: bool) -> tuple[Any, int]:
    """The rows of a source, and how many they are where that was asked (else 0)."""
    rows, count = load_part(
        source.path,
        source.name,
        source.split,
        mixture.streaming,
        source.data_files,
        source.data_dir,
        mixture.check_formats,
    )
    rows = _choose_columns(rows, source)
    share = source.fraction if source.fraction is not None and source.fraction < 1 else None
    if share is None and not counted:
        return rows, 0
    found = len(rows) if not is_stream(rows) else count()
    if found is None:
        raise ConfigError(
            f"`fraction` needs the number of rows, which the stream {source.path!r} does not tell; name rows instead "
            "(`split: train[:1000]`), or turn streaming off."
        )
    # At least one row: a small source should not vanish by rounding.
    return (rows, found) if share is None else (_first(rows, max(1, round(found * share))), found)


def _first(rows: Any, count: int) -> Any:
    return rows.take(count) if is_stream(rows) else rows.select(range(count))


def _choose_columns(rows: Any, source: DatasetConfig) -> Any:
    if source.columns is None and not source.rename_columns:
        return rows
    names = list(rows.column_names or _first_row(rows, source.path))
    rename = source.rename_columns or {}
    for field, asked in (("columns", source.columns or ()), ("rename_columns", rename)):
        missing = next((name for name in asked if name not in names), None)
        if missing is not None:
            raise DataError(
                f"{source.path!r} has no column {missing!r}, which `{field}` names; it has {names}."
                f"{suggest(missing, names)}"
            )
    kept = [*dict.fromkeys([*(source.columns if source.columns is not None else names), *rename])]
    new = {name: rename.get(name, name) for name in kept}
    twice = next((name for name in new.values() if list(new.values()).count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"`rename_columns` of {source.path!r} makes two columns {twice!r}; leave one out with `columns`."
        )
    if is_stream(rows):
        # Without `columns`, what a later row brings is kept too.
        return unpack(pack(rows, new, others=source.columns is None))
    return rows.select_columns(kept).rename_columns({old: to for old, to in new.items() if old != to})


def _first_row(rows: Any, path: str) -> dict[str, Any]:
    first = next(iter(rows), None)
    if first is None:
        raise EmptyDataError(f"{path!r} holds no row; check the file and the split.")
    return first


# All of them


def _share_out(parts: list[Any], counts: list[int], fractions: list[float]) -> tuple[list[Any], list[int]]:
    """The first rows of each part, so that they stand in these proportions and none is repeated.

    e.g. 100 and 100 rows, fractions 0.8 and 0.2 -> 100 and 25 rows
    """
    total = min(count / fraction for count, fraction in zip(counts, fractions, strict=True))
    shares = [min(count, max(1, round(total * fraction))) for count, fraction in zip(counts, fractions, strict=True)]
    return [_first(rows, share) for rows, share in zip(parts, shares, strict=True)], shares


def _mix(mixture: DatasetMixtureConfig, parts: Sequence[Any]) -> Any:
    names = [source.path for source in mixture.datasets]
    if not _interleaves(mixture):
        return concatenate(parts, names)
    weights = [source.weight if source.weight is not None else 1.0 for source in mixture.datasets]
    rows = interleave(parts, names, weights, mixture.mixing_seed, mixture.stopping_strategy)
    if is_stream(rows):
        say(f"interleaving {len(parts)} streams by weight, {mixture.stopping_strategy}")
        return rows
    lengths = [len(part) for part in parts]
    taken = drawn(lengths, weights, mixture.mixing_seed, mixture.stopping_strategy)
    say(f"interleaved, {mixture.stopping_strategy}: {mixing_summary(names, lengths, taken)}")
    return rows


def mixing_summary(names: Sequence[str], lengths: Sequence[int], taken: Sequence[int]) -> str:
    """How many rows of each source were taken, left out and repeated. e.g. "a.jsonl 10 of 100 rows" """
    parts = []
    for name, length, count in zip(names, lengths, taken, strict=True):
        repeated = f", {count - length} of them again" if count > length else ""
        parts.append(f"{name} {count} of {length} rows{repeated}")
    return "; ".join(parts)


def _check_fit(sources: Sequence[DatasetConfig], parts: Sequence[Any]) -> None:
    """Raise `DataError` for sources of different columns or types."""
    if len(parts) < 2:
        return
    rows = [_first_row(part, source.path) for source, part in zip(sources, parts, strict=True)]
    names = [set(part.column_names or ()) for part in parts]
    for source, own, row in zip(sources, names, rows, strict=True):
        odd = (own ^ names[0]) - OPTIONAL
        if own and names[0] and odd:
            raise DataError(
                f"{source.path!r} has the columns {sorted(own)} and {sources[0].path!r} has {sorted(names[0])}; "
                f"{sorted(odd)} are not in both. Name those to keep with `columns`, and others with `rename_columns`."
            )
        found, first = (format_of(without_label(each)) for each in (row, rows[0]))
        if found != first:
            raise DataError(
                f"{source.path!r} is {_say(found, row)} and {sources[0].path!r} is {_say(first, rows[0])}; a mixture "
                "is of one type: rename columns (`rename_columns`), or convert one (`posttrain convert`)."
            )


def _say(found: Any, row: Mapping[str, Any]) -> str:
    return str(found) if found else f"of no known type (columns {sorted(row)})"
