"""The file of a run that alone starts it again: what the command line, the file and the hardware decided."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.cli.origins import Shown, origins
from posttrain.cli.parse import parse, read_command_line
from posttrain.cli.schema import is_stale, live, stored
from posttrain.trainer.masking import is_secret, masked, masked_command

_PATHS = ("model_name_or_path", "dataset_name", "output_dir", "chat_template_path", "accelerate_config", "deepspeed")
# Of where a run was, not of what it was: another run would not find it, or go on instead of starting.
_LEFT_OUT = {"resume_from_checkpoint": "the record is of the run from its start"}


def resolved(command: Sequence[str], decided: Mapping[str, Any]) -> str:
    """`resolved_config.yaml` of a command: YAML of the fields that were given, each with its origin, and then the
    defaults as comments. Paths that exist are absolute; secrets are left out.

    command: name and arguments, as in ["sft", "--config", "run.yaml"]
    decided: fields whose default is chosen by the hardware, with what was chosen
    """
    name, args = command[0], list(command[1:])
    options = live(name) if is_stale() else stored(name)
    values = parse(args, options)
    found = origins(args, options, values)
    precise = values.get("LaunchArguments", {}).get("mixed_precision") is not None
    names = {each.name for each in found if each.is_given}
    lines = [f"# posttrain {' '.join(masked_command(command))}", *_environment(args)]
    for each in found:
        if each.name in decided and (precise or (each.name not in names and each.value is None)):
            by = "`mixed_precision`" if precise else "the hardware"
            lines += _entry(each.name, decided[each.name], f"decided by {by}")
        elif each.is_given and not (precise and each.name == "mixed_precision"):
            lines += _given(each)
    lines.append("# Defaults:")
    rest = (each for each in found if not each.is_given and each.name not in decided)
    lines += [f"# {each.name}: {json.dumps(each.value, default=str, ensure_ascii=False)}" for each in rest]
    return "\n".join(lines) + "\n"


def _environment(args: Sequence[str]) -> list[str]:
    from posttrain.cli.coerce import parse_yaml

    path = read_command_line(args, {}).config
    mapping = (parse_yaml(Path(path).read_text(encoding="utf-8"), path) or {}).get("env") if path else None
    if not mapping:
        return []
    # A number that YAML would read otherwise keeps its text, as the environment has it.
    texts = {n: str(v).lower() if isinstance(v, bool) else str(v) for n, v in mapping.items()}
    kept = {n: v for n, v in texts.items() if not is_secret(n) and masked(v) == v}
    left = [f"# env.{n}: left out, it is a secret" for n in texts if n not in kept]
    return [*left, *(["env:", *(f"  {n}: {_quoted(v)}" for n, v in kept.items())] if kept else [])]


def _given(each: Shown) -> list[str]:
    if each.name in _LEFT_OUT:
        return [f"# {each.name}: left out, {_LEFT_OUT[each.name]}"]
    value = _absolute(each.name, each.value)
    if (value and is_secret(each.name)) or masked(value) != value:
        if not isinstance(value, dict):
            return [f"# {each.name}: left out, it is a secret"]
        value = {key: item for key, item in value.items() if not is_secret(str(key)) and masked(item) == item}
    return _entry(each.name, value, each.origin)


def _entry(name: str, value: Any, origin: str) -> list[str]:
    return [f"{name}: {_quoted(value)}  # {' '.join(origin.split())}"]


def _quoted(value: Any) -> str:
    """JSON, which is YAML on one line. The parser of the files reads 1e-05 as the number it is."""
    return json.dumps(value, ensure_ascii=False)


def _absolute(name: str, value: Any) -> Any:
    if name == "output_dir" and value:
        return str(Path(value).expanduser().resolve())
    if name in _PATHS and isinstance(value, str) and Path(value).expanduser().exists():
        return str(Path(value).expanduser().resolve())
    if name == "datasets" and isinstance(value, list):
        return [
            {key: _absolute("dataset_name", item) if key == "path" else item for key, item in source.items()}
            if isinstance(source, dict)
            else source
            for source in value
        ]
    return value
