"""Where rows come from: local files, folders, hub names, and several of them together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from posttrain.data.config import DatasetConfig, DatasetMixtureConfig
from posttrain.errors import ConfigError, DataError, EmptyDataError, suggest

if TYPE_CHECKING:
    from datasets import DatasetDict, IterableDatasetDict

# How a file is read, by its ending; a compressed file (.gz, .zst, .bz2, .xz) is read through.
READERS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
}
COMPRESSED = {".gz", ".zst", ".bz2", ".xz"}
# What a file's name says about the split it holds; a name that says nothing is train.
SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "eval": "test",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
}
FIX = "give a file (jsonl, json, csv, parquet, txt), a folder of such files, or a hub name"

DataFiles = Union[str, Sequence[str], Mapping[str, Union[str, Sequence[str]]]]  # noqa: UP007


def load_source(
    path: str,
    config: str | None = None,
    split: str | None = None,
    streaming: bool = False,
    data_files: DataFiles | None = None,
    data_dir: str | None = None,
) -> Any:
    """Load a local file, a folder of files, a folder written by `save_to_disk`, or a hub data set.

    With `split`, that split; without, all of them by name. A single file is the split `train`. `data_files` and
    `data_dir` are relative to `path` when it is a local folder.

    e.g. load_source("data.jsonl", split="train") -> Dataset
    Raises `DataError` naming the path that is missing, the ending that is not known, the splits there are, or the line
    that is broken.
    """
    where = Path(path).expanduser()
    if data_dir is not None and where.is_dir():
        where = where / data_dir
    if where.is_dir() and _is_saved(where):
        loaded = _load_saved(where, streaming)
    elif where.is_file() or where.is_dir():
        loaded = _load_files(_files_by_split(where, data_files), streaming, str(where))
    else:
        loaded = _load_hub(path, config, streaming, data_files, data_dir)
    if not isinstance(loaded, Mapping):
        loaded = {"train": loaded}
    return pick_split(loaded, split, path) if split is not None else _as_dict(loaded)


def pick_split(splits: Mapping[str, Any], split: str, path: str) -> Any:
    """One split, or part of one (`train[:100]`, `train[:10%]`). Raises `DataError` naming the splits there are."""
    name, bracket, part = split.partition("[")
    if name not in splits:
        raise DataError(f"{path!r} has no split {name!r}; it has {sorted(splits)}.{suggest(name, splits)}")
    return _slice(splits[name], part.rstrip("]"), split) if bracket else splits[name]


def _slice(dataset: Any, part: str, split: str) -> Any:
    from datasets import Dataset

    if not isinstance(dataset, Dataset):
        raise DataError(f"Split {split!r}: a stream cannot be sliced; name the whole split, or turn streaming off.")
    low, colon, high = part.partition(":")
    try:
        if not colon:
            raise ValueError(part)
        start, end = (_place(text, default, len(dataset)) for text, default in ((low, 0), (high, len(dataset))))
    except ValueError as error:
        raise DataError(f"Split {split!r} cannot be read; write it as 'train[10:20]' or 'train[:10%]'.") from error
    return dataset.select(range(start, max(start, end)))


def _place(text: str, default: int, rows: int) -> int:
    if not text:
        return default
    place = round(float(text[:-1]) * rows / 100) if text.endswith("%") else int(text)
    return min(rows, max(0, place + rows if place < 0 else place))


def _is_saved(folder: Path) -> bool:
    return (folder / "dataset_dict.json").exists() or (folder / "state.json").exists()


def _load_saved(folder: Path, streaming: bool) -> Any:
    from datasets import Dataset, load_from_disk

    loaded = load_from_disk(str(folder))
    if not streaming:
        return loaded
    parts = {"train": loaded} if isinstance(loaded, Dataset) else loaded
    return {str(name): part.to_iterable_dataset() for name, part in parts.items()}


def _files_by_split(where: Path, data_files: DataFiles | None) -> dict[str, list[Path]]:
    if where.is_file():
        return {"train": [where]}
    if data_files is None:
        found = sorted(file for file in where.rglob("*") if file.is_file() and reader_of(file) is not None)
        splits: dict[str, list[Path]] = {}
        for file in found:
            splits.setdefault(_split_of(file, where), []).append(file)
        if not splits:
            raise DataError(f"Folder {str(where)!r} holds no file that can be read; supported are {_endings()}.")
        return splits
    named = data_files if isinstance(data_files, Mapping) else {"train": data_files}
    return {split: _match(where, [value] if isinstance(value, str) else value) for split, value in named.items()}


def _match(where: Path, patterns: Sequence[str]) -> list[Path]:
    files: list[Path] = []
    for pattern in patterns:
        found = sorted(where.glob(pattern))
        if not found:
            raise DataError(f"`data_files` names {pattern!r} and {str(where)!r} holds no such file.")
        files += found
    return files


def _split_of(file: Path, root: Path) -> str:
    """The split a file belongs to: the first word of its name, or of a folder on the way to it, that names one."""
    relative = file.relative_to(root)
    for part in (relative.name.split(".")[0], *reversed(relative.parts[:-1])):
        for word in part.replace("_", "-").lower().split("-"):
            if word in SPLIT_WORDS:
                return SPLIT_WORDS[word]
    return "train"


def reader_of(file: Path) -> str | None:
    """The reader of a file, by its ending. e.g. rows.jsonl.gz -> "json", notes.pdf -> None"""
    suffixes = [s.lower() for s in file.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return READERS.get(suffixes[-1]) if suffixes else None


def _endings() -> str:
    return ", ".join(READERS)


def _load_files(splits: Mapping[str, Sequence[Path]], streaming: bool, path: str) -> Any:
    from datasets import load_dataset

    files = [file for group in splits.values() for file in group]
    readers = {reader_of(file) for file in files}
    unknown = next((file for file in files if reader_of(file) is None), None)
    if unknown is not None:
        raise DataError(f"File {str(unknown)!r} has an ending that cannot be read; supported are {_endings()}.")
    if len(readers) > 1:
        kinds = sorted({file.suffix for file in files})
        raise DataError(f"{path!r} mixes files of different kinds ({', '.join(kinds)}); keep one kind in a folder.")
    empty = next((file for file in files if file.stat().st_size == 0), None)
    if empty is not None:
        raise EmptyDataError(f"File {str(empty)!r} is empty; write rows to it or remove it.")
    options: dict[str, Any] = {"sep": "\t"} if any(".tsv" in file.suffixes for file in files) else {}
    named = {split: [str(file) for file in group] for split, group in splits.items()}
    try:
        return load_dataset(str(readers.pop()), data_files=named, streaming=streaming, **options)
    except Exception as error:  # the readers raise a dozen kinds, some of them private
        cause = next((found for file in files if (found := find_broken_line(file)) is not None), None)
        if cause is None:
            cause = (
                f"{path!r} cannot be read: {error.__cause__ or error}. Rows of one set need the same columns and types."
            )
        raise DataError(cause) from error


def find_broken_line(file: Path) -> str | None:
    """What is wrong with a jsonl file, naming the line; None when nothing is, or the file is not jsonl."""
    if file.suffix.lower() not in (".jsonl", ".ndjson"):
        return None
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                return f"File {str(file)!r}, line {number}: not valid JSON ({error.msg} at column {error.colno})."
            if not isinstance(row, dict):
                return f"File {str(file)!r}, line {number}: a {type(row).__name__}; each line must be a JSON object."
    return None


def _load_hub(
    path: str, config: str | None, streaming: bool, data_files: DataFiles | None, data_dir: str | None
) -> Any:
    if _looks_local(path):
        raise DataError(f"No file or folder {path!r}; {FIX}.")
    from datasets import load_dataset

    files: Any = data_files
    try:
        return load_dataset(path, config, data_files=files, data_dir=data_dir, streaming=streaming)
    except Exception as error:  # network, permission and layout errors have no common base
        raise DataError(
            f"{path!r} is no local file or folder and cannot be loaded from the hub: {error}; {FIX}."
        ) from error


def _looks_local(path: str) -> bool:
    """A hub name is `name` or `owner/name`, without the ending of a data file."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or "\\" in path or reader_of(Path(path)) is not None


