"""The rows of a step whose loss or gradient was not finite: which they are, and how to run them again."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

from posttrain.errors import ConfigError
from posttrain.parallel.ranks import rank
from posttrain.parallel.strategy import Replicated
from posttrain.trainer.experience import Experience, shown
from posttrain.trainer.randomness import preserved_rng
from posttrain.types import Segments, TokenBatch

MOST = 64
"""Units that are tried one by one when a step fails."""


class Replayed(NamedTuple):
    """One unit of a failed step, run alone. `rows`: of the training set."""

    rows: tuple[int, ...]
    tokens: int
    loss: float  # summed, not divided
    grad_norm: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def report_failed(engine: Any, loss: float, norm: float) -> str:
    """Save the step's rows, try them one by one, and say what was found. The weights are not touched."""
    step, args = engine.state.global_step + 1, engine.args
    folder = Path(args.output_dir or ".") / f"failed-step-{step}"
    found = _first_bad(engine)
    text = "" if found is None else f" Row {shown(found.rows)} alone has loss {found.loss}, norm {found.grad_norm}."
    try:
        _save(engine, folder, {"step": step, "loss": str(loss), "grad_norm": str(norm), "alone": found and str(found)})
        text += f" They are saved in {folder}: `replay_failed` runs them again."
    except OSError as error:
        text += f" They could not be saved in {folder} ({error})."
    return (
        f"step {step}: loss {loss}, gradient norm {norm}, from rows {shown(engine.window.sources)} of the training set "
        f"on this rank.{text} The weights are those of step {step - 1}; checkpoints in {args.output_dir!r} are "
        "unharmed. Lower `learning_rate` or look at these rows."
    )


def _save(engine: Any, folder: Path, facts: dict[str, Any]) -> None:
    batches = [piece.batch for pieces in engine.recovery.held for piece in pieces]
    folder.mkdir(parents=True, exist_ok=True)
    rows = [list(batch.source) for batch in batches]
    text = json.dumps(facts | {"rank": rank(), "rows": rows}, indent=2)
    (folder / f"rank{rank()}.json").write_text(text + "\n", encoding="utf-8")
    torch.save([_plain(batch) for batch in batches], folder / f"rank{rank()}.pt")


def _plain(batch: TokenBatch) -> dict[str, Any]:
    plain = {f.name: getattr(batch, f.name) for f in fields(batch) if f.name not in ("segments", "distinct")}
    return plain | {f"segment_{f.name}": getattr(batch.segments, f.name) for f in fields(batch.segments)}


def _batch(plain: dict[str, Any]) -> TokenBatch:
    segments = Segments(*(tuple(plain.pop(f"segment_{name}")) for name in ("start", "end", "parent")))
    return TokenBatch(segments=segments, **plain)


def load_failed(folder: str | Path) -> list[TokenBatch]:
    """The micro-batches of the failed step, of every rank, in pieces as they were run.

    Raises `ConfigError` for a folder that is none.
    """
    files = sorted(Path(folder).glob("rank*.pt"))
    if not files:
        raise ConfigError(f"`folder` is {str(folder)!r}; give a failed-step-N folder, which holds rank0.pt.")
    return [_batch(plain) for file in files for plain in torch.load(file, weights_only=True)]


def replay_failed(trainer: Any, folder: str | Path) -> list[Replayed]:
    """Run the rows of a failed step again with the trainer's weights, each unit alone; nothing is trained.

    The weights of the step are those of the checkpoint before it, or a few steps on. One process.

    e.g. [unit for unit in replay_failed(trainer, "out/failed-step-900") if not unit.finite]
    """
    batches = load_failed(folder)
    with torch.enable_grad(), preserved_rng():
        return list(_alone(trainer, list(trainer.experience(batches))))


def _first_bad(engine: Any) -> Replayed | None:
    """The first unit whose loss or gradient is not finite by itself, or None."""
    if not isinstance(engine.strategy, Replicated):
        return None  # one rank's forwards would wait for the others'
    suspects = [piece for piece, loss in engine.recovery.losses if not math.isfinite(float(loss))]
    pieces = suspects or [piece for piece, _ in engine.recovery.losses]
    with preserved_rng():
        return next((unit for unit in _alone(engine, pieces) if not unit.finite), None)


def _alone(engine: Any, pieces: list[Experience]) -> Iterator[Replayed]:
    units = [unit for piece in pieces for unit in piece.split(1) if unit.batch.num_sequences]
    weights = [p for p in engine.model.parameters() if p.requires_grad]
    for unit in units[:MOST]:
        loss = engine.loss_step(engine.model, unit.to(engine.args.device)).total
        # Not backward(): nothing may reach `grad`, nor the hooks that exchange it.
        grads = torch.autograd.grad(loss, weights, allow_unused=True)
        norms = [g.float().norm() for g in grads if g is not None]
        norm = float(torch.stack(norms).norm()) if norms else 0.0
        yield Replayed(unit.batch.source, unit.batch.num_tokens, loss.item(), norm)
