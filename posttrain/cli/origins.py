"""Where each value of a run comes from, and `--show_config`, which prints it. Nothing heavy is imported."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.cli.coerce import parse_yaml
from posttrain.cli.launch import COMMAND, LAUNCHED, find_config, read_config
from posttrain.cli.parse import (
    Values,
    coerce_mapping,
    grouped,
    index,
    read_command_line,
    read_file,
    replaced,
    without_flags,
)
from posttrain.cli.schema import Options
from posttrain.errors import ConfigError
from posttrain.trainer.masking import is_secret, masked

LINE, DEFAULT = "command line", "default"
_SWITCHES = ("show_config", "dry_run")
_SHOWN = {"": "given", "true": "given", "given": "given", "all": "all", "json": "json"}
# Variables that decide how a run goes, where they are set.
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTORCH_CUDA_ALLOC_CONF")
_PREFIXES = ("HF_", "TRANSFORMERS_", "ACCELERATE_", "FSDP_", "POSTTRAIN_", "NCCL_", "WANDB_", "TOKENIZERS_")


@dataclass(frozen=True)
class Switches:
    """What is asked of a command beside its fields. `show`: "", "given", "all" or "json"."""

    show: str = ""
    dry_run: bool = False


@dataclass(frozen=True)
class Shown:
    """One value, and where it comes from."""

    name: str
    value: Any
    origin: str
    group: str

    @property
    def is_given(self) -> bool:
        return not self.origin.startswith(DEFAULT)


def take_switches(args: Sequence[str]) -> tuple[list[str], Switches]:
    """The tokens less `--show_config [all | json]` and `--dry_run`, and what these say."""
    show, dry_run = "", False
    for token, given in grouped(args):
        name = token.partition("=")[0].removeprefix("--").replace("-", "_")
        text = (token.partition("=")[2] or " ".join(given)).lower()
        if not token.startswith("--") or name.removeprefix("no_") not in _SWITCHES:
            continue
        if name == "show_config":
            if text not in _SHOWN:
                raise ConfigError(f"--show_config is {text!r}; write it alone, or with `all` or `json`.")
            show = _SHOWN[text]
        elif name == "no_show_config":
            show = ""
        else:
            if text not in ("", "true", "false") or (text and name.startswith("no_")):
                raise ConfigError(f"--dry_run is {text!r}; write it alone, or with true or false.")
            dry_run = text != "false" and name == "dry_run"
    return without_flags(args, {*_SWITCHES, "no_show_config", "no_dry_run"}), Switches(show, dry_run)


# ---- where values come from ------------------------------------------------------------------------------------------


def origins(args: Sequence[str], options: Options, values: Values) -> list[Shown]:
    """Every field of a command with its value and origin: the command line, a line of the file, the accelerate
    configuration, or its default."""
    known = index(options)
    line = read_command_line(args, known)
    given = set(line.values)
    keys = {name for name, _ in line.nested}
    in_file, lines = _file(line.config, known)
    dropped = replaced(in_file, line.values, given | {key.partition(".")[0] for key in keys})
    found = []
    for cls, items in options.items():
        for item in items:
            fields = values.get(cls, {})
            if item.name in given:
                origin = LINE
            elif nested := sorted(key.partition(".")[2] for key in keys if key.partition(".")[0] == item.name):
                base = f"{_place(line.config, lines, item.name)}, and " if item.name in in_file else ""
                origin = f"{base}{LINE} ({', '.join(nested)})"
            elif item.name in dropped:
                place = _place(line.config, lines, item.name)
                origin = f"{DEFAULT}; {place} gives way to --{dropped[item.name]} of the {LINE}"
            elif item.name in in_file:
                origin = _place(line.config, lines, item.name)
            else:
                origin = DEFAULT
            found.append(Shown(item.name, fields.get(item.name, item.default), origin, cls))
    return _with_preset(found)


def _file(path: str | None, known: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    if path is None:
        return {}, {}
    values = coerce_mapping(read_file(path), known, path)
    return values, key_lines(path)


def key_lines(path: str | Path) -> dict[str, int]:
    """The line of each key at the top of a YAML file, from 1, and of those of `env:` as `env.NAME`."""
    import yaml

    root = yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    found: dict[str, int] = {}
    for key, value in root.value if isinstance(root, yaml.MappingNode) else []:
        found[str(key.value).replace("-", "_")] = key.start_mark.line + 1
        if key.value == "env" and isinstance(value, yaml.MappingNode):
            found |= {f"env.{inner.value}": inner.start_mark.line + 1 for inner, _ in value.value}
    return found


def _place(path: str | None, lines: Mapping[str, int], name: str) -> str:
    # A key merged in by `<<` has no line of its own.
    return f"{path}:{lines[name]}" if name in lines else str(path)


def _with_preset(found: list[Shown]) -> list[Shown]:
    """The launch fields that nobody gave, as the accelerate configuration says them."""
    chosen = next((each.value for each in found if each.name == "accelerate_config"), None)
    if chosen is None:
        return found
    path = find_config(chosen)
    preset = read_config(path)
    return [
        Shown(each.name, preset[each.name], f"accelerate configuration {path.name}", each.group)
        if each.group == "LaunchArguments" and not each.is_given and preset.get(each.name) is not None
        else each
        for each in found
    ]


def environment(args: Sequence[str]) -> list[Shown]:
    """The variables that have a say, each from the file's `env:` or from the environment."""
    path = read_command_line(args, {}).config
    lines = key_lines(path) if path is not None else {}
    mapped = parse_yaml(Path(path).read_text(encoding="utf-8"), path) if path is not None else None
    names = list(map(str, (mapped or {}).get("env") or {}))
    around = [n for n in sorted(os.environ) if n.startswith(_PREFIXES) or n in _VARIABLES]
    shown = []
    for name in dict.fromkeys([*names, *around]):
        if name in (LAUNCHED, COMMAND):
            continue
        origin = f"`env:` of {_place(path, lines, f'env.{name}')}" if name in names else "environment variable"
        shown.append(Shown(name, os.environ.get(name, ""), origin, "environment"))
    return shown


