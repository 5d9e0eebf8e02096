"""Every flag of every command as data, read from the dataclasses and kept in `schema.json`.

The file is what lets `posttrain sft --help`, and the report of a mistyped flag, do without importing torch. It is
written by `python -m posttrain.cli.schema`, and a test compares it with the live classes.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import itertools
import json
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, Union

from posttrain.cli.commands import COMMANDS

FILE = Path(__file__).with_name("schema.json")
_MAY_BE_A_PATH = {"accelerator_config", "deepspeed", "fsdp_config"}
_SCALARS = {bool: "bool", int: "int", float: "float", str: "str", Path: "str", types.NoneType: "none", Any: "any"}
_LISTS = (list, tuple, set, frozenset, Sequence, Iterable)
_MAPPINGS = (dict, Mapping)


@dataclass(frozen=True)
class Option:
    """One field.   e.g. Option("max_length", "int | none", 1024, group="SFTConfig", help="Longest sequence …")"""

    name: str
    type: str  # kinds joined by " | ": bool int float str false none dict mapping any list[…]
    default: Any = None
    required: bool = False
    group: str = ""  # class whose body holds the field
    help: str = ""
    choices: tuple[Any, ...] = ()
    const: Any = None  # value of the bare flag, where it takes one and is no bool
    fields: tuple[Option, ...] = ()  # of a mapping that is itself a dataclass

    @property
    def kinds(self) -> list[str]:
        return self.type.split(" | ")

    @staticmethod
    def from_json(value: dict[str, Any]) -> Option:
        nested = tuple(Option.from_json(item) for item in value.get("fields", ()))
        return Option(**{**value, "choices": tuple(value.get("choices", ())), "fields": nested})

    def to_json(self) -> dict[str, Any]:
        keep = {"name", "type", "default", "group", "help"}
        return {key: value for key, value in asdict(self).items() if key in keep or value not in (None, False, ())}


# From dataclasses


def describe(cls: type) -> list[Option]:
    """The fields of a dataclass, in order."""
    hints = typing.get_type_hints(cls)
    return [_option(cls, item, hints[item.name]) for item in fields(cls) if item.init]


def _option(cls: type, item: Field[Any], hint: Any) -> Option:
    kinds, choices = _kinds(hint)
    # Text in these fields means a JSON mapping: transformers' own list of them, less those that may name a file.
    if item.name in set(getattr(cls, "_VALID_DICT_FIELDS", ())) - _MAY_BE_A_PATH:
        kinds = [kind for kind in kinds if kind != "str"]
    const: Any = item.metadata.get("const")
    nested = nested_class(hint)
    return Option(
        name=item.name,
        type=" | ".join(sorted(kinds, key=lambda kind: kind == "none")),
        default=_default(item),
        required=item.default is MISSING and item.default_factory is MISSING,
        group=_owner(cls, item.name).__name__,
        help=" ".join(_help(cls, item.name).split()),
        choices=choices or tuple(item.metadata.get("choices") or ()),
        const=None if "bool" in kinds else True if const == "True" else const,
        fields=tuple(describe(nested)) if nested else (),
    )


def _kinds(hint: Any) -> tuple[list[str], tuple[Any, ...]]:
    """The kinds a type hint takes, and the values it is limited to."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        parts = [_kinds(arg) for arg in args]
        kinds = list(dict.fromkeys(kind for part, _ in parts for kind in part))
        enums = tuple(value for arg, (_, values) in zip(args, parts, strict=True) if _is_enum(arg) for value in values)
        values = tuple(value for _, values in parts for value in values)
        # `Enum | str` is how transformers spells an enum; a literal or a list beside plain text limits nothing.
        return kinds, enums or (() if str in args else values)
    if origin is Literal:
        kinds = dict.fromkeys("false" if value is False else _SCALARS.get(type(value), "any") for value in args)
        return list(kinds), tuple(value for value in args if value is not None and value is not False)
    if _is_enum(hint):
        return ["str"], tuple(item.value for item in hint)
    if hint in _LISTS or origin in _LISTS:
        kinds, choices = _kinds(args[0]) if args else (["str"], ())
        return [f"list[{kinds[0] if len(kinds) == 1 else 'any'}]"], choices
    if hint in _MAPPINGS or origin in _MAPPINGS:
        return ["dict"], ()
    if is_dataclass(hint):
        return ["mapping"], ()
    return [_SCALARS.get(hint, "any")], ()


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, enum.Enum)


def nested_class(hint: Any) -> Any:
    """The dataclass inside a hint such as `list[DatasetConfig]` or `X | None`, or None."""
    if isinstance(hint, type) and is_dataclass(hint):
        return hint
    return next(filter(None, map(nested_class, typing.get_args(hint))), None)


def _default(item: Field[Any]) -> Any:
    if item.default_factory is not MISSING:
        value = item.default_factory()
    else:
        value = None if item.default is MISSING else item.default
    value = value.value if isinstance(value, enum.Enum) else value
    return json.loads(json.dumps(value, default=str))


def _owner(cls: type, name: str) -> type:
    return next(base for base in cls.__mro__ if name in inspect.get_annotations(base))


def _help(cls: type, name: str) -> str:
    """The text under the field, from the nearest class that has one; transformers keeps it in the metadata."""
    for base in cls.__mro__:
        if name not in inspect.get_annotations(base):
            continue
        known = getattr(base, "__dataclass_fields__", {}).get(name)
        if text := (known.metadata.get("help") if known else None) or _texts(base).get(name):
            return text
    return ""


@cache
def _texts(cls: type) -> dict[str, str]:
    """The string literal under each field of a class body."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):  # a class typed at a prompt has no source
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    return {
        field.target.id: text.value.value
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


# The file

Options = dict[str, list[Option]]  # class name → its fields


def locate(place: str) -> Any:
    """Import `module:name`."""
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)


def live(command: str) -> Options:
    """The options of a command, read from its classes. Imports torch and transformers."""
    classes = [locate(place) for place in COMMANDS[command].configs]
    return {cls.__name__: describe(cls) for cls in classes}


@cache
def _stored() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def stored(command: str) -> Options:
    """The options of a command, read from the file."""
    return {name: [Option.from_json(item) for item in items] for name, items in _stored()[command].items()}


def is_stale() -> bool:
    """Whether another version of transformers is installed than the one whose fields the file holds."""
    try:
        return version("transformers") != _stored()["transformers"]
    except PackageNotFoundError:
        return False


def render() -> str:
    """The text of `schema.json`: one field a line, so that a diff reads."""
    commands = {command: live(command) for command in COMMANDS}
    parts = [f'"transformers": {json.dumps(version("transformers"))}']
    for command, options in commands.items():
        classes = []
        for name, items in options.items():
            lines = ",\n   ".join(json.dumps(item.to_json(), ensure_ascii=False) for item in items)
            classes.append(f'  "{name}": [\n   {lines}\n  ]')
        parts.append(f'"{command}": {{\n' + ",\n".join(classes) + "\n }")
    return "{\n " + ",\n ".join(parts) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")
    print(f"wrote {FILE}")
