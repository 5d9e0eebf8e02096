"""Files of rows as text: jsonl, json, csv, tsv, txt. Each row is read as it is written, and comes with its line.

They are read here, and not by `datasets`, because its readers guess: a column of dates becomes timestamps, the word
"NA" in a csv becomes a missing value, a csv row with a value too many moves its columns, and no error names a line.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import importlib
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from posttrain.errors import DataError, MissingExtraError

# A line longer than this is no row: a file without line ends, or no text at all. In bytes.
MAX_LINE = 256 << 20
NUMBER_LIMIT = 2**63
# Cells of a csv that hold JSON: chats, tools and the like have no other way to be written there.
JSON_CELLS = frozenset({"messages", "conversations", "tools", "chat_template_kwargs", "completions", "labels"})
CHAT_CELLS = frozenset({"prompt", "completion", "chosen", "rejected"})

Row = dict[str, Any]
Numbered = Iterator[tuple[int, Row]]


class BrokenRow(ValueError):
    """What is wrong with a line; `read_rows` adds the file."""

    def __init__(self, number: int, what: str, unit: str = "line") -> None:
        super().__init__(what)
        self.number, self.what, self.unit = number, what, unit


def place(file: str | Path, number: int) -> str:
    """How errors name what `read_rows` gave. e.g. "File 'a.jsonl', line 3"; "File 'a.json', row 3" """
    unit = "row" if endings(Path(file))[0] == ".json" else "line"
    return f"File {str(file)!r}, {unit} {number}"


def read_rows(file: str | Path) -> Numbered:
    """Yield (line, row) of a text file, by its ending. Lines count from 1; of a json document rows do.

    e.g. a.jsonl with '{"text": "x"}' in its second line, after an empty one -> (2, {"text": "x"})
    Raises `DataError` naming the file and the line, and `MissingExtraError` for .zst without `zstandard`.
    """
    path = Path(file)
    ending, packed = endings(path)
    line = 0
    try:
        with _open(path, packed) as stream:
            for line, row in _READ[ending](stream):
                yield line, row
    except BrokenRow as error:
        raise DataError(f"File {str(path)!r}, {error.unit} {error.number}: {error.what}") from error
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise DataError(
            f"{place(path, line + 1)}: the compressed data is broken ({error}); the file was cut or is no {packed} "
            "file: download or compress it again."
        ) from error
    except OSError as error:
        raise DataError(f"{place(path, line + 1)}: cannot be read ({error}).") from error


def endings(path: Path) -> tuple[str, str]:
    """The kind of a file and its compression. e.g. rows.jsonl.gz -> (".jsonl", ".gz"); rows.csv -> (".csv", "")"""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSED else ""
    return (suffixes[-1] if suffixes else ""), packed


def _open(path: Path, packed: str) -> IO[bytes]:
    return COMPRESSED[packed](path) if packed else path.open("rb")


def _zstd(path: Path) -> IO[bytes]:
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError as error:
        raise MissingExtraError(
            f"File {str(path)!r} is compressed with zstd, which needs `pip install zstandard`; or compress it as .gz."
        ) from error
    return cast("IO[bytes]", io.BufferedReader(_Zstd(zstandard, path)))


class _Zstd(io.RawIOBase):
    """Frames one after another, and an error at an end that comes too early; zstandard's own reader stops silently."""

    def __init__(self, zstandard: Any, path: Path) -> None:
        self.kind, self.file, self.held = zstandard, path.open("rb"), b""
        self.frame: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.held:
            data = (self.frame.unused_data if self.frame is not None and self.frame.eof else b"") or self.file.read(
                1 << 16
            )
            if self.frame is not None and self.frame.eof:
                self.frame = None
            if not data:
                if self.frame is not None:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            if self.frame is None:
                self.frame = self.kind.ZstdDecompressor().decompressobj()
            try:
                self.held = self.frame.decompress(data)
            except self.kind.ZstdError as error:
                raise EOFError(str(error)) from error
        count = min(len(buffer), len(self.held))
        buffer[:count], self.held = self.held[:count], self.held[count:]
        return count

    def close(self) -> None:
        self.file.close()
        super().close()


