"""`posttrain`: train a model, or say what is installed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from posttrain import __version__
from posttrain.cli import launch
from posttrain.cli.commands import COMMANDS
from posttrain.cli.help import command_help
from posttrain.cli.method import candidates, parse_any
from posttrain.cli.origins import show, take_switches
from posttrain.cli.parse import (
    Values,
    coerce_mapping,
    flag_name,
    merge,
    parse,
    read_command_line,
    read_file,
    without_flags,
)
from posttrain.cli.schema import Options, is_stale, live, locate, stored
from posttrain.errors import ConfigError, PosttrainError, suggest

TRACEBACK = "POSTTRAIN_TRACEBACK"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0, 2 for an error whose text says what to change, or what a launched
    process ended with."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(args)
    except PosttrainError as error:
        if os.environ.get(TRACEBACK, "0") not in ("", "0"):
            raise
        rank = os.environ.get("RANK", "0")
        prefix = "posttrain: error:" if rank == "0" else f"posttrain: error: [rank {rank}]"
        print(prefix, " ".join(str(error).split()), file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Python flushes stdout once more at exit: give it somewhere to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("posttrain: interrupted", file=sys.stderr)
        return 130


def _dispatch(args: list[str]) -> int:
    name = args[0] if args else "--help"
    if name in ("-h", "--help", "help"):
        print(overview())
    elif name in ("-V", "--version", "version"):
        print(f"posttrain {__version__}")
    elif name == "env":
        from posttrain.cli.env import report

        if args[1:] in (["-h"], ["--help"]):
            print("usage: posttrain env\n\nPrint the versions and the hardware, for a report of a problem.")
            return 0
        if args[1:]:
            raise ConfigError(f"posttrain env takes no arguments, and {args[1]!r} follows it.")
        print(report())
    elif name == "report":
        from posttrain.cli.report import main as write_report

        write_report(args[1:])
    elif name in COMMANDS:
        return _train(name, args[1:])
    else:
        known = [*COMMANDS, "env", "report"]
        raise ConfigError(f"unknown command {name!r}; the commands are {', '.join(known)}.{suggest(name, known)}")
    return 0


def _train(name: str, args: list[str]) -> int:
    command = COMMANDS[name]
    args, switches = take_switches(args)
    if switches.dry_run and not command.dry_run:
        raise ConfigError(f"posttrain {name} has no --dry_run.")
    line = read_command_line(args, {})
    if line.wants_help:
        known = candidates(args, stored(name), stored)[0] if command.any_method else stored(name)
        print(command_help(f"posttrain {name}", command.about, known))
        return 0
    _refuse_launcher_flags(name, line.unknown)
    flags = [flag_name(token) for token in line.unknown if token.startswith("--")]
    on_the_line = [flag for flag in flags if flag in launch.OPTIONS]
    # Which processes run it is known from our own fields: were the file of fields stale, reading it anew imports torch.
    asked = _launch_values(name, args)
    if switches.show:
        options = _choices(name, args)[0]
        print(show(args, options, parse(args, options), switches.show))
        return 0
    if switches.dry_run:
        options = _choices(name, args)
        _check_launch(asked)
        locate(command.dry_run)(_values(args, options))
        return 0
    if launch.is_asked_for(asked, on_the_line):
        if not is_stale():
            values = _values(args, _choices(name, args))
            if command.check:
                locate(command.check)(values)
        os.environ[launch.COMMAND] = json.dumps([name, *args])
        return launch.launch(name, without_flags(args, launch.OPTIONS), asked)
    _run(name, args)
    return 0


def _run(name: str, args: list[str]) -> None:
    """Run the command here; what it records of the run is the line its user wrote, launch flags included."""
    values = _values(args, _choices(name, args))
    is_ours = launch.LAUNCHED not in os.environ or launch.COMMAND not in os.environ
    if is_ours:
        os.environ[launch.COMMAND] = json.dumps([name, *args])
    try:
        locate(COMMANDS[name].run)(values)
    finally:
        if is_ours:
            del os.environ[launch.COMMAND]


def _check_launch(asked: dict[str, Any]) -> None:
    """Refuse processes that could not be started, without starting them."""
    chosen = asked.get("accelerate_config")
    launch.check(asked, launch.read_config(launch.find_config(chosen)) if chosen is not None else {})


def _values(args: list[str], choices: list[Options]) -> Values:
    values = parse_any(args, choices)
    asked = values.pop("LaunchArguments", {})
    for config in (list(options)[-1] for options in choices):
        if config in values:
            launch.choose_precision(asked, values[config])
    return values


def _launch_values(name: str, args: list[str]) -> dict[str, Any]:
    """The launch fields of the command line and the file; empty for a command that has none."""
    options = stored(name).get("LaunchArguments", [])
    known = {option.name: option for option in options if option.name in launch.OPTIONS}
    line = read_command_line(args, known)
    from_file = read_file(line.config) if known and line.config is not None else {}
    named = {key: value for key, value in from_file.items() if key.replace("-", "_") in known}
    merged = merge(coerce_mapping(named, known, str(line.config)), line, known)
    return {key: value for key, value in merged.items() if value is not None}


def _refuse_launcher_flags(name: str, tokens: list[str]) -> None:
    known = {option.name for items in stored(name).values() for option in items}
    for token in tokens:
        flag = flag_name(token)
        if token.startswith("--") and flag in launch.SPELT_HERE and flag not in known:
            raise ConfigError(f"unknown flag {token}; it belongs to the launcher: write {launch.SPELT_HERE[flag]}.")


def _choices(name: str, args: list[str]) -> list[Options]:
    """The options of the command: of one that takes the fields of any method, those of each that may be meant."""
    read = _reader_of_options(args)
    return candidates(args, read(name), read) if COMMANDS[name].any_method else [read(name)]


def _reader_of_options(args: list[str]) -> Callable[[str], Options]:
    if not is_stale():
        return stored
    # Reading the live classes imports torch, which must see the file's `env:` first.
    config = read_command_line(args, {}).config
    if config is not None:
        read_file(config)
    return live


def overview() -> str:
    """What `posttrain --help` prints."""
    rows = [(name, command.about) for name, command in COMMANDS.items()]
    rows.append(("report", "Write the curves and the configuration of runs as one HTML page."))
    rows.append(("env", "Print the versions and the hardware, for a report of a problem."))
    lines = "\n".join(f"  {name:<8}{about}" for name, about in rows)
    return (
        f"posttrain {__version__}: post-training for language models\n\nusage: posttrain COMMAND [--config FILE] "
        f"[--field value ...]\n\n{lines}\n\nposttrain COMMAND --help lists the fields of a command.\n"
        "posttrain COMMAND --num_processes N runs it in N processes.\n"
        f"Set {TRACEBACK}=1 for the traceback of an error."
    )


if __name__ == "__main__":
    sys.exit(main())
