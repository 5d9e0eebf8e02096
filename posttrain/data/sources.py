"""Where rows come from: local files, folders, folders of `save_to_disk`, and hub names; one split of one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from posttrain.data.config import DatasetConfig
from posttrain.data.formats import format_of, without_label
from posttrain.data.joining import concatenate, is_stream
from posttrain.data.readers import COMPRESSED, TEXT_FILES, endings, read_rows
from posttrain.data.splits import pick_split, split_length
from posttrain.data.tables import check_tables, checked_rows, first_row, read_table
from posttrain.errors import DataError, EmptyDataError

if TYPE_CHECKING:
    from datasets import DatasetDict, IterableDatasetDict

# The kind of a file, by its ending; a compressed text file (.gz, .bz2, .xz, .zst) is read through.
READERS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
    ".arrow": "arrow",
}
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
POINTER = b"version https://git-lfs"
FIX = "give a file (jsonl, json, csv, tsv, parquet, arrow, txt), a folder of such files, or a hub name"

DataFiles = Union[str, Sequence[str], Mapping[str, Union[str, Sequence[str]]]]  # noqa: UP007


@dataclass(frozen=True)
class Loaded:
    """The splits of a source. `count` says how many rows one has, also of a stream; None when nobody knows."""

    splits: dict[str, Any]
    count: Callable[[str], int | None]


def load_source(
    path: str,
    config: str | None = None,
    split: str | None = None,
    streaming: bool = False,
    data_files: DataFiles | None = None,
    data_dir: str | None = None,
    check: bool = True,
) -> Any:
    """Load a local file, a folder of files, a folder written by `save_to_disk`, or a hub data set.

    With `split`, that split; without, all of them by name. A single file is the split `train`. `data_files` and
    `data_dir` are relative to `path` when it is a local folder. With `check`, the rows of one source must be of one
    format, and rows of text files whole.

    e.g. load_source("data.jsonl", split="train[:10%]") -> Dataset
    Raises `DataError` naming the path that is missing, the ending that is not known, the splits there are, or the file
    and line of a row that is broken; a stream raises when it comes to that row.
    """
    if split is None:
        return as_dict(_load(path, config, streaming, data_files, data_dir, check, None).splits)
    return load_part(path, config, split, streaming, data_files, data_dir, check)[0]


def load_part(
    path: str,
    config: str | None,
    split: str,
    streaming: bool,
    data_files: DataFiles | None,
    data_dir: str | None,
    check: bool,
) -> tuple[Any, Callable[[], int | None]]:
    """As `load_source` for one split, with a function that counts its rows (None: nobody knows)."""
    asked = [part.strip() for part in split.split("+")]
    names = {part.partition("[")[0].strip() for part in asked}
    found = _load(path, config, streaming, data_files, data_dir, check, names)
    parts = [pick_split(found.splits, part, path, found.count) for part in asked]

    def count() -> int | None:
        each = [split_length(part, found.count) for part in asked]
        return None if None in each else sum(n for n in each if n is not None)

    return concatenate(parts, [path] * len(parts)), count


def _load(
    path: str,
    config: str | None,
    streaming: bool,
    data_files: DataFiles | None,
    data_dir: str | None,
    check: bool,
    wanted: set[str] | None,
) -> Loaded:
    where = Path(path).expanduser()
    if data_dir is not None and where.is_dir():
        where = where / data_dir
        if not where.is_dir():
            raise DataError(f"`data_dir` is {data_dir!r} and {path!r} holds no such folder.")
    if where.is_dir() and _is_saved(where):
        return _load_saved(where, streaming, check)
    if where.is_file() or where.is_dir():
        return _load_files(_files_by_split(where, data_files), streaming, str(where), check, wanted)
    return _load_hub(path, config, streaming, data_files, data_dir, check)


def local_files(source: DatasetConfig) -> list[Path]:
    """The files a source is read from, in order; none for one on the hub."""
    where = Path(source.path).expanduser()
    where = where / source.data_dir if source.data_dir is not None and where.is_dir() else where
    if where.is_dir() and _is_saved(where):
        return sorted(where.rglob("*.arrow"))
    if not where.exists():
        return []
    return [file for files in _files_by_split(where, source.data_files).values() for file in files]


# Folders of `save_to_disk`


def _is_saved(folder: Path) -> bool:
    return (folder / "dataset_dict.json").exists() or (folder / "state.json").exists()


def _load_saved(folder: Path, streaming: bool, check: bool) -> Loaded:
    from datasets import Dataset, load_from_disk

    try:
        loaded = load_from_disk(str(folder))
    except Exception as error:  # a missing file, a cut one and a wrong version have no common base
        raise DataError(
            f"{str(folder)!r}, written by save_to_disk, cannot be read: {error}; write it again."
        ) from error
    parts = {"train": loaded} if isinstance(loaded, Dataset) else {str(name): part for name, part in loaded.items()}
    check_tables(parts, str(folder), check)
    lengths = {name: len(part) for name, part in parts.items()}
    if streaming:
        return Loaded({name: part.to_iterable_dataset() for name, part in parts.items()}, lengths.get)
    return Loaded(parts, lengths.get)


# Files


def _files_by_split(where: Path, data_files: DataFiles | None) -> dict[str, list[Path]]:
    if where.is_file():
        if data_files is not None:
            raise DataError(
                f"`data_files` is {data_files!r} and {str(where)!r} is one file; give the folder, or the file."
            )
        return {"train": [where]}
    if data_files is None:
        found = sorted(file for file in where.rglob("*") if _is_data(file, where))
        splits: dict[str, list[Path]] = {}
        for file in found:
            splits.setdefault(_split_of(file, where), []).append(file)
        if not splits:
            raise DataError(f"Folder {str(where)!r} holds no file that can be read; supported are {_endings()}.")
        return splits
    named = data_files if isinstance(data_files, Mapping) else {"train": data_files}
    return {split: _match(where, [value] if isinstance(value, str) else value) for split, value in named.items()}


def _is_data(file: Path, root: Path) -> bool:
    """A file that can be read, and is not hidden."""
    hidden = any(part.startswith(".") for part in file.relative_to(root).parts)
    return not hidden and file.is_file() and reader_of(file) is not None


def _match(where: Path, patterns: Sequence[str]) -> list[Path]:
    files: list[Path] = []
    for pattern in patterns:
        root = Path(pattern).anchor
        found = sorted(Path(root).glob(pattern[len(root) :]) if root else where.glob(pattern))
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
    """The kind of a file, by its ending. e.g. rows.jsonl.gz -> "json", notes.pdf -> None"""
    ending, packed = endings(file)
    kind = READERS.get(ending)
    return None if packed and ending not in TEXT_FILES else kind


def _endings() -> str:
    return f"{', '.join(READERS)} (text also with {', '.join(COMPRESSED)})"


def _load_files(
    splits: Mapping[str, Sequence[Path]], streaming: bool, path: str, check: bool, wanted: set[str] | None
) -> Loaded:
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
    pointer = next(
        (file for file in files if file.stat().st_size < 1024 and file.read_bytes().startswith(POINTER)), None
    )
    if pointer is not None:
        raise DataError(f"File {str(pointer)!r} is a pointer of Git LFS, not the data; run `git lfs pull` for it.")
    kind = str(readers.pop())
    # A split that nobody asked for is not read.
    asked = {name: list(group) for name, group in splits.items() if wanted is None or name in wanted}
    named: dict[str, Any] = dict.fromkeys(splits)
    for name, group in asked.items():
        if kind not in ("parquet", "arrow"):
            named[name] = _stream(group, check) if streaming else read_table(group, check)
        else:
            named[name] = _load_arrow(kind, group, streaming, path, check)
    return Loaded(named, lambda name: _rows_in(kind, splits[name]))


def _stream(files: Sequence[Path], check: bool) -> Any:
    from datasets import IterableDataset

    row, where = first_row(files)
    kwargs = {"files": [str(file) for file in files], "check": check, "first": (format_of(without_label(row)), where)}
    return IterableDataset.from_generator(checked_rows, gen_kwargs=kwargs)


def _load_arrow(kind: str, files: Sequence[Path], streaming: bool, path: str, check: bool) -> Any:
    from datasets import load_dataset

    _same_columns(files, [_schema(kind, file) for file in files])
    if kind == "parquet" and not _rows_in(kind, files):
        raise EmptyDataError(f"{path!r} holds no row; write rows to it or remove it.")
    named = {"train": [str(file) for file in files]}
    try:
        rows = load_dataset(kind, data_files=named, split="train", streaming=streaming)
    except Exception as error:  # the readers raise a dozen kinds, some of them private
        raise DataError(f"{path!r} cannot be read: {error.__cause__ or error}") from error
    if not streaming:
        check_tables({"train": rows}, path, check)
    return rows


def _schema(kind: str, file: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if kind == "parquet":
            return pq.read_schema(file)
        with pa.memory_map(str(file)) as source:
            try:
                return pa.ipc.open_stream(source).schema
            except pa.ArrowInvalid:
                return pa.ipc.open_file(source).schema
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"File {str(file)!r} is no whole {kind} file ({error}); write or download it again.") from error


def _same_columns(files: Sequence[Path], schemas: Sequence[Any]) -> None:
    for file, schema in zip(files, schemas, strict=True):
        different = sorted(set(schema.names) ^ set(schemas[0].names))
        if different:
            raise DataError(
                f"File {str(file)!r} has the columns {schema.names} and {str(files[0])!r} has {schemas[0].names}; "
                f"{different} are not in both. The files of one split have the same columns."
            )


def _rows_in(kind: str, files: Sequence[Path]) -> int | None:
    """How many rows files hold; text is read for it."""
    import pyarrow.parquet as pq

    if kind == "parquet":
        return sum(pq.read_metadata(file).num_rows for file in files)
    if kind == "arrow":
        return len(_load_arrow(kind, files, False, "", False))
    return sum(1 for file in files for _ in read_rows(file))


# The hub


def _load_hub(
    path: str, config: str | None, streaming: bool, data_files: DataFiles | None, data_dir: str | None, check: bool
) -> Loaded:
    if _looks_local(path):
        raise DataError(f"No file or folder {path!r}; {FIX}.")
    from datasets import load_dataset

    files: Any = data_files
    try:
        loaded: Any = load_dataset(path, config, data_files=files, data_dir=data_dir, streaming=streaming)
    except Exception as error:  # network, permission and layout errors have no common base
        raise DataError(
            f"{path!r} is no local file or folder and cannot be loaded from the hub: {error}; {FIX}."
        ) from error
    parts = {str(name): part for name, part in loaded.items()}
    if not streaming:
        check_tables(parts, path, check)
    return Loaded(parts, lambda name: _told(parts[name], name))


def _told(rows: Any, name: str) -> int | None:
    if not is_stream(rows):
        return len(rows)
    known = (rows.info.splits or {}).get(name)
    return known.num_examples if known is not None and known.num_examples else None


def _looks_local(path: str) -> bool:
    """A hub name is `name` or `owner/name`, without the ending of a data file."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or "\\" in path or reader_of(Path(path)) is not None


def as_dict(splits: Mapping[str, Any]) -> DatasetDict | IterableDatasetDict:
    """Splits by name, as `datasets` has them."""
    from datasets import Dataset, DatasetDict, IterableDatasetDict

    kind = DatasetDict if all(isinstance(part, Dataset) for part in splits.values()) else IterableDatasetDict
    return kind({str(name): part for name, part in splits.items()})
