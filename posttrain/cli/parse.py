"""A command line and a YAML file as the fields of some dataclasses. Defaults < file < command line."""

from __future__ import annotations

import os
import sys
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.cli.coerce import coerce, expected, parse_yaml
from posttrain.cli.help import command_help
from posttrain.cli.schema import Option, Options, describe, nested_class
from posttrain.errors import ConfigError, MissingExtraError, PosttrainError, suggest

RESERVED = ("config", "env", "help", "show_config", "dry_run")
# Two names of one setting: one on the command line replaces the other in the file.
_ALIASES = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
_ALIASES |= {new: old for old, new in _ALIASES.items()}
# Fields that decide the same thing, by the values with which they do. One on the command line replaces the others in
# the file; a file that sets two of them is left to the check that refuses it.
_ANY = object()
_RIVALS: tuple[dict[str, Any], ...] = (
    {"mixed_precision": _ANY, "bf16": _ANY},
    {"mixed_precision": _ANY, "fp16": _ANY},
    {"bf16": True, "fp16": True},
    {"load_in_4bit": True, "load_in_8bit": True},
    {"num_train_epochs": _ANY, "max_steps": _ANY},
)

Values = dict[str, dict[str, Any]]  # class name → the fields that were given


# The command line


@dataclass
class CommandLine:
    """What the tokens say.   e.g. --max-length 64 --config a.yaml -> values {"max_length": 64}, config "a.yaml" """

    values: dict[str, Any] = field(default_factory=dict)
    nested: list[tuple[str, Any]] = field(default_factory=list)  # e.g. --a.b=1 -> ("a.b", "1")
    config: str | None = None
    wants_help: bool = False
    unknown: list[str] = field(default_factory=list)  # flags nobody knows and what follows each


def index(options: Options) -> dict[str, Option]:
    """Every option by name."""
    known: dict[str, Option] = {}
    for cls, items in options.items():
        for item in items:
            if item.name in known or item.name in RESERVED:
                raise ConfigError(f"`{cls}.{item.name}` cannot be a flag: the name is taken.")
            known[item.name] = item
    return known


def read_command_line(args: Sequence[str], known: Mapping[str, Option]) -> CommandLine:
    """Read the tokens, each value coerced to its option's type."""
    line = CommandLine()
    for token, given in grouped(args):
        if token in ("-h", "--help"):
            line.wants_help = True
        elif not token.startswith("--") or token == "--":
            line.unknown += [token, *given]
        else:
            flag, equals, inline = token.partition("=")
            _read_flag(line, flag, [inline] if equals else given, known)
            if equals and given:
                raise ConfigError(f"{given[0]!r} follows {token}, which already has its value.")
    return line


