"""The reference of a preference trainer: which handle a run has, and its log-probabilities found before training."""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState

from posttrain.data.forest import build_forest, select, split_sequences
from posttrain.data.pairs import VALUES
from posttrain.data.sampling import RowItems, WindowSampler
from posttrain.errors import ConfigError
from posttrain.loss.reduce import sequence_sums
from posttrain.model.handle import FrozenReference, Reference, starting_reference
from posttrain.model.load import LoadOptions, base_model, prepare_model
from posttrain.model.reference import create_reference_model
from posttrain.parallel.ranks import all_max, barrier, gather_objects, rank, say, world_size
from posttrain.trainer.experience import Experience
from posttrain.trainer.pairs import sides_of, with_tail_weights
from posttrain.trainer.tolerance import tolerance
from posttrain.types import TokenBatch

logger = logging.getLogger(__name__)
_MOVED_FILE = "reference.pt"


def pair_values(batch: TokenBatch, name: str) -> Tensor:
    """[P] a value of each pair. e.g. "margin" """
    if batch.values is None:
        return torch.zeros(0, device=batch.input_ids.device)
    return batch.values[:: sides_of(batch), VALUES.index(name)]


def response_sums(logps: Tensor, batch: TokenBatch) -> Tensor:
    """[S] log-probability of each response, from those of its tokens [N]."""
    return sequence_sums(logps * batch.weights, batch.sequence, batch.num_sequences)


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
    # By name a second time under ZeRO-3, where a copy of the policy would hold nothing.
    partitioned = any(getattr(p, "ds_id", None) is not None for p in policy.parameters())
    other = source if ref_model is None and isinstance(source, str) and partitioned else ref_model
    if other is None and partitioned:
        raise ConfigError(
            "under ZeRO-3 a model given as an object cannot be copied for the reference; give its name, or `ref_model`."
        )
    if other is None:
        return FrozenReference(create_reference_model(policy))
    if isinstance(other, torch.nn.Module):
        other.requires_grad_(True)  # a frozen one is welcome; loading refuses models that cannot be trained
    return FrozenReference(prepare_model(other, options).model)


def reference_sums(
    reference: Reference | None, policy: Any, batch: TokenBatch, device: torch.device, budget: int | None
) -> Tensor:
    """[S] log-probability of each sequence's response under the reference: as the rows bring it, else scored now. That
    of a third response is 0: nothing reads it.

    Raises `ConfigError` where rows bring none and the reference was let go after it had been precomputed.
    """
    known = torch.zeros(0) if batch.values is None else batch.values[:, -1]
    # Together: a rank that scores needs the others where weights are sharded.
    if not all_max([int(bool(known.isnan().any()))], device)[0]:
        return known
    if reference is None:
        raise ConfigError(
            "`precompute_ref_log_probs` is on, and these rows came after the reference was let go: give them at "
            "construction (`eval_dataset`), or turn it off."
        )
    unknown = torch.nonzero(known.isnan())[:, 0].tolist()
    if unknown and len(unknown) < len(known):
        batch = select(batch, unknown)
    found = known.clone()
    found[unknown] = scored_sums(
        lambda piece: reference.score(policy, piece), batch if unknown else build_forest([]), device, budget
    )
    return found


def scored_sums(
    score: Callable[[TokenBatch], Tensor], batch: TokenBatch, device: torch.device, budget: int | None
) -> Tensor:
    """[S] log-probability of each response, on the host, from forwards of at most `budget` tokens."""
    parts = [list(range(batch.num_sequences))] if budget is None else split_sequences(batch, budget)
    found = torch.zeros(batch.num_sequences)
    # Where weights are sharded the ranks go through the model together: every rank as often.
    for i in range(all_max([len(parts)], device)[0]):
        part = parts[i] if i < len(parts) else []
        piece = (select(batch, part) if part else build_forest([])).to(device)
        found[part] = response_sums(score(piece), piece).cpu()
    return found


# ---- found once ------------------------------------------------------------------------------------------------------


