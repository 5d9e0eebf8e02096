"""`output_dir` as one run's own: a lock while it writes there, and a look before training at what would stop a save."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError
from posttrain.trainer.checkpoints import checkpoints_in, sweep

LOCK = ".lock"
HEARTBEAT_SECONDS = 10.0
_ELSEWHERE = "Give this run another `output_dir`"


@contextlib.contextmanager
def owned(output_dir: Path, needed: int = 0) -> Iterator[None]:
    """Hold `output_dir` for the length of a run. `needed`: bytes a checkpoint takes at least.

    Raises `ConfigError` naming `output_dir` when it cannot be written, is too small, or another run writes there.
    """
    lock = _Lock(output_dir / LOCK)
    with writing(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
        lock.take()
    try:
        refuse_small(output_dir, needed)
        sweep(output_dir)
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def writing(output_dir: Path) -> Iterator[None]:
    """Raise `ConfigError` naming `output_dir` for what the system refuses inside."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"`output_dir` ({output_dir}) cannot be written: {error.strerror or error}. {_ELSEWHERE}, or mend the "
            "permissions."
        ) from error


def refuse_small(output_dir: Path, needed: int) -> None:
    free = shutil.disk_usage(output_dir).free
    if free < needed:
        raise ConfigError(
            f"`output_dir` ({output_dir}) has {free / 2**30:.2f} GiB free, and the weights of one checkpoint take "
            f"{needed / 2**30:.2f} GiB. Make room, or set `output_dir` elsewhere."
        )


def refuse_anothers(output_dir: Path) -> None:
    """A new run would mix its checkpoints with those of another, and resuming would not tell them apart."""
    found = checkpoints_in(output_dir) if output_dir.is_dir() else []
    if found:
        raise ConfigError(
            f"`output_dir` ({output_dir}) holds {len(found)} checkpoint(s) of another run, the newest "
            f"{found[-1].name}, and this run starts anew. To go on from them set `resume_from_checkpoint: last`; else "
            "set another `output_dir`, or `overwrite_output_dir: true` to count them as older ones of this run."
        )


class _Lock:
    """A file with who holds it. Its time is renewed while the process lives, so that another machine can tell."""

    def __init__(self, path: Path) -> None:
        self.path, self.token = path, uuid.uuid4().hex
        self._stop = threading.Event()

    def take(self) -> None:
        while True:
            try:
                handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
                break
            except FileExistsError:
                refuse_held(self.path)
                self.path.unlink(missing_ok=True)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(_myself() | {"token": self.token, "since": time.strftime("%Y-%m-%d %H:%M:%S")}, file)
        threading.Thread(target=self._renew, daemon=True, name="posttrain-lock").start()

    def _renew(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(self.path)

    def release(self) -> None:
        self._stop.set()
        if _read(self.path).get("token") == self.token:
            self.path.unlink(missing_ok=True)


def refuse_held(path: Path) -> None:
    """Return when the run that wrote the lock is gone. Raises `ConfigError` naming it when it lives.

    On this machine its process is looked up. Of another machine the lock is watched for two and a half heartbeats.
    """
    holder, me = _read(path), _myself()
    here = bool(holder) and all(holder.get(name) == me[name] for name in ("host", "space"))
    alive = _runs(holder) if here else _is_renewed(path)
    if alive:
        who = f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')}"
        raise ConfigError(
            f"`output_dir` ({path.parent}) is being written by another run ({who}). {_ELSEWHERE}, or end that one; if "
            f"it has ended, delete {path}."
        )


def _is_renewed(path: Path) -> bool:
    def stamp() -> int:
        try:
            with path.open("rb") as file:  # opened: network file systems look anew only then
                return os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            return -1

    first, deadline = stamp(), time.monotonic() + 2.5 * HEARTBEAT_SECONDS
    while time.monotonic() < deadline:
        time.sleep(min(HEARTBEAT_SECONDS / 10, 1.0))
        if stamp() not in (first, -1):
            return True
    return False


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _myself() -> dict[str, Any]:
    pid = os.getpid()
    return {"pid": pid, "host": socket.gethostname(), "space": _process_space(), "started": _started(pid)}


def _process_space() -> str | None:
    """Containers may share a name and number their processes alike; this tells them apart."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _started(pid: int) -> str | None:
    """When a process began, in the kernel's ticks: numbers of processes are used again."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _runs(holder: dict[str, Any]) -> bool:
    try:
        os.kill(int(holder["pid"]), 0)
    except (ProcessLookupError, KeyError, ValueError):
        return False
    except PermissionError:
        pass  # it runs, under another user
    return _started(int(holder["pid"])) == holder.get("started")