def _as_dict(splits: Mapping[str, Any]) -> DatasetDict | IterableDatasetDict:
    from datasets import Dataset, DatasetDict, IterableDatasetDict

    kind = DatasetDict if all(isinstance(part, Dataset) for part in splits.values()) else IterableDatasetDict
    return kind({str(name): part for name, part in splits.items()})


def get_dataset(mixture_config: DatasetMixtureConfig) -> DatasetDict | IterableDatasetDict:
    """Load every source of a mixture and lay them one after another.

    Where several sources all have a `fraction`, it is their share of the mixture; else the share of a source's own
    rows. The result has the split `train`, and `test` when `test_split_size` holds rows out (a fixed choice of rows).
    e.g. get_dataset(DatasetMixtureConfig([DatasetConfig("a.jsonl"), DatasetConfig("b.jsonl", fraction=0.5)]))
    Raises `ConfigError` for a field out of range and `DataError` for a source that cannot be read or does not fit.
    """
    from datasets import concatenate_datasets

    if not mixture_config.datasets:
        raise ConfigError("`datasets` is empty; list at least one source with a `path`.")
    # Before anything is read: a fraction of 30 (for 30 %) should not cost a download.
    _check_share("test_split_size", mixture_config.test_split_size, whole=False)
    for source in mixture_config.datasets:
        _check_share("fraction", source.fraction, whole=True)
    sources = mixture_config.datasets
    shared = len(sources) > 1 and all(source.fraction is not None for source in sources)
    own = [replace(source, fraction=None) for source in sources] if shared else sources
    parts = [_take(source, mixture_config.streaming) for source in own]
    if shared:
        parts = _share_out(parts, [source.fraction or 0.0 for source in sources], mixture_config.streaming)
    _check_columns(mixture_config.datasets, parts)
    try:
        rows = concatenate_datasets(parts)
    except ValueError as error:
        raise DataError(f"The sources do not fit together: {error} Make the types of their columns equal.") from error
    if mixture_config.test_split_size is None:
        return _as_dict({"train": rows})
    if mixture_config.streaming:
        raise ConfigError(
            "`test_split_size` needs the number of rows and `streaming` is on; name a test split instead."
        )
    if len(rows) < 2:
        raise DataError(f"`test_split_size` cannot split {len(rows)} row(s); give more rows or remove it.")
    return rows.train_test_split(test_size=mixture_config.test_split_size, seed=0)