def precompute_all(trainer: Any, batch_size: int) -> None:
    """Score a trainer's reference on its data sets now, and let it go where it is a second model."""
    reference, ld_alpha = trainer.reference, getattr(trainer.args, "ld_alpha", None)
    trainer._evaluation_model(None)  # a model is placed on its ranks once

    def found(items: RowItems | None, name: str) -> RowItems | None:
        return items and precompute(trainer, items, reference, ld_alpha, batch_size, name)

    trainer.train_dataset, sets = found(trainer.train_dataset, "train"), trainer.eval_dataset
    several = isinstance(sets, dict)
    trainer.eval_dataset = {name: found(sets[name], name) for name in sets} if several else found(sets, "eval")
    if isinstance(reference, FrozenReference):
        trainer.reference = None


def precompute(
    trainer: Any, items: RowItems, reference: Reference, ld_alpha: float | None, batch_size: int, name: str
) -> RowItems:
    """The same items, each row's values holding its log-probability under the reference; one that a row has stays.

    What was found before for the same weights, precision, `ld_alpha` and tokens is read from a file of the cache; order
    and number of rows do not matter. Every rank scores its part; rank 0 writes. Raises `ConfigError` under ZeRO-3.
    """
    if any(getattr(p, "ds_id", None) is not None for p in trainer.model.parameters()):
        raise ConfigError(
            "`precompute_ref_log_probs` is not supported under ZeRO-3, whose partitioned weights cannot be told apart; "
            "use FSDP2, or turn it off."
        )
    values = np.asarray(items.rows["values"][:], dtype=np.float32)
    unknown = np.isnan(values[:, -1]).tolist()
    each = len(items.rows) // len(items)  # rows of an item: 2 of a pair
    found = row_keys(items.rows, each if ld_alpha is not None else 1)
    keys = [key if asked else None for key, asked in zip(found, unknown, strict=True)]
    file = cache_folder() / f"{_identity(trainer, reference, ld_alpha)}.npz"
    known = _read(file)
    missing = [row for row in range(0, len(keys), each) if not {*keys[row : row + each]} - {None} <= known.keys()]
    total = len(items)
    what = "pairs" if each > 1 else "rows"
    say(f"{name}: reference log-probabilities of {total - len(missing)} of {total} {what} were found in {file}")
    if missing:
        known |= _score(trainer, items, reference, ld_alpha, missing, keys, batch_size)
        if rank() == 0:
            _write(file, known)
        barrier()
    values[unknown, -1] = [known[key] for key in keys if key is not None]
    feature = items.rows.features["values"]
    rows = items.rows.remove_columns("values").add_column("values", values.tolist(), feature=feature)
    return RowItems(rows, items.bins)


def _identity(trainer: Any, reference: Reference, ld_alpha: float | None) -> str:
    """A hash of everything but the tokens that the numbers follow from."""
    config = base_model(trainer.model).config.to_dict()
    passing = ("_name_or_path", "transformers_version", "use_cache")
    parts = {name: value for name, value in config.items() if name not in passing}
    precision = trainer.accelerator.mixed_precision
    known = [parts, precision, trainer.layout, ld_alpha]
    digest = xxhash.xxh3_128(json.dumps(known, sort_keys=True, default=str).encode())
    digest.update(reference.identity(trainer.model).encode())
    return digest.hexdigest()