COMPRESSED: dict[str, Callable[[Path], IO[bytes]]] = {
    ".gz": cast("Callable[[Path], IO[bytes]]", gzip.open),
    ".bz2": cast("Callable[[Path], IO[bytes]]", bz2.open),
    ".xz": cast("Callable[[Path], IO[bytes]]", lzma.open),
    ".zst": _zstd,
}


# Lines


def _lines(stream: IO[bytes]) -> Iterator[tuple[int, str]]:
    """(number, text with its end)"""
    number = 0
    while data := stream.readline(MAX_LINE + 1):
        number += 1
        if len(data) > MAX_LINE:
            raise BrokenRow(number, f"longer than {MAX_LINE >> 20} MiB; write one row a line, or split the row.")
        if number == 1:
            data = _without_mark(data)
        yield number, _decode(data, number)


def _without_mark(data: bytes) -> bytes:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise BrokenRow(1, "written in UTF-16; write the file in UTF-8 (iconv -f UTF-16 -t UTF-8).")
    return data.removeprefix(b"\xef\xbb\xbf")


def _decode(data: bytes, number: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        seen = data[max(0, error.start - 12) : error.start + 1].decode("latin-1")
        raise BrokenRow(
            number,
            f"byte {error.start + 1} (0x{data[error.start]:02x}, after {seen[:-1]!r}) is not UTF-8; write the file in "
            "UTF-8 (if it is Latin-1: iconv -f LATIN1 -t UTF-8).",
        ) from error


def _text(stream: IO[bytes]) -> Numbered:
    return ((number, {"text": text.rstrip("\r\n")}) for number, text in _lines(stream))


# JSON


def _jsonl(stream: IO[bytes]) -> Numbered:
    for number, text in _lines(stream):
        if text.strip():
            yield number, _object(_loads(text, number, text.endswith("\n")), number, text)


def _loads(text: str, number: int, ended: bool = True) -> Any:
    try:
        return _JSON.decode(text.strip())
    except json.JSONDecodeError as error:
        raise BrokenRow(number, _why(text, error, ended)) from error
    except RecursionError as error:
        raise BrokenRow(number, "nested too deeply to be read.") from error
    except _Refused as error:
        raise BrokenRow(number, str(error)) from error


def _why(text: str, error: json.JSONDecodeError, ended: bool) -> str:
    what = f"not valid JSON ({error.msg}, column {error.colno})"
    if error.msg == "Extra data" and text.lstrip().startswith("{"):
        return f"{what}: something follows the row; write one object a line."
    if text.strip() in ("{", "["):
        return f"{what}: one document over several lines; write one object a line, or name the file .json."
    if not ended:
        return f"{what}: the file ends in the middle of this row; it was cut: write or download it again."
    return f"{what}: {text[max(0, error.pos - 30) : error.pos + 10]!r}."


def _object(value: Any, number: int, text: str) -> Row:
    if not isinstance(value, dict):
        raise BrokenRow(number, f'a {_kind(value)}; each row must be a JSON object, such as {{"text": "…"}}.')
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise BrokenRow(number, "holds half of a surrogate pair (\\ud800 … \\udfff), which is no text.") from error
    return value


def _kind(value: Any) -> str:
    names = {list: "list", str: "text", bool: "true or false", type(None): "null", int: "number", float: "number"}
    return names.get(type(value), type(value).__name__)


class _Refused(ValueError):
    """JSON that Python reads and a table cannot hold."""


def _unique(pairs: list[tuple[str, Any]]) -> Row:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Refused(f"the key {twice!r} comes twice in one object; keep one.")
    return found


def _whole(text: str) -> int:
    value = int(text) if len(text) < 25 else NUMBER_LIMIT
    if not -NUMBER_LIMIT <= value < NUMBER_LIMIT:
        raise _Refused(f"the number {text[:30]} does not fit in 64 bits; write it as text.")
    return value


def _constant(name: str) -> Any:
    raise _Refused(f"holds {name}, which is no JSON; write null, or leave the key out.")


_JSON = json.JSONDecoder(object_pairs_hook=_unique, parse_int=_whole, parse_constant=_constant, strict=False)


def _json(stream: IO[bytes]) -> Numbered:
    """A list of objects; an object with one list of objects in it; one object; or lines of objects after all."""
    text = _decode(_without_mark(stream.read()), 1)
    if not text.strip():
        return
    try:
        document = _JSON.decode(text.strip())
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):
            yield from enumerate((row for _, row in _jsonl(io.BytesIO(text.encode()))), start=1)
            return
        cut = " The file ends in the middle of a value: it was cut." if error.pos >= len(text.strip()) - 1 else ""
        raise BrokenRow(error.lineno, f"not valid JSON ({error.msg}, column {error.colno}).{cut}") from error
    except RecursionError as error:
        raise BrokenRow(1, "nested too deeply to be read.") from error
    except _Refused as error:
        raise BrokenRow(1, str(error)) from error
    if isinstance(document, dict) and len(document) == 1:
        (name, inner), *_ = document.items()
        if name not in JSON_CELLS | CHAT_CELLS and isinstance(inner, list) and all(isinstance(i, dict) for i in inner):
            document = inner
    for number, value in enumerate(document if isinstance(document, list) else [document], start=1):
        try:
            yield number, _object(value, number, text)
        except BrokenRow as error:
            raise BrokenRow(number, error.what, "row") from error


