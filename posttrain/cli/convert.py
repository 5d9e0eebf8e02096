"""`posttrain convert`: the rows of a data set as another dataset type, in a file."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from posttrain.cli.parse import Values, construct
from posttrain.errors import ConfigError, DataError, EmptyDataError, suggest

if TYPE_CHECKING:
    from posttrain.data.config import ConvertArguments
    from posttrain.data.convert import ConversionReport

OUTPUTS = (".jsonl", ".jsonl.gz", ".json", ".parquet")


def convert(values: Values) -> None:
    """`posttrain convert`."""
    check(values["ConvertArguments"])

    from posttrain.data.config import ConvertArguments
    from posttrain.data.conversions import Options
    from posttrain.data.convert import ConversionReport
    from posttrain.data.convert import convert as convert_rows

    config: ConvertArguments = construct(ConvertArguments, values["ConvertArguments"])
    out = Path(str(config.output)).expanduser()
    report, options = ConversionReport(), Options(config.step_separator)
    name = str(config.dataset_name)
    made = convert_rows(_rows(config), str(config.to), config.conversational, options, report, name)
    try:
        _write(out, made, report, config.overwrite)
    except OSError as error:
        raise DataError(f"{str(out)!r} cannot be written ({error}); nothing was left there.") from error
    print(f"{report.summary()}\nwrote {out}", flush=True)


def _write(out: Path, rows: Iterator[dict[str, Any]], report: ConversionReport, overwrite: bool) -> None:
    """All of the file under its name, or nothing."""
    out.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(prefix=f".{out.name}-", dir=out.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            _writer(out)(file, rows)
            file.flush()
            os.fsync(file.fileno())
        if not report.rows_out:
            raise EmptyDataError(f"No row is left, and {str(out)!r} was not written: {report.summary()}.")
        os.chmod(partial, 0o666 & ~_umask())
        _put(partial, out, overwrite)
    finally:
        Path(partial).unlink(missing_ok=True)


def check(given: dict[str, Any]) -> None:
    """Refuse what cannot run, before anything heavy is imported."""
    from posttrain.data.formats import TYPES

    for name, what in (
        ("dataset_name", "a file, a folder or a hub name"),
        ("to", f"one of {', '.join(TYPES)}"),
        ("output", "the file to write"),
    ):
        if not given.get(name):
            raise ConfigError(f"`{name}` is not set; give --{name} {what}.")
    if given["to"] not in TYPES:
        raise ConfigError(f"`to` is {given['to']!r}; expected {', '.join(TYPES)}.{suggest(given['to'], TYPES)}")
    out = Path(given["output"]).expanduser()
    if _ending(out) is None:
        raise ConfigError(f"`output` is {str(out)!r}; its name must end in one of {', '.join(OUTPUTS)}.")
    if out.is_dir():
        raise ConfigError(f"`output` is {str(out)!r}, which is a folder; give a file in it.")
    if out.exists() and not given.get("overwrite"):
        raise ConfigError(f"`output` is {str(out)!r}, which exists; give another name, or --overwrite.")
    parent = next(folder for folder in out.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(f"`output` is {str(out)!r}, and {str(parent)!r} cannot be written to; give another folder.")


def _ending(out: Path) -> str | None:
    return next((ending for ending in reversed(OUTPUTS) if out.name.lower().endswith(ending)), None)


def _rows(config: ConvertArguments) -> Iterable[dict[str, Any]]:
    """The rows one by one. A local text file is not copied into a table first, so that every value stays as written."""
    from posttrain.data.sources import load_source

    path = str(config.dataset_name)
    streaming = Path(path).expanduser().exists()
    return load_source(path, config.dataset_config, config.dataset_split, streaming)


def _put(partial: str, out: Path, overwrite: bool) -> None:
    if overwrite:
        os.replace(partial, out)
        return
    try:
        os.link(partial, out)  # fails where another process has written the file since it was looked for
    except FileExistsError as error:
        raise ConfigError(f"`output` is {str(out)!r}, which exists by now; give another, or --overwrite.") from error
    except OSError:  # a file system without hard links
        os.replace(partial, out)


# Writers


def _writer(out: Path) -> Callable[[IO[bytes], Iterator[dict[str, Any]]], None]:
    return {".jsonl": _jsonl, ".jsonl.gz": _jsonl_gz, ".json": _json, ".parquet": _parquet}[str(_ending(out))]


def _dump(row: dict[str, Any]) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False).encode()
    except TypeError as error:
        name = next((name for name, value in row.items() if not _is_json(value)), "")
        raise DataError(f"column {name!r} is {row.get(name)!r:.60}, which JSON cannot hold; write .parquet.") from error


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


def _jsonl(file: IO[bytes], rows: Iterator[dict[str, Any]]) -> None:
    for row in rows:
        file.write(_dump(row) + b"\n")


def _jsonl_gz(file: IO[bytes], rows: Iterator[dict[str, Any]]) -> None:
    # Without the time of day, so that the same rows give the same file.
    with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
        for row in rows:
            packed.write(_dump(row) + b"\n")


def _json(file: IO[bytes], rows: Iterator[dict[str, Any]]) -> None:
    between = b"[\n"
    for row in rows:
        file.write(between + _dump(row))
        between = b",\n"
    file.write(b"\n]\n" if between == b",\n" else b"[]\n")


def _parquet(file: IO[bytes], rows: Iterator[dict[str, Any]]) -> None:
    from posttrain.data.tables import write_parquet

    write_parquet(list(rows), file)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
