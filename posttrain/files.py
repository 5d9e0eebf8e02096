"""Files written whole or not at all, and read without a fuss."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def whole_file(path: str | Path, put: Callable[[str, Path], Any] = os.replace) -> Iterator[Path]:
    """A file beside `path` to write to, which takes its name in the end: of a reader, all of it or nothing is seen.

    It is on the disk before, and has the permissions of any new file. put: gives it the name, in place of what has it.
    What is raised inside leaves nothing behind. Raises `OSError` where the system refuses.
    """
    target = Path(path)
    handle, partial = tempfile.mkstemp(prefix=f".{target.name}-", suffix=".partial", dir=target.parent)
    os.close(handle)
    try:
        yield Path(partial)
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        os.chmod(partial, 0o666 & ~_umask())
        put(partial, target)
    finally:
        Path(partial).unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one where there is no file, or no such object in it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