def grouped(args: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with what follows it.   e.g. --a 1 2 --b=3 -> ("--a", ["1", "2"]), ("--b=3", [])"""
    at = 0
    while at < len(args):
        end = next((i for i in range(at + 1, len(args)) if args[i].startswith("--") or args[i] == "-h"), len(args))
        yield args[at], list(args[at + 1 : end])
        at = end


def flag_name(token: str) -> str:
    """e.g. --num-processes=2 -> num_processes, --model-init-kwargs.my-key=1 -> model_init_kwargs.my-key"""
    name, dot, key = token.partition("=")[0].removeprefix("--").partition(".")
    return name.replace("-", "_") + dot + key


def without_flags(args: Sequence[str], names: Collection[str]) -> list[str]:
    """The tokens, less the flags named and their values."""
    kept = ([token, *given] for token, given in grouped(args) if flag_name(token) not in names)
    return [token for group in kept for token in group]


def _read_flag(line: CommandLine, flag: str, given: list[str], known: Mapping[str, Option]) -> None:
    name = flag_name(flag)
    positive = name.removeprefix("no_")
    if name == "config":
        if line.config is not None:
            raise ConfigError(f"--config is given twice: {line.config!r} and {' '.join(given)!r}.")
        line.config = _one(flag, given, "the path of a YAML file")
    elif "." in name and name.partition(".")[0] in known:
        line.nested.append((name, _nested_value(known[name.partition(".")[0]], flag, given)))
    elif name in known:
        line.values[name] = _value(known[name], flag, given, line.values.get(name))
    elif positive != name and positive in known and "bool" in known[positive].kinds:
        if given:
            raise ConfigError(f"{flag} takes no value, and {given[0]!r} follows it.")
        line.values[positive] = False
    else:
        line.unknown += [flag, *given]


def _nested_value(option: Option, flag: str, given: list[str]) -> Any:
    """A value inside a mapping has no type of its own unless the mapping is a dataclass: it is read as YAML."""
    if not {"dict", "mapping"} & set(option.kinds):
        raise ConfigError(f"{flag}: `{option.name}` is no mapping, so it has no keys; it takes {expected(option)}.")
    if not all(flag.partition(".")[2].split(".")):
        raise ConfigError(f"{flag}: a key is empty; write --{option.name}.key=value.")
    text = _one(flag, given, "a value") if given else "true"
    return text if option.fields else parse_yaml(text, f"`{flag}`")


def _value(option: Option, flag: str, given: list[str], before: Any) -> Any:
    is_list = any(kind.startswith("list[") for kind in option.kinds)
    if not given and "bool" in option.kinds:
        return True
    if not given and option.const is not None:
        return option.const
    if not is_list or len(given) == 1:
        value = coerce(option, _one(flag, given, "a value"), f"`{flag}`")
    else:
        if not given:
            raise ConfigError(f"{flag} needs one or more values.")
        value = coerce(option, given, f"`{flag}`")
    if is_list and before is not None:
        return [*_as_list(before), *_as_list(value)]
    return value


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _one(flag: str, given: list[str], what: str) -> str:
    if not given:
        raise ConfigError(f"{flag} needs {what}.")
    if len(given) > 1:
        raise ConfigError(f"{given[1]!r} follows {flag} {given[0]}, and that flag takes one value.")
    return given[0]


def refuse_unknown(tokens: Sequence[str], known: Iterable[str]) -> None:
    """Raise for the first token nobody knows."""
    if not tokens:
        return
    flag = tokens[0]
    if not flag.startswith("--"):
        raise ConfigError(f"command line: unexpected argument {flag!r}; flags start with --.")
    flags = [f"--{name}" for name in (*known, "config", "help")]
    name = flag.replace("-", "_").replace("__", "--", 1)
    hint = suggest(name, flags) or suggest(name.replace("--no_", "--", 1), flags)
    raise ConfigError(f"command line: unknown flag {flag}.{hint}")


# The file


def read_file(path: str | Path) -> dict[str, Any]:
    """Read a YAML mapping, and put its `env:` in the environment, before anything heavy is imported."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: the file cannot be read ({error}).") from error
    values = parse_yaml(text, str(path))
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{path}: expected a mapping from field names to values, such as `max_length: 1024`.")
    environment = values.pop("env", None) or {}
    if not isinstance(environment, dict):
        raise ConfigError(f"{path}: `env` is {environment!r}; expected a mapping from variables to values.")
    for name, value in environment.items():
        if value is None or isinstance(value, (dict, list)):
            raise ConfigError(f"{path}: `env.{name}` is {value!r}; expected text or a number.")
        os.environ[str(name)] = str(value).lower() if isinstance(value, bool) else str(value)
    return values


def coerce_mapping(values: Mapping[str, Any], known: Mapping[str, Option], source: str) -> dict[str, Any]:
    """Coerce the values of a file or a dict; an unknown key is an error."""
    named: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name in named:
            raise ConfigError(f"{source}: {name!r} comes twice, with dashes and with underscores; keep one.")
        named[name] = value
    for name in named:
        if name in ("show_config", "dry_run"):
            raise ConfigError(f"{source}: {name!r} belongs on the command line: write --{name}.")
        if name not in known:
            raise ConfigError(f"{source}: unknown key {name!r}.{suggest(name, known)}")
    return {name: coerce(known[name], value, f"{source}: `{name}`") for name, value in named.items()}


