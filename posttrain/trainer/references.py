"""The reference of a preference trainer: which handle a run has, and its log-probabilities found once, before training."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from posttrain.data.forest import build_forest, select, split_sequences
from posttrain.data.pairs import VALUES
from posttrain.data.sampling import RowItems
from posttrain.errors import ConfigError
from posttrain.model.handle import FrozenReference, Reference, starting_reference
from posttrain.model.load import LoadOptions, base_model, prepare_model
from posttrain.model.reference import create_reference_model
from posttrain.parallel.ranks import all_max, barrier, gather_objects, rank, say
from posttrain.types import TokenBatch

logger = logging.getLogger(__name__)


def sequence_sums(values: Tensor, batch: TokenBatch) -> Tensor:
    """[S] sum of what each read-out [N] has, over the read-outs of each sequence, by their weights."""
    zeros = torch.zeros(batch.num_sequences, dtype=values.dtype, device=values.device)
    return zeros.index_add(0, batch.sequence, values * batch.weights)


def pair_values(batch: TokenBatch, name: str) -> Tensor:
    """[P] a value of each pair. e.g. "margin" """
    if batch.values is None:
        return torch.zeros(0, device=batch.input_ids.device)
    return batch.values[::2, VALUES.index(name)]


def choose_reference(policy: Any, source: Any, ref_model: Any, options: LoadOptions, moves: bool = False) -> Reference:
    """What the run compares with. Called once the policy is loaded, before it is placed on its ranks.

    `source` is what the user gave as the model; `moves`: the reference will follow the policy. Raises `ConfigError` for
    a reference that is the policy itself, or stands beside an adapter.
    """
    if ref_model is not None and any(ref_model is same for same in (source, policy, base_model(policy))):
        raise ConfigError(
            "`ref_model` is the object given as `model`: trained, it would be compared with itself. Leave `ref_model` "
            "out to compare with a frozen copy, or give another model."
        )
    handle = starting_reference(policy, moves)
    if handle is not None and ref_model is not None:
        raise ConfigError(
            "`ref_model` is given and the model has an adapter, whose reference is the model it starts from; leave "
            "`ref_model` out, or merge the adapter first (`posttrain merge`)."
        )
    if handle is not None:
        return handle
    # By name a second time, where there is one: under ZeRO-3 a copy of the policy would hold nothing.
    other = source if ref_model is None and isinstance(source, str) else ref_model
    return FrozenReference(create_reference_model(policy) if other is None else prepare_model(other, options).model)


def reference_sums(
    reference: Reference | None, policy: Any, batch: TokenBatch, device: torch.device, budget: int | None
) -> Tensor:
    """[S] log-probability of each sequence's response under the reference: as the rows bring it, else scored now.

    Raises `ConfigError` where rows bring none and the reference was let go after it had been precomputed.
    """
    known = None if batch.values is None else batch.values[:, -1]
    if known is not None and not bool(known.isnan().any()):
        return known
    if reference is None:
        raise ConfigError(
            "`precompute_ref_log_probs` is on, and these rows came after the reference was let go: give them at "
            "construction (`eval_dataset`), or turn it off."
        )
    parts = [list(range(batch.num_sequences))] if budget is None else split_sequences(batch, budget)
    found = torch.zeros(batch.num_sequences)
    # Where weights are sharded the ranks go through the model together: every rank as often.
    for i in range(all_max([len(parts)], device)[0]):
        part = parts[i] if i < len(parts) else []
        piece = (select(batch, part) if part else build_forest([])).to(device)
        found[part] = sequence_sums(reference.score(policy, piece), piece).cpu()
    return found


# ---- found once --------------------------------------------------------------------------------------------------------


def precompute(trainer: Any, items: RowItems, reference: Reference, name: str) -> RowItems:
    """The same items, each row's values holding its log-probability under the reference.

    What was found before for the same weights and the same tokens is read from the cache on disk; order and number of
    rows do not matter. Every rank scores its part; rank 0 writes.
    """
    keys = row_keys(items.rows)
    file = cache_folder() / f"{reference.identity(trainer.model)}.npz"
    known = _read(file)
    pairs = np.asarray([[p.row for p in pieces] for pieces in items.bins or []])
    missing = [pair.tolist() for pair in pairs if any(keys[row] not in known for row in pair)]
    say(f"{name}: reference log-probabilities of {len(pairs) - len(missing)} of {len(pairs)} pairs are in {file.name}")
    if missing:
        known |= {keys[row]: value for row, value in _score(trainer, items, missing).items()}
        if rank() == 0:
            _write(file, known)
        barrier()
    values = np.asarray(items.rows["values"][:], dtype=np.float32)
    values[:, -1] = [known[key] for key in keys]
    rows = items.rows.remove_columns("values").add_column(
        "values", values.tolist(), feature=items.rows.features["values"]
    )
    return RowItems(rows, items.bins)


def _score(trainer: Any, items: RowItems, missing: list[list[int]]) -> dict[int, float]:
    """{row of the prepared set: log-probability}, from all ranks."""
    chosen = RowItems(
        items.rows.select([row for pair in missing for row in pair]), _pairs_of(len(missing), items, missing)
    )
    at = {int(chosen.rows[2 * i]["source"]): pair for i, pair in enumerate(missing)}
    found: dict[int, float] = {}
    size = trainer.args.precompute_ref_batch_size or trainer.args.per_device_eval_batch_size
    for batch in trainer.reference_loader(chosen, size):
        (pieces,) = trainer.pieces([batch["batch"]], trainer.args.device)
        for piece in pieces:
            for s, value in enumerate(piece.reference.tolist()):
                found[at[piece.batch.source[s]][s % 2]] = value
    return {row: value for part in gather_objects(found) for row, value in part.items()}


def _pairs_of(count: int, items: RowItems, missing: list[list[int]]) -> list[Any]:
    from posttrain.data.packing import Piece

    lengths = [[items.lengths[row] for row in pair] for pair in missing]
    return [[Piece(2 * i + side, 0, lengths[i][side]) for side in (0, 1)] for i in range(count)]


def row_keys(rows: Any) -> list[int]:
    """A 64-bit hash of each row's tokens and weights."""
    found = []
    for row in rows.with_format("numpy", columns=["input_ids", "weights"]):
        digest = xxhash.xxh3_64(np.ascontiguousarray(row["input_ids"], dtype="<i4").tobytes())
        digest.update(np.ascontiguousarray(row["weights"], dtype="<f4").tobytes())
        found.append(digest.intdigest())
    return found


def cache_folder() -> Path:
    """`POSTTRAIN_CACHE`, else a folder in Hugging Face's cache."""
    from huggingface_hub.constants import HF_HOME

    return Path(os.environ.get("POSTTRAIN_CACHE", Path(HF_HOME) / "posttrain")) / "reference"


def _read(file: Path) -> dict[int, float]:
    try:
        with np.load(file) as held:
            return dict(zip(held["keys"].tolist(), held["values"].tolist(), strict=True))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, EOFError) as error:
        logger.warning("%s cannot be read (%s); the reference is scored again", file, error)
        return {}


def _write(file: Path, known: dict[int, float]) -> None:
    """Whole or not at all: two runs may share the folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".npz", delete=False) as temporary:
        np.savez(
            temporary,
            keys=np.fromiter(known.keys(), dtype=np.uint64),
            values=np.fromiter(known.values(), dtype=np.float64),
        )
        temporary.flush()
        os.fsync(temporary.fileno())
    os.replace(temporary.name, file)