# ---- printing --------------------------------------------------------------------------------------------------------


def show(args: Sequence[str], options: Options, values: Values, how: str) -> str:
    """What `--show_config` prints; secrets are masked. how: "given" (what differs from the defaults' own), "all",
    "json"."""
    fields, variables = origins(args, options, values), environment(args)
    if how == "json":
        rows = {
            name: [{"name": s.name, "value": _hidden(s), "origin": s.origin, "class": s.group} for s in shown]
            for name, shown in (("fields", fields), ("environment", variables))
        }
        return json.dumps(rows, indent=1, ensure_ascii=False, default=str)
    given = [each for each in fields if each.origin != DEFAULT]
    parts = [_table("Given", given)]
    if variables:
        parts.append(_table("Environment", variables))
    rest = [each for each in fields if each.origin == DEFAULT]
    if how == "all":
        for cls in options:
            parts.append(_table(f"Defaults of {cls}", [each for each in rest if each.group == cls]))
    else:
        parts.append(
            f"{len(rest)} fields keep their defaults; --show_config all prints them, --show_config json as data."
        )
    return "\n\n".join(part for part in parts if part)


def _table(title: str, rows: Sequence[Shown]) -> str:
    if not rows:
        return ""
    cells = [(each.name, _text(_hidden(each)), each.origin) for each in rows]
    name, value = (min(max(len(row[at]) for row in cells), (40, 60)[at]) for at in (0, 1))
    lines = (f"  {row[0]:<{name}}  {row[1]:<{value}}  {row[2]}".rstrip() for row in cells)
    return f"{title}\n{'─' * len(title)}\n" + "\n".join(lines)


def _hidden(shown: Shown) -> Any:
    if shown.value and is_secret(shown.name):
        return "***"
    return masked(shown.value)


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str) if not isinstance(value, str) else (value or '""')