# Both


def merge(from_file: Mapping[str, Any], line: CommandLine, known: Mapping[str, Option]) -> dict[str, Any]:
    """The command line wins, also where it says what the default is. `--a.b=1` sets one key and keeps the others."""
    given = {*line.values, *(name.partition(".")[0] for name, _ in line.nested)}
    dropped = replaced(from_file, line.values, given)
    merged = {**{name: value for name, value in from_file.items() if name not in dropped}, **line.values}
    for path, value in line.nested:
        name, _, rest = path.partition(".")
        merged[name] = coerce(known[name], _with_key(merged.get(name), rest.split("."), value, name), f"`--{path}`")
    return merged


def replaced(from_file: Mapping[str, Any], from_line: Mapping[str, Any], given: Collection[str]) -> dict[str, str]:
    """The fields of the file that another field of the command line replaces, and which one does."""
    found = {_ALIASES[name]: name for name in given if name in _ALIASES and _ALIASES[name] not in given}
    for rivals in _RIVALS:
        for name, deciding in rivals.items():
            if name not in from_line or (deciding is not _ANY and from_line[name] != deciding):
                continue
            found |= {other: name for other in rivals if other not in given}
    return {name: by for name, by in found.items() if name in from_file}


def _with_key(mapping: Any, keys: Sequence[str], value: Any, name: str) -> dict[str, Any]:
    """A copy of the mapping with one value in it set."""
    if mapping is not None and not isinstance(mapping, Mapping):
        raise ConfigError(f"`{name}` is {mapping!r}, which has no keys; give it as a mapping, or leave --{name}.… out.")
    inner = value if len(keys) == 1 else _with_key((mapping or {}).get(keys[0]), keys[1:], value, f"{name}.{keys[0]}")
    return {**(mapping or {}), keys[0]: inner}


def split(values: Mapping[str, Any], options: Options) -> Values:
    """Give each class its fields; a required one that nobody gave is an error."""
    for item in (item for items in options.values() for item in items):
        if item.required and item.name not in values:
            raise ConfigError(f"`{item.name}` is required: give --{item.name}, or `{item.name}:` in the --config file.")
    return {
        cls: {item.name: values[item.name] for item in items if item.name in values} for cls, items in options.items()
    }


def parse(args: Sequence[str], options: Options) -> Values:
    """What a command line says, the file it names included."""
    known = index(options)
    line = read_command_line(args, known)
    refuse_unknown(line.unknown, known)
    from_file = coerce_mapping(read_file(line.config), known, line.config) if line.config is not None else {}
    return split(merge(from_file, line, known), options)


def construct(cls: type, values: Mapping[str, Any]) -> Any:
    """Make the dataclass, nested ones included. What it refuses is a ConfigError."""
    hints = typing.get_type_hints(cls)
    ready = {name: _nested_instances(nested_class(hints[name]), value) for name, value in values.items()}
    try:
        return cls(**ready)
    except PosttrainError:
        raise
    except ImportError as error:
        raise MissingExtraError(f"{cls.__name__}: {error}") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{cls.__name__}: {error}") from error


def _nested_instances(inner: Any, value: Any) -> Any:
    if inner is None:
        return value
    if isinstance(value, list):
        return [_nested_instances(inner, item) for item in value]
    return construct(inner, value) if isinstance(value, dict) else value


