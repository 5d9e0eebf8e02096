"""Which method a command line is for, of a command that takes the fields of any: what is said, else what fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, get_args

from posttrain.cli.parse import Values, flag_name, index, parse, read_command_line, read_file
from posttrain.cli.run import config_of
from posttrain.cli.schema import Options
from posttrain.errors import ConfigError

Method = Literal["sft", "dpo", "kto", "reward", "prm"]
METHODS: tuple[Method, ...] = get_args(Method)
_SFT = config_of("sft")
_LOOKED_AT = 100  # rows; a column of the first may be empty by mistake
# The columns that hold something → the methods that read such rows, the usual one first. The first that fits.
_READ = (
    (("prompt", "completions", "labels"), ("prm",)),
    (("prompt", "completion", "label"), ("kto", "sft")),
    (("prompt_ids", "completion_ids"), ("kto",)),
    (("chosen", "rejected"), ("dpo", "reward", "kto", "sft")),
    (("prompt_ids", "chosen_ids", "rejected_ids"), ("dpo", "reward")),
    (("input_ids", "labels"), ("sft", "prm")),
    ((), ("sft",)),
)


@dataclass
class MethodArguments:
    """Which method the fields are of."""

    method: Method | None = None
    """Method whose fields are given. Unset: the one that has them all and reads rows with such columns."""


def options_of(method: str, command: Options, of_method: Callable[[str], Options]) -> Options:
    """The options of a command with those of the method in the place of SFT's. of_method: the options of
    `posttrain sft`, `posttrain dpo`, …"""
    config = config_of(method)
    return {**{name: items for name, items in command.items() if name != _SFT}, config: of_method(method)[config]}


def candidates(args: Sequence[str], command: Options, of_method: Callable[[str], Options]) -> list[Options]:
    """The command's options for each method that has every field given; where none has, for those that lack the
    fewest."""
    line = read_command_line(args, index({name: items for name, items in command.items() if name != _SFT}))
    given = {**(read_file(line.config) if line.config is not None else {}), **line.values}
    named = given.get("method")
    options = {method: options_of(method, command, of_method) for method in METHODS}
    if named in options:
        return [options[named]]
    flags = [flag_name(token).partition(".")[0] for token in args if token.startswith("--")]
    names = {name.replace("-", "_") for name in given} | {*flags} - {"config", "help"}
    missing = {
        method: sum(name not in known and name.removeprefix("no_") not in known for name in names)
        for method, known in ((method, index(each)) for method, each in options.items())
    }
    return [options[method] for method in METHODS if missing[method] == min(missing.values())]


def parse_any(args: Sequence[str], choices: Sequence[Options]) -> Values:
    """The values of the candidates together: each has its own class. One whose fields do not take what is given is left
    out. Raises the first's `ConfigError` where all are."""
    values: Values = {}
    error: ConfigError | None = None
    for options in choices:
        try:
            values |= parse(args, options)
        except ConfigError as refused:
            error = error or refused
    if not values and error is not None:
        raise error
    return values


def possible(values: Values) -> list[str]:
    """The methods that the values may be for."""
    return [method for method in METHODS if config_of(method) in values]


def choose(values: Values, rows: Any) -> str:
    """The method, by the columns of a set. Raises `ConfigError` where no method that has the fields reads such rows."""
    methods = possible(values)
    if len(methods) == 1:
        return methods[0]
    held = {name for row in islice(iter(rows), _LOOKED_AT) for name, value in row.items() if value is not None}
    read = next(readers for columns, readers in _READ if held.issuperset(columns))
    for method in read:
        if method in methods:
            return method
    raise ConfigError(
        f"rows with the columns {sorted(held)} are read by {' or '.join(read)}, and the fields given are of "
        f"{' or '.join(methods)}; name the method with --method."
    )
