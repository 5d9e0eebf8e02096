"""Which checkpoint to resume from. Its state file is written last: a folder without a whole one is half-written."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from posttrain.errors import ConfigError

logger = logging.getLogger(__name__)


def find_checkpoint(asked: str | bool | None, output_dir: str | None) -> str | None:
    """The folder to resume from: `asked` is a path, or true or "last" for the newest complete one in `output_dir`.

    Raises `ConfigError` naming `resume_from_checkpoint` when there is none.
    """
    word = str(asked).lower()
    if word in ("none", "false"):
        return None
    if word not in ("true", "last"):
        if not is_complete(Path(str(asked))):
            raise ConfigError(
                f"`resume_from_checkpoint` is {asked!r}; no checkpoint is there (no complete trainer_state.json)."
            )
        return _with_optimizer(Path(str(asked)))
    folder = Path(output_dir or "trainer_output").expanduser()
    steps = {int(path.name[11:]): path for path in folder.glob("checkpoint-*") if path.name[11:].isdigit()}
    for step in sorted(steps, reverse=True):
        if is_complete(steps[step]):
            return _with_optimizer(steps[step])
        logger.warning("%s is half-written; looking for an older checkpoint", steps[step])
    raise ConfigError(f"`resume_from_checkpoint` is {asked!r}, and `output_dir` ({folder}) holds no checkpoint.")


def _with_optimizer(folder: Path) -> str:
    if not any(any(folder.glob(pattern)) for pattern in ("optimizer*", "global_step*", "pytorch_model_fsdp*")):
        raise ConfigError(
            f"`resume_from_checkpoint`: {folder} was saved with `save_only_model`, without the optimizer, and cannot "
            "be gone on from exactly; start a new run with `model_name_or_path` set to it."
        )
    return str(folder)


def is_complete(folder: Path) -> bool:
    """Whether the folder holds a checkpoint that was written to its end."""
    try:
        json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def refuse_other_strategy(folder: str, deepspeed: bool, world_size: int) -> None:
    """DeepSpeed's optimizer state is cut for its own ranks, and no other strategy reads it.

    Raises `ConfigError` naming both numbers of processes.
    """
    parts = list(Path(folder).glob("global_step*/*zero_pp_rank_*_optim_states.pt"))
    if bool(parts) != deepspeed:
        saved, now = ("with", "without") if parts else ("without", "with")
        raise ConfigError(
            f"`resume_from_checkpoint`: {folder} was saved {saved} DeepSpeed, and this run is {now} it. Resume as it "
            "was saved, or start a new run with `model_name_or_path` set to it."
        )
    if parts and len(parts) != world_size:
        raise ConfigError(
            f"`resume_from_checkpoint`: {folder} was saved by {len(parts)} DeepSpeed processes, and this run has "
            f"{world_size}. Resume with {len(parts)}, or start a new run with `model_name_or_path` set to it."
        )


def forget(output_dir: str | None, step: int) -> None:
    """Take the mark of completeness from a checkpoint that is about to be written again."""
    from posttrain.parallel.ranks import barrier, rank  # torch; the command line asks before it is imported

    if rank() == 0:
        (Path(output_dir or "trainer_output") / f"checkpoint-{step}" / "trainer_state.json").unlink(missing_ok=True)
    barrier()
