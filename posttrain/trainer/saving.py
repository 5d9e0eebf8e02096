"""Write a checkpoint so that a kill at any moment leaves the last whole one.

Every rank writes under `output_dir/.incomplete/checkpoint-N`; files are forced to the disk and hashed by the rank that
wrote them; rank 0 writes the manifest, renames the folder, and only then removes older checkpoints.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from transformers.trainer_callback import ExportableState

from posttrain.parallel.ranks import barrier, gather_objects, rank, say, world_size
from posttrain.parallel.training_state import late_errors
from posttrain.trainer.checkpoints import STAGING, checkpoints_in, next_sequence, publish, rotate
from posttrain.trainer.manifest import Manifest, files_of, owner_of, synced, write_manifest

RECORD, CURSOR = "run.json", "stream.pt"


class SaveFailed(Exception):
    """What one rank could not write; raised on all."""


def save_checkpoint(trainer: Any, trial: Any, write_run: Callable[[Path], None]) -> None:
    """A checkpoint of the step just done. `write_run` adds what `trainer.resuming` reads back.

    What cannot be written (disk full, no permission) is said, its part removed, and the run goes on: the checkpoints
    there are stay, and the next save tries again. Errors that are no matter of writing are raised.
    """
    step, folder = trainer.state.global_step, Path(trainer._get_output_dir(trial=trial))
    staged, final = folder / STAGING / f"checkpoint-{step}", folder / f"checkpoint-{step}"
    best = trainer.state.best_model_checkpoint
    if trainer.hp_search_backend is None and trial is None:
        trainer.store_flos()
    try:
        _write(trainer, staged, final, write_run)
    except SaveFailed as failure:
        trainer.state.best_model_checkpoint = best
        trainer.failed_saves.append(step)
        if trainer.args.should_save:
            shutil.rmtree(staged, ignore_errors=True)
        say(_told(folder, step, failure))
        return
    if trainer.args.push_to_hub:
        trainer._push_from_checkpoint(str(final))
    if trainer.args.should_save:
        rotate(folder, trainer.args.save_total_limit, final, trainer.state.best_model_checkpoint)
    barrier()


def _told(folder: Path, step: int, failure: SaveFailed) -> str:
    left = checkpoints_in(folder) if folder.is_dir() else []
    newest = f"the newest whole one is {left[-1]}" if left else "there is none yet"
    return (
        f"checkpoint-{step} could not be saved: {failure}. Training goes on; {newest}. The next save tries again: make "
        f"room in `output_dir` ({folder}), or mend its permissions."
    )


def _write(trainer: Any, staged: Path, final: Path, write_run: Callable[[Path], None]) -> None:
    args, state, name = trainer.args, trainer.state, str(staged)
    _together(_make, staged, args.should_save)
    _together(trainer.save_model, name, _internal_call=True)
    if args.save_strategy != "no" and state.best_global_step:
        of_best = final.parent / f"checkpoint-{state.best_global_step}"
        if of_best == final or of_best.exists():
            state.best_model_checkpoint = str(of_best)
    if not args.save_only_model:
        _together(_save_optimizer, trainer, name)
        _together(trainer._save_scaler, name)
        _together(trainer._save_rng_state, name)
    _together(_write_state, trainer, staged, write_run)
    _seal(trainer, staged, final)


def _make(staged: Path, saves: bool) -> None:
    if saves:
        shutil.rmtree(staged, ignore_errors=True)  # of a run that was killed
    barrier()
    staged.mkdir(parents=True, exist_ok=True)


def _save_optimizer(trainer: Any, folder: str) -> None:
    late = late_errors(trainer.model_wrapped) if trainer.is_deepspeed_enabled else contextlib.nullcontext()
    with late:
        trainer._save_optimizer_and_scheduler(folder)


def _write_state(trainer: Any, staged: Path, write_run: Callable[[Path], None]) -> None:
    if not trainer.args.should_save:
        return
    for callback in trainer.callback_handler.callbacks:
        write = getattr(callback, "write_state", None)
        if write is not None:
            write(staged)
    saved: dict[str, list[Any]] = {}
    for each in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(each, ExportableState):
            saved.setdefault(type(each).__name__, []).append(each.state())
    trainer.state.stateful_callbacks = {name: v[0] if len(v) == 1 else v for name, v in saved.items()}
    write_run(staged)
    trainer.state.save_to_json(str(staged / "trainer_state.json"))


def _seal(trainer: Any, staged: Path, final: Path) -> None:
    """Force to the disk, describe, rename."""
    args, found, error = trainer.args, {}, None
    if args.save_on_each_node:
        mine = files_of(staged) if args.should_save else []
    else:
        mine = [name for name in files_of(staged) if owner_of(name, world_size()) == rank()]
    try:
        found = synced(staged, mine)
    except OSError as failed:
        error = _described(failed)
    parts = gather_objects((error, found))
    _raise_first([error for error, _ in parts])
    files = found if args.save_on_each_node else {name: entry for _, part in parts for name, entry in part.items()}
    _together(_finish, args.should_save, staged, final, files)


def _finish(saves: bool, staged: Path, final: Path, files: dict[str, tuple[int, str]]) -> None:
    if not saves:
        return
    unseen = sorted(set(files) ^ set(files_of(staged)))
    if unseen:
        raise OSError(
            f"{unseen[0]} is not seen by every rank; the machines need one shared `output_dir`, or `save_on_each_node`"
        )
    step = int(final.name.partition("-")[2])
    write_manifest(staged, Manifest(step, next_sequence(final.parent), world_size(), files))
    publish(staged, final)


def _together(write: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Call on every rank; what one could not write, all learn. A rank that raised alone would leave its peers waiting
    in the next collective."""
    error: str | None = None
    try:
        with _writing():
            write(*args, **kwargs)
    except SaveFailed as failed:
        error = str(failed)
    _raise_first(gather_objects(error))


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Whatever a writer raises about its file, as `SaveFailed`; other errors as they are."""
    try:
        yield
    except (OSError, SafetensorError, CheckpointException) as error:
        raise SaveFailed(_described(error)) from error
    except RuntimeError as error:
        # torch tells of a full disk in the words of its archive.
        if isinstance(error, torch.OutOfMemoryError) or not any(word in str(error) for word in _OF_TORCH):
            raise
        raise SaveFailed(_described(error)) from error


_OF_TORCH = ("PytorchStreamWriter", "inline_container", "file write failed")


def _described(error: BaseException) -> str:
    text = " ".join(str(error).split())
    where = f"rank {rank()}: " if world_size() > 1 else ""
    return f"{where}{type(error).__name__}: {text[:300]}"


def _raise_first(errors: list[str | None]) -> None:
    found = [error for error in errors if error is not None]
    if found:
        raise SaveFailed(found[0])
