"""The folder of a run as it is → its history, events, configuration and data."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError
from posttrain.files import read_object

_BEGINS, _ENDS = ("started", "resumed"), ("finished", "stopped", "failed")


@dataclass
class Run:
    """One run. `lines` are its log lines by step, of training and of evaluation; `events` what happened beside."""

    folder: Path
    name: str
    lines: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, tuple[str, str]] = field(default_factory=dict)  # field → value as text, origin
    environment: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    unread: int = 0  # lines of the log that could not be read

    def series(self, key: str) -> tuple[list[float], list[float]]:
        """Steps and values of one metric, by rising step."""
        points: dict[float, float] = {}
        for line in self.lines:
            value = line.get(key)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                points[float(line.get("step", 0))] = float(value)
        return sorted(points), [points[step] for step in sorted(points)]

    def last(self, key: str) -> float | None:
        return next((v for v in reversed(self.series(key)[1]) if math.isfinite(v)), None)

    @property
    def state(self) -> str:
        """ "finished", "stopped", "failed" with an error, or "unfinished": killed or still training."""
        ends = [e["event"] for e in self.events if e.get("event") in (*_BEGINS, *_ENDS)]
        if not ends:
            return "finished" if any("train_runtime" in line for line in self.lines) else "unfinished"
        return ends[-1] if ends[-1] in _ENDS else "unfinished"


def read_run(path: str | Path) -> Run:
    """Read the folder of a run, or of a checkpoint. Raises `ConfigError` for one that holds no history."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"{str(path)!r} is no folder; give the output_dir of a run.")
    run = Run(folder, folder.resolve().name)
    home = folder
    log, state = folder / "log.jsonl", _newest_state(folder)
    if log.is_file():
        _follow(run, log.read_text(encoding="utf-8", errors="replace"))
    elif state is not None:
        history = read_object(state).get("log_history", [])
        run.lines = [line for line in history if "event" not in line]
        run.events = [line for line in history if "event" in line]
        home = folder if (folder / "resolved_config.yaml").is_file() else folder.parent
    else:
        raise ConfigError(f"{str(path)!r} holds no log.jsonl and no trainer_state.json; give the output_dir of a run.")
    run.config = _config(home / "resolved_config.yaml")
    run.environment = read_object(home / "environment.json")
    run.samples = [row for row, _ in _rows(home / "completions.jsonl")]
    return run


def _newest_state(folder: Path) -> Path | None:
    own = folder / "trainer_state.json"
    if own.is_file():
        return own
    found = [(int(p.parent.name.rpartition("-")[2]), p) for p in folder.glob("checkpoint-*/trainer_state.json")
             if p.parent.name.rpartition("-")[2].isdigit()]  # fmt: skip
    return max(found)[1] if found else None


def _follow(run: Run, text: str) -> None:
    """A run that started again in the folder begins anew; one that resumed takes back what came after its step."""
    for line in text.splitlines():
        try:
            entry = json.loads(line)
            step = float(entry.get("step", 0))
        except (ValueError, AttributeError, TypeError):
            run.unread += 1  # the last line of a run that was killed may be cut
            continue
        if entry.get("event") == "started":
            run.lines, run.events = [], []
        elif entry.get("event") == "resumed":
            run.lines = [each for each in run.lines if each.get("step", 0) <= step]
        (run.events if "event" in entry else run.lines).append(entry)


def _rows(path: Path) -> list[tuple[dict[str, Any], int]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    found = []
    for at, line in enumerate(lines):
        try:
            found.append((json.loads(line), at))
        except ValueError:
            continue
    return found


def _config(path: Path) -> dict[str, tuple[str, str]]:
    """`name: JSON  # origin`, as the run wrote it; a line that was edited keeps its text."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    found: dict[str, tuple[str, str]] = {}
    for line in lines:
        name, colon, rest = line.partition(":")
        if not colon or line.startswith(("#", " ")):
            continue
        try:
            value, end = json.JSONDecoder().raw_decode(rest.strip())
            shown, origin = json.dumps(value, ensure_ascii=False), rest.strip()[end:]
        except ValueError:
            shown, _, origin = rest.strip().partition("  #")
        found[name] = (shown, origin.strip(" #"))
    return found
