"""`posttrain`: train a model, or say what is installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from posttrain import __version__
from posttrain.cli.commands import COMMANDS
from posttrain.cli.help import command_help
from posttrain.cli.parse import parse, read_command_line, read_file
from posttrain.cli.schema import Options, is_stale, live, locate, stored
from posttrain.errors import ConfigError, PosttrainError, suggest

TRACEBACK = "POSTTRAIN_TRACEBACK"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0, or 2 for an error whose text says what to change."""
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
    elif name in COMMANDS:
        _train(name, args[1:])
    else:
        known = [*COMMANDS, "env"]
        raise ConfigError(f"unknown command {name!r}; the commands are {', '.join(known)}.{suggest(name, known)}")
    return 0


def _train(name: str, args: list[str]) -> None:
    command = COMMANDS[name]
    if read_command_line(args, {}).wants_help:
        print(command_help(f"posttrain {name}", command.about, stored(name)))
        return
    values = parse(args, _options(name, args))
    locate(command.run)(values)


def _options(name: str, args: list[str]) -> Options:
    if not is_stale():
        return stored(name)
    # Reading the live classes imports torch, which must see the file's `env:` first.
    config = read_command_line(args, {}).config
    if config is not None:
        read_file(config)
    return live(name)


def overview() -> str:
    """What `posttrain --help` prints."""
    rows = [(name, command.about) for name, command in COMMANDS.items()]
    rows.append(("env", "Print the versions and the hardware, for a report of a problem."))
    lines = "\n".join(f"  {name:<8}{about}" for name, about in rows)
    return (
        f"posttrain {__version__}: post-training for language models\n\nusage: posttrain COMMAND [--config FILE] "
        f"[--field value ...]\n\n{lines}\n\nposttrain COMMAND --help lists the fields of a command.\n"
        f"Set {TRACEBACK}=1 for the traceback of an error."
    )


if __name__ == "__main__":
    sys.exit(main())