def _score(
    trainer: Any,
    items: RowItems,
    reference: Reference,
    ld_alpha: float | None,
    missing: list[int],
    keys: list[int | None],
    batch_size: int,
) -> dict[int, float]:
    """{key of a row: log-probability} of the items whose first rows are given, from all ranks. A row without a key is
    not asked for."""
    args, found, each = trainer.args, {}, len(keys) // len(items)
    # As every evaluation deals out its rows: the last micro-batches may be empty, and every rank has as many.
    for some in WindowSampler(len(missing), batch_size, 1, world_size(), rank()):
        chosen = [items[missing[i] // each] for i in some]
        batch = with_tail_weights(trainer.collator(chosen)["batch"], ld_alpha)
        with torch.no_grad():
            sums = reference_sums(reference, trainer.model_wrapped, batch, args.device, args.max_tokens_per_forward)
        asked = [keys[missing[i] + side] for i in some for side in range(each)]
        found |= dict(zip(asked, sums.tolist(), strict=True))
    return {key: value for part in gather_objects(found) for key, value in part.items() if key is not None}


def row_keys(rows: Any, together: int = 1) -> list[int]:
    """A 64-bit hash of each row's tokens and weights, and of those of the `together` rows it lies among."""
    found = []
    for row in rows.with_format("numpy", columns=["input_ids", "weights"]):
        digest = xxhash.xxh3_64(np.ascontiguousarray(row["input_ids"], dtype="<i4").tobytes())
        digest.update(np.ascontiguousarray(row["weights"], dtype="<f4").tobytes())
        found.append(digest.intdigest())
    if together == 1:
        return found
    pairs = (found[at : at + together] for at in range(0, len(found), together))
    return [xxhash.xxh3_64(repr((key, pair)).encode()).intdigest() for pair in pairs for key in pair]


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
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
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


# ---- moved, and checked ----------------------------------------------------------------------------------------------


class MovingReference(TrainerCallback):
    """Lets a reference follow the policy, every `ref_model_sync_steps` steps (TR-DPO, arXiv 2404.09656). Checkpoints
    keep it. Raises `ConfigError` where weights are sharded, by FSDP2 or ZeRO-3."""

    def __init__(self, reference: Reference, model: Any) -> None:
        held = [*model.parameters(), *reference.tensors().values()]
        if any(isinstance(p, DTensor) or getattr(p, "ds_id", None) is not None for p in held):
            raise ConfigError("`sync_ref_model` does not work on sharded weights (FSDP2, ZeRO-3); use ZeRO-2 or DDP.")
        self._reference = reference

    def read_state(self, folder: Path) -> None:
        """From the checkpoint a run goes on from, wherever it lies."""
        file = folder / _MOVED_FILE
        if not file.is_file():
            raise ConfigError(
                f"`sync_ref_model` is on and there is no {file}: the reference at that step is not known. Resume from "
                "a checkpoint of a run that had it on, or start again."
            )
        self._reference.restore(torch.load(file, map_location="cpu", weights_only=True))

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % args.ref_model_sync_steps == 0:
            self._reference.move(kwargs["model"], args.ref_model_mixup_alpha)

    def write_state(self, folder: Path) -> None:
        """Into a checkpoint, while it is written."""
        torch.save(self._reference.tensors(), folder / _MOVED_FILE)


def compare_with_start(trainer: Any, chosen: Sequence[Experience]) -> tuple[str, str]:
    """The self-check "reference": before the first step the policy is its own reference, so rewards are 0, and DPO's
    loss is ln 2 where nothing is mixed with it and no pair has a margin."""
    args = trainer.args
    if not args.compares or trainer.given_reference:
        return "skip", "the reference is another model" if args.compares else "the loss compares with no reference"
    if trainer.state.global_step or not chosen:
        return "skip", "the run goes on from a checkpoint" if trainer.state.global_step else "no pair is short enough"
    off, losses, tokens = 0.0, [], 0.0
    for exp in chosen:
        found = trainer.loss_step(trainer.model_wrapped, exp.to(args.device))
        losses.append(float(found.total) / float(trainer.unit(exp)))
        for side in (side for side in ("chosen", "rejected") if float(found.metrics[f"lengths/{side}"].weight)):
            reward, length = (float(found.metrics[f"{what}/{side}"].total) for what in ("rewards", "lengths"))
            off, tokens = max(off, abs(reward) / args.beta / length), max(tokens, length)
    plain = args.loss_type == ["sigmoid"] and args.loss_weights is None and not args.use_weighting
    plain = plain and not any(bool(pair_values(exp.batch, "margin").any()) for exp in chosen)
    allowed = tolerance(trainer).logp
    text = f"a token's log-probability under policy and reference differs by up to {off:.1e} (at most {allowed:.0e})"
    bad = not off <= allowed
    if plain:
        loss = sum(losses) / len(losses)
        text += f", and the loss is {loss:.6f} (ln 2 = {math.log(2):.6f})"
        bad = bad or not abs(loss - math.log(2)) <= args.beta * allowed * 2 * tokens
    return ("fail" if bad else "pass"), text
