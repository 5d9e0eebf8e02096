"""The folder of a run as it is → its history, events, configuration and data."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.data.yaml import read_yaml_lines
from posttrain.errors import ConfigError


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
        """"finished", "stopped", or "unfinished": killed, failed or still training."""
        ends = [e["event"] for e in self.events if e.get("event") in ("started", "resumed", "finished", "stopped")]
        if not ends:
            return "finished" if any("train_runtime" in line for line in self.lines) else "unfinished"
        return ends[-1] if ends[-1] in ("finished", "stopped") else "unfinished"
