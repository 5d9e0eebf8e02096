"""What a checkpoint folder holds, file by file, written last: a folder without a manifest was never whole.

`manifest.json` has the size and the XXH3 (128 bits) of every other file. The hash finds damage, not forgery.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

MANIFEST = "manifest.json"
_BLOCK = 1 << 24
_OF_RANK = re.compile(r"rng_state_(\d+)\.pth|zero_pp_rank_(\d+)_|__(\d+)_\d+\.distcp")


@dataclass(frozen=True)
class Manifest:
    """e.g. Manifest(step=20, sequence=3, ranks=1, files={"model.safetensors": (4096, "9f…")})

    sequence: the how manieth checkpoint of its folder; the newest has the highest, whatever its step.
    """

    step: int
    sequence: int
    ranks: int
    files: Mapping[str, tuple[int, str]]


def file_hash(path: Path) -> str:
    """XXH3 of a file's bytes, 128 bits in hex: about 8 GiB/s on one core, so the disk sets the time."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def files_of(folder: Path) -> list[str]:
    """Every file but the manifest, relative, sorted."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != MANIFEST)


def owner_of(name: str, ranks: int) -> int:
    """The rank that wrote a file: its number is in the names of files each rank writes. Others are rank 0's."""
    found = _OF_RANK.search(name)
    number = int(next(filter(None, found.groups()))) if found else 0
    return number if number < ranks else 0


def synced(folder: Path, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Force files to the disk; their sizes and hashes."""
    found = {}
    for name in names:
        sync(folder / name)
        found[name] = ((folder / name).stat().st_size, file_hash(folder / name))
    return found


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():  # some file systems know no fsync of folders
            raise
    finally:
        os.close(handle)


def sync_folders(folder: Path) -> None:
    for path in (*(p for p in folder.rglob("*") if p.is_dir()), folder):
        sync(path)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    body = {"algorithm": "xxh3_128", **asdict(manifest)}
    text = json.dumps({**body, "hash": _body_hash(body)}, indent=1)
    partial = folder / f"{MANIFEST}.partial"
    partial.write_text(text, encoding="utf-8")
    sync(partial)
    partial.rename(folder / MANIFEST)
    sync_folders(folder)


def read_manifest(folder: Path) -> Manifest | None:
    """None where there is none, or it is damaged itself."""
    try:
        body: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if body.pop("hash") != _body_hash(body):
            return None
        files = {name: (int(size), str(digest)) for name, (size, digest) in body["files"].items()}
        return Manifest(int(body["step"]), int(body["sequence"]), int(body["ranks"]), files)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _body_hash(body: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(body, sort_keys=True).encode()).hexdigest()


def damage(folder: Path, hashes: bool = True, part: int = 0, parts: int = 1) -> list[str]:
    """What is wrong with a checkpoint, one phrase a file; empty when it is whole, or was written without a manifest.

    hashes: read every byte, not only the sizes. part, parts: hash only this share of the files, for ranks that share
    the work.
    """
    if not (folder / MANIFEST).exists():
        return []
    manifest = read_manifest(folder)
    if manifest is None:
        return [f"{MANIFEST} cannot be read"]
    wrong = []
    for index, (name, (size, digest)) in enumerate(sorted(manifest.files.items())):
        path = folder / name
        if not path.is_file():
            wrong.append(f"{name} is missing")
        elif path.stat().st_size != size:
            wrong.append(f"{name} has {path.stat().st_size:,} bytes and was written with {size:,}")
        elif hashes and index % parts == part and file_hash(path) != digest:
            wrong.append(f"{name} has changed since it was written (its checksum differs)")
    return wrong
