"""What was written, on the command line or in a file, as the value of a field's type.

The type decides, never the look of the text: `2e-5` is a number where a number is due, `no` a word where a word is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from posttrain.cli.schema import Option
from posttrain.errors import ConfigError, suggest

_TRUE, _FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}
_NONE = {"none", "null"}
_PHRASES = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "false": "false",
    "none": "none",
    "dict": 'a mapping such as {"key": "value"}',
    "mapping": 'a mapping such as {"key": "value"}',
    "any": "any value",
}


class _NoMatch(Exception):
    """The value is not of this kind."""


def coerce(option: Option, value: Any, where: str) -> Any:
    """Return `value` as the option's type, or say what was expected.   e.g. int | none: "64" -> 64, "none" -> None"""
    if option.const is not None and (value is True or str(value).lower() == "true"):
        return option.const
    for kind in sorted(option.kinds, key=_rank):
        try:
            result = _kind(kind, option, value, where)
        except _NoMatch:
            continue
        for item in result if isinstance(result, list) else [result]:
            if isinstance(item, (str, int)) and not isinstance(item, bool):
                _check_choice(option, item, where)
        return result
    hint = " Put quotes around it if it is meant as text." if _is_unquoted_text(option, value) else ""
    raise ConfigError(f"{where} is {_shown(value)}; expected {expected(option)}.{hint}")


def expected(option: Option) -> str:
    """What the option takes, in words."""
    kinds = [kind for kind in option.kinds if not (option.choices and kind == "str")]
    words = [f"one of {', '.join(map(str, option.choices))}"] if option.choices else []
    for kind in kinds:
        inner = kind.removeprefix("list[").removesuffix("]")
        words.append(_PHRASES[kind] if inner == kind else f"a list ({_PHRASES.get(inner, inner)} each)")
    return " or ".join(words)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _is_unquoted_text(option: Option, value: Any) -> bool:
    return isinstance(value, float) and "str" in option.kinds


def _check_choice(option: Option, value: Any, where: str) -> None:
    if option.choices and value not in option.choices:
        known = [str(choice) for choice in option.choices]
        raise ConfigError(f"{where} is {value!r}; expected {expected(option)}.{suggest(str(value), known)}")


# One function a kind. Each raises _NoMatch, so that `str | list[str] | none` tries them in turn.


def _kind(kind: str, option: Option, value: Any, where: str) -> Any:
    if kind.startswith("list["):
        return _list(kind[5:-1], option, value, where)
    if kind == "mapping":
        return nested(option.fields, _mapping(option, value, where), where)
    return _READ[kind](option, value, where)


def _none(option: Option, value: Any, where: str) -> None:
    is_word = isinstance(value, str) and value.lower() in _NONE
    # `report_to: none` is a value of that field, not its absence.
    if value is not None and not (is_word and value not in (option.default, *option.choices)):
        raise _NoMatch


def _false(option: Option, value: Any, where: str) -> bool:
    if value is not False and str(value).lower() != "false":
        raise _NoMatch
    return False


def _bool(option: Option, value: Any, where: str) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).lower() if isinstance(value, (str, int)) else ""
    beside_text = "str" in option.kinds
    if word in ({"true"} if beside_text else _TRUE):
        return True
    if word in ({"false"} if beside_text else _FALSE):
        return False
    raise _NoMatch


def _int(option: Option, value: Any, where: str) -> int:
    # Straight to int: a float holds no more than 53 bits.
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            return int(value)
        except ValueError:
            pass
    number = _float(option, value, where)
    if not number.is_integer():
        raise _NoMatch
    return int(number)


def _float(option: Option, value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise _NoMatch
    try:
        number = float(value)
    except ValueError:
        raise _NoMatch from None
    if math.isnan(number):
        raise _NoMatch
    return number


def _str(option: Option, value: Any, where: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    # A float has lost its text: 1e10 may have been a commit.
    if isinstance(value, (str, int)):
        return str(value)
    raise _NoMatch


def _mapping(option: Option, value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = _flow(value, where)
    if not isinstance(value, Mapping):
        raise _NoMatch
    return dict(value)


def _list(inner: str, option: Option, value: Any, where: str) -> list[Any]:
    if isinstance(value, str) and value.strip().startswith("[") and value.strip().endswith("]"):
        value = _flow(value, where)
    if isinstance(value, (list, tuple)):
        return [_kind(inner, option, item, f"{where}[{i}]") for i, item in enumerate(value)]
    if value is None or "str" in option.kinds:
        raise _NoMatch
    return [_kind(inner, option, value, where)]


def _any(option: Option, value: Any, where: str) -> Any:
    is_flow = isinstance(value, str) and value.lstrip()[:1] in {"{", "["}
    return _flow(value, where) if is_flow else value


def _flow(text: str, where: str) -> Any:
    """JSON, or YAML's inline form of it."""
    try:
        return json.loads(text)
    except ValueError:
        return parse_yaml(text, where)


def nested(options: Iterable[Option], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of a dataclass inside another, checked."""
    known = {option.name: option for option in options}
    for name in values:
        if name not in known:
            raise ConfigError(f"{where} has an unknown key {name!r}.{suggest(str(name), known)}")
    for name, option in known.items():
        if option.required and name not in values:
            raise ConfigError(f"{where} lacks `{name}`, which is required.")
    return {name: coerce(known[name], value, f"{where}.{name}") for name, value in values.items()}


_READ: dict[str, Callable[[Option, Any, str], Any]] = {
    "none": _none,
    "false": _false,
    "bool": _bool,
    "int": _int,
    "float": _float,
    "dict": _mapping,
    "str": _str,
    "any": _any,
}
# From the narrowest to the one that takes everything.
_ORDER = ["none", "false", "bool", "int", "float", "dict", "mapping", "list", "str", "any"]


def _rank(kind: str) -> int:
    return _ORDER.index(kind.partition("[")[0])


# YAML


def parse_yaml(text: str, where: str) -> Any:
    """Read YAML with the scalars of YAML 1.2: `2e-5` is a number, `no` is text, and no key may come twice."""
    import yaml

    try:
        return yaml.load(text, Loader=_loader())
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: this is not valid YAML: {' '.join(str(error).split())}") from error


@cache
def _loader() -> Any:
    import re

    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            keys = [key for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
            for key in (key for key in keys if isinstance(key, yaml.ScalarNode)):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} comes twice", key.start_mark)
                seen.add(key.value)
            return super().construct_mapping(node, deep=deep)

    number, power = r"[-+]?(?:0|[1-9][0-9]*)", r"[eE][-+]?[0-9]+"
    for tag, pattern, first in (
        ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
        ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
        ("int", number, "-+0123456789"),
        ("float", rf"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:{power})?|[-+]?[0-9]+{power}", "-+.0123456789"),
        ("merge", "<<", "<"),
    ):
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), list(first))
    return Loader