# Tables


def _table(separator: str) -> Callable[[IO[bytes]], Numbered]:
    def read(stream: IO[bytes]) -> Numbered:
        csv.field_size_limit(MAX_LINE)
        reader = csv.reader(_whole_lines(stream), delimiter=separator, strict=True)
        header: list[str] | None = None
        while True:
            start = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise BrokenRow(start, f"not valid csv ({error}); look for a quote that is not closed.") from error
            if header is None:
                header = _header(cells, start)
            elif cells:
                yield start, _record(header, cells, start)

    return read


def _whole_lines(stream: IO[bytes]) -> Iterator[str]:
    return (text for _, text in _lines(stream))


def _header(cells: list[str], line: int) -> list[str]:
    names = [cell.strip() for cell in cells]
    wrong = next((name for name in names if not name or names.count(name) > 1), None)
    if wrong is not None:
        what = f"the column {wrong!r} comes twice" if wrong else f"a column without a name in {names}"
        raise BrokenRow(line, f"{what}; the first line names the columns, each once.")
    if len(names) == 1 and (other := next((mark for mark in ";\t|" if mark in names[0]), None)):
        raise BrokenRow(line, f"one column, {names[0]!r}; its values seem to be parted by {other!r}: part them by ','.")
    return names


def _record(header: list[str], cells: list[str], line: int) -> Row:
    if len(cells) != len(header):
        raise BrokenRow(
            line,
            f"{len(cells)} values and {len(header)} columns ({', '.join(header)}); put quotes around values that hold "
            "the separator.",
        )
    return {name: _cell(name, text, line) for name, text in zip(header, cells, strict=True)}


def _cell(name: str, text: str, line: int) -> Any:
    """Cells are text, as written; only columns that can be no text are read as what they must be."""
    if name == "label":
        word = text.strip().lower()
        if word not in _LABELS:
            raise BrokenRow(line, f"column 'label' is {text!r}; write true or false.")
        return _LABELS[word]
    if name in JSON_CELLS:
        return _loads(text, line) if text.strip() else None
    if name in CHAT_CELLS and text.lstrip().startswith("[{"):
        try:
            value = _JSON.decode(text.strip())
        except ValueError:
            return text
        return value if isinstance(value, list) and all(isinstance(item, dict) for item in value) else text
    return text


_LABELS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_READ: dict[str, Callable[[IO[bytes]], Numbered]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json,
    ".csv": _table(","),
    ".tsv": _table("\t"),
    ".txt": _text,
}
TEXT_FILES = frozenset(_READ)


def rows_of(files: Iterable[str | Path]) -> Iterator[Row]:
    """The rows of several files, one after another."""
    for file in files:
        for _, row in read_rows(file):
            yield row
