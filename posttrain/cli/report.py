"""`posttrain report RUN…`: the folders of runs → one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from posttrain.errors import ConfigError

USAGE = """usage: posttrain report RUN [RUN ...] [--html FILE]

Write the curves, the configuration, the data and the events of runs as one HTML page that needs nothing else. RUN is an
output_dir, or a checkpoint in one. Several runs are drawn over each other. --html: where to, report.html in the first
run's folder if it is left out."""


def main(args: Sequence[str]) -> None:
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return
    runs, target = _read(args)
    from posttrain.report.page import write_page
    from posttrain.report.run import page
    from posttrain.report.runlog import read_run

    out = target or str(Path(runs[0]).expanduser() / "report.html")
    write_page(out, page([read_run(run) for run in runs]), "html")
    print(f"wrote {out}")


def _read(args: Sequence[str]) -> tuple[list[str], str | None]:
    runs: list[str] = []
    target: str | None = None
    rest = iter(args)
    for token in rest:
        flag, equals, value = token.partition("=")
        if flag == "--html":
            target = value if equals else next(rest, "")
            if not target:
                raise ConfigError("--html needs the path of a file.")
        elif token.startswith("-"):
            raise ConfigError(f"posttrain report: unknown flag {token}; it takes runs and --html FILE.")
        else:
            runs.append(token)
    if not runs:
        raise ConfigError("posttrain report needs the folder of a run.")
    return runs, target