class TrlParser:
    """Turns a command line, a YAML file or a dict into instances of dataclasses, for scripts written for TRL.

    e.g. script_args, training_args = TrlParser((ScriptArguments, SFTConfig)).parse_args_and_config()
    """

    def __init__(
        self, dataclass_types: type | Iterable[type] | None = None, prog: str = "", description: str = ""
    ) -> None:
        types = dataclass_types or ()
        self.dataclass_types = [types] if isinstance(types, type) else list(types)
        self.prog, self.description = prog, description
        self._defaults: dict[str, Any] = {}
        self.options: Options = {cls.__name__: describe(cls) for cls in self.dataclass_types}
        self._known = index(self.options)

    def parse_args_and_config(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """Parse the command line and the file it names in `--config`.

        With `return_remaining_strings` what nobody knows is returned last: one list, or with
        `separate_remaining_strings` two, of the file and of the command line. With `fail_with_unknown_args=False` an
        unknown key of the file is passed over.
        """
        line = self._read(args)
        from_file = read_file(line.config) if line.config is not None else {}
        extra = {name: value for name, value in from_file.items() if name.replace("-", "_") not in self._known}
        if return_remaining_strings or not fail_with_unknown_args:
            from_file = {name: value for name, value in from_file.items() if name not in extra}
        ready = self._build(merge(coerce_mapping(from_file, self._known, str(line.config)), line, self._known))
        if not return_remaining_strings:
            refuse_unknown(line.unknown, self._known)
            return ready
        remaining = [text for name, value in extra.items() for text in (f"--{name}", str(value))]
        if separate_remaining_strings:
            return (*ready, remaining, line.unknown)
        return (*ready, remaining + line.unknown)

    def parse_args_into_dataclasses(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        look_for_args_file: bool = True,
        args_filename: str | None = None,
        args_file_flag: str | None = None,
    ) -> tuple[Any, ...]:
        """As `parse_args_and_config`. Files of arguments are not read: `--config` names the one file there is."""
        for name, value in (("args_filename", args_filename), ("args_file_flag", args_file_flag)):
            if value is not None:
                raise ConfigError(f"`{name}` is {value!r}; files of arguments are not read: use --config and YAML.")
        return self.parse_args_and_config(args, return_remaining_strings)

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        """Take values as defaults, below the file and the command line. Returns what no dataclass has.

        e.g. max_length=64, other=1 -> ["--other", "1"]
        """
        known = {name: value for name, value in kwargs.items() if name in self._known}
        self._defaults |= coerce_mapping(known, self._known, "set_defaults_with_config")
        return [text for name, value in kwargs.items() if name not in known for text in (f"--{name}", str(value))]

    def add_argument(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(f"TrlParser.add_argument({args[0] if args else ''!r}): add a field to a dataclass instead.")

    def add_subparsers(self, **kwargs: Any) -> None:
        raise ConfigError("TrlParser.add_subparsers is not supported; make one TrlParser for each command.")

    def parse_dict(self, args: Mapping[str, Any], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Make the dataclasses from a dict."""
        if allow_extra_keys:
            args = {name: value for name, value in args.items() if name.replace("-", "_") in self._known}
        return self._build(coerce_mapping(args, self._known, "dict"))

    def parse_yaml_file(self, yaml_file: str | Path, allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Make the dataclasses from a YAML or JSON file alone."""
        values = read_file(yaml_file)
        if allow_extra_keys:
            values = {name: value for name, value in values.items() if name.replace("-", "_") in self._known}
        return self._build(coerce_mapping(values, self._known, str(yaml_file)))

    parse_json_file = parse_yaml_file

    def _read(self, args: Sequence[str] | None) -> CommandLine:
        line = read_command_line(sys.argv[1:] if args is None else args, self._known)
        if line.wants_help:
            print(command_help(self.prog or Path(sys.argv[0]).name, self.description, self.options))
            raise SystemExit(0)
        return line

    def _build(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        parts = split({**self._defaults, **values}, self.options)
        return tuple(construct(cls, parts[cls.__name__]) for cls in self.dataclass_types)
