"""Less output for scripts."""

from __future__ import annotations

import logging

from rich.logging import RichHandler


def init_zero_verbose() -> None:
    """Show log records from errors up, through rich, and no warnings. Call it before the imports that are to be quiet.

    A root logger that has handlers already keeps them.
    """
    logging.basicConfig(level=logging.ERROR, format="%(message)s", datefmt="[%X]", handlers=[RichHandler()])
    # Warnings become records of the level WARNING, which is below.
    logging.captureWarnings(True)