def _share_out(parts: list[Any], fractions: list[float], streaming: bool) -> list[Any]:
    """The first rows of each part, so that they stand in these proportions and none is repeated.

    e.g. 100 and 100 rows, fractions 0.8 and 0.2 -> 100 and 25 rows
    """
    if streaming:
        raise ConfigError("`fraction` needs the number of rows and `streaming` is on; take the whole sources.")
    total = min(len(rows) / fraction for rows, fraction in zip(parts, fractions, strict=True))
    counts = [max(1, round(total * fraction)) for fraction in fractions]
    return [rows.select(range(min(count, len(rows)))) for rows, count in zip(parts, counts, strict=True)]


def _check_share(field: str, value: float | None, whole: bool) -> None:
    if value is not None and not (0 < value < 1 or (whole and value == 1)):
        interval = "(0, 1]" if whole else "(0, 1)"
        raise ConfigError(f"`{field}` is {value}; it is a share, so set it in {interval}.")


def _take(source: DatasetConfig, streaming: bool) -> Any:
    rows = load_source(source.path, source.name, source.split, streaming, source.data_files, source.data_dir)
    if source.columns is not None:
        missing = [name for name in source.columns if rows.column_names and name not in rows.column_names]
        if missing:
            raise DataError(f"{source.path!r} has no column {missing[0]!r}; it has {rows.column_names}.")
        rows = rows.select_columns(source.columns)
    if source.fraction is not None and source.fraction < 1:
        if streaming:
            raise ConfigError("`fraction` needs the number of rows and `streaming` is on; take the whole source.")
        # At least one row: a small source should not vanish by rounding.
        rows = rows.select(range(max(1, round(len(rows) * source.fraction))))
    return rows


def _check_columns(sources: Sequence[DatasetConfig], parts: Sequence[Any]) -> None:
    first = set(parts[0].column_names or ())
    for source, part in zip(sources, parts, strict=True):
        names = set(part.column_names or ())
        if names and first and names != first:
            raise DataError(
                f"{source.path!r} has the columns {sorted(names)} and {sources[0].path!r} has {sorted(first)}; "
                f"{sorted(names ^ first)} are not in both. Name those to keep with `columns`."
            )
