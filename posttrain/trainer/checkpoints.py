"""Which checkpoint to resume from. The manifest is written last: a folder without a whole one is half-written."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path

from posttrain.errors import ConfigError
from posttrain.trainer.manifest import MANIFEST, damage, read_manifest, sync

logger = logging.getLogger(__name__)

STAGING = ".incomplete"
"""Where checkpoints are written, inside `output_dir`, before they get their name."""
WORDS = ("true", "last", "last_good", "auto")


def wants_resume(asked: str | bool | None) -> bool:
    return str(asked).lower() not in ("none", "false")


def find_checkpoint(asked: str | bool | None, output_dir: str | None, hashes: bool = False) -> str | None:
    """The folder to resume from. `asked` is a path; true or "last" for the newest one in `output_dir`; "auto" the same,
    and None where there is none; "last_good" for the newest one in which every byte is as it was written.

    hashes: check every byte of it, not only names and sizes. Raises `ConfigError` naming `resume_from_checkpoint` when
    there is none, and naming the file that is damaged.
    """
    word = str(asked).lower()
    if not wants_resume(asked):
        return None
    if word not in WORDS:
        folder = Path(str(asked)).expanduser()
        if not is_complete(folder):
            raise ConfigError(f"`resume_from_checkpoint` is {asked!r}; {_what_is_there(folder)}.")
        refuse_damaged(folder, damage(folder, hashes))
        return _with_optimizer(folder)
    folder = Path(output_dir or "trainer_output").expanduser()
    put_in_place(folder)
    for found in reversed(checkpoints_in(folder)):
        if not is_complete(found):
            logger.warning("%s is half-written; looking for an older checkpoint", found)
            continue
        wrong = damage(found, hashes or word == "last_good")
        if wrong and word == "last_good":
            logger.warning("%s is damaged (%s); looking for an older checkpoint", found, "; ".join(wrong[:3]))
            continue
        refuse_damaged(found, wrong)
        return _with_optimizer(found)
    if word == "auto":
        return None
    raise ConfigError(
        f"`resume_from_checkpoint` is {asked!r}, and `output_dir` ({folder}) holds no checkpoint; with 'auto' the run "
        "would begin anew."
    )


def refuse_damaged(folder: Path, wrong: list[str]) -> None:
    """Raise `ConfigError` naming what is damaged."""
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ConfigError(
            f"`resume_from_checkpoint`: {folder} is damaged: {'; '.join(wrong[:3])}{more}. Set it to 'last_good' for "
            "the newest checkpoint that is whole, or to the path of another."
        )


def checkpoints_in(output_dir: Path) -> list[Path]:
    """Oldest first, in the order they were written: a run that goes on from an older one writes lower steps later.

    Those without a manifest come first, by step. One whose manifest is damaged comes last, so that it is not passed
    over in silence.
    """
    order = {}
    for path in output_dir.glob("checkpoint-*"):
        if path.name[11:].isdigit() and path.is_dir():
            manifest = read_manifest(path)
            unread = math.inf if (path / MANIFEST).exists() else -1
            order[path] = (manifest.sequence if manifest else unread, int(path.name[11:]))
    return sorted(order, key=lambda path: order[path])


def next_sequence(output_dir: Path) -> int:
    """One more than any checkpoint in the folder has."""
    found = (read_manifest(path) for path in output_dir.glob("checkpoint-*"))
    return 1 + max((manifest.sequence for manifest in found if manifest), default=0)


def _what_is_there(folder: Path) -> str:
    if not folder.exists():
        return "no checkpoint is there (no such folder)"
    if not folder.is_dir():
        return "no checkpoint is there, but a file; name the folder of a checkpoint"
    inside = checkpoints_in(folder)
    if inside:
        return f"that folder is no checkpoint, but holds some; name one, such as {str(inside[-1])!r}"
    if any(folder.glob("*.safetensors")):
        return (
            "no checkpoint is there (no complete trainer_state.json), but a saved model; start a new run with "
            "`model_name_or_path` set to it"
        )
    return "no checkpoint is there (no complete trainer_state.json)"


def _with_optimizer(folder: Path) -> str:
    if not any(any(folder.glob(pattern)) for pattern in ("optimizer*", "global_step*", "pytorch_model_fsdp*")):
        raise ConfigError(
            f"`resume_from_checkpoint`: {folder} was saved with `save_only_model`, without the optimizer, and cannot "
            "be gone on from exactly; start a new run with `model_name_or_path` set to it."
        )
    return str(folder)


def is_complete(folder: Path) -> bool:
    """Whether the folder holds a checkpoint that was written to its end. One with a manifest was, even if it is damaged
    now; one of another program is when its state can be read."""
    if (folder / MANIFEST).exists():
        return True
    try:
        json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def put_in_place(output_dir: Path) -> None:
    """Give a checkpoint its name that was whole when the run was killed, just before it got it."""
    for folder in sorted((output_dir / STAGING).glob("checkpoint-*")):
        final = output_dir / folder.name
        if read_manifest(folder) is None or final.exists():
            continue
        try:
            folder.rename(final)
            sync(output_dir)
        except OSError:  # another rank was faster, or the folder cannot be written
            continue


def publish(staged: Path, final: Path) -> None:
    """Give a whole checkpoint its name. One of the same step steps aside first: killed in between, the new one is put
    in place when it is looked for."""
    if final.exists():
        final.rename(_free_name(staged.parent, f"replaced-{final.name}"))
    try:
        staged.rename(final)
    except FileNotFoundError:
        if read_manifest(final) is None:  # else somebody who looked for checkpoints has put it in place
            raise
    sync(final.parent)


def remove(folder: Path, output_dir: Path) -> None:
    """Take the name first: a checkpoint that is half deleted is none."""
    staging = output_dir / STAGING
    staging.mkdir(exist_ok=True)
    try:
        gone = folder.rename(_free_name(staging, f"removed-{folder.name}"))
        sync(output_dir)
    except FileNotFoundError:
        return
    shutil.rmtree(gone, ignore_errors=True)


def _free_name(folder: Path, name: str) -> Path:
    number = 0
    while (folder / f"{name}-{number}").exists():
        number += 1
    return folder / f"{name}-{number}"


def sweep(output_dir: Path) -> None:
    """Remove what killed runs left half-written."""
    put_in_place(output_dir)
    shutil.rmtree(output_dir / STAGING, ignore_errors=True)


def rotate(output_dir: Path, limit: int | None, newest: Path, best: str | None) -> None:
    """Remove the oldest checkpoints beyond `limit`; never `newest`, nor the best."""
    if not limit or limit < 1:
        return
    found = checkpoints_in(output_dir)
    kept = {newest} | {path for path in found if best is not None and path == Path(best)}
    others = [path for path in found if path not in kept]
    for path in others[: max(len(found) - max(limit, len(kept)), 0)]:
        remove(path, output_dir)


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
