"""A run from its first look at `output_dir` to its last save: whose folder it is, where it goes on, what changed since.

`run.json` in a checkpoint says what the run was made of; going on, this run is held against it field by field.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.trainer_callback import ExportableState

from posttrain.data.sampling import RowItems
from posttrain.data.stream import StreamItems
from posttrain.errors import ConfigError
from posttrain.model.adapters import is_adapted
from posttrain.model.load import base_model
from posttrain.parallel.params import parameter_shapes
from posttrain.parallel.ranks import gather_objects, on_every_rank, rank, say, world_size
from posttrain.trainer.checkpoints import find_checkpoint, refuse_damaged, refuse_other_strategy
from posttrain.trainer.folder import owned, refuse_anothers
from posttrain.trainer.loading import order_seed
from posttrain.trainer.manifest import damage
from posttrain.trainer.saving import CURSOR, RECORD
from posttrain.types import Row

# A change of these is said; the optimizer's state keeps the first kind as it was saved.
_KEPT = ("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
_USED = (
    "lr_scheduler_type",
    "warmup_steps",
    "num_train_epochs",
    "max_steps",
    "max_grad_norm",
    "bf16",
    "fp16",
)

# What every record has.
_ENTRIES: dict[str, Any] = {
    "trainer": str,
    "model": str,
    "adapter": bool,
    "shapes": dict,
    "data": dict,
    "order": dict,
    "optim": str,
    "ranks": int,
    "settings": dict,
}


@contextlib.contextmanager
def opened_run(trainer: Any, asked: str | bool | None) -> Iterator[str | None]:
    """Hold `output_dir` while a run trains; the checkpoint it goes on from, checked, or None.

    Raises `ConfigError` on all ranks: for a folder that cannot be written or is another run's, a checkpoint that is
    missing, damaged, of another model or trainer, and for data that changed since it was written.
    """
    args = trainer.args
    folder, saves = Path(args.output_dir or "trainer_output").expanduser(), args.save_strategy != "no"
    first = trainer.run_record is None  # a trainer that trains twice may write over its own checkpoints
    trainer.failed_saves = []
    with contextlib.ExitStack() as stack:
        if saves:
            needed = _weight_bytes(trainer.model)
            on_every_rank(lambda: stack.enter_context(owned(folder, needed)) if args.should_save else None)
        found = on_every_rank(lambda: find_checkpoint(asked, args.output_dir) if rank() == 0 else None)
        checkpoint = gather_objects(found)[0]
        at_home = checkpoint is not None and Path(checkpoint).resolve().parent == folder.resolve()
        if saves and first and not at_home and not args.overwrite_output_dir:
            on_every_rank(lambda: refuse_anothers(folder) if rank() == 0 else None)
        record = on_every_rank(lambda: describe(trainer)) if saves or checkpoint is not None else None
        if checkpoint is not None:
            deepspeed = trainer.is_deepspeed_enabled
            on_every_rank(lambda: refuse_damaged(Path(checkpoint), _my_damage(checkpoint, args)))
            on_every_rank(lambda: refuse_other_strategy(checkpoint, deepspeed, world_size()))
            on_every_rank(lambda: compare(trainer, Path(checkpoint), record))
            on_every_rank(lambda: restore(trainer, Path(checkpoint)))
        trainer.run_record = record
        yield checkpoint
        if trainer.failed_saves:
            say(f"{len(trainer.failed_saves)} checkpoint(s) could not be saved: steps {trainer.failed_saves}")


def _my_damage(checkpoint: str, args: Any) -> list[str]:
    """Ranks share the reading, unless each machine has a folder of its own."""
    if args.save_on_each_node:
        return damage(Path(checkpoint)) if args.should_save else []
    return damage(Path(checkpoint), part=rank(), parts=world_size())


def _weight_bytes(model: Any) -> int:
    every = not is_adapted(model)
    shapes = parameter_shapes(model)
    sizes = {name: p.element_size() for name, p in model.named_parameters() if every or p.requires_grad}
    return sum(torch.Size(shapes[name]).numel() * size for name, size in sizes.items())


# ---- what a run is made of -------------------------------------------------------------------------------------------


def describe(trainer: Any) -> dict[str, Any]:
    """What `run.json` holds, in plain values."""
    args, adapted = trainer.args, is_adapted(trainer.model)
    learned = {name for name, p in trainer.model.named_parameters() if p.requires_grad or not adapted}
    rows = args.per_device_train_batch_size * world_size()
    order = {
        "train_sampling_strategy": _plain(args.train_sampling_strategy),
        "data_seed": order_seed(args),
        "dataloader_drop_last": rows if args.dataloader_drop_last else False,
        "rows a step": rows * args.gradient_accumulation_steps,
    }
    return {
        "trainer": type(trainer).__name__,
        "model": str(base_model(trainer.model).config.name_or_path),
        "adapter": adapted,
        "shapes": {n: list(shape) for n, shape in parameter_shapes(trainer.model).items() if n in learned},
        "data": _data(trainer.train_dataset),
        "order": order,
        "optim": _plain(args.optim),
        "ranks": world_size(),
        "settings": {name: _plain(getattr(args, name)) for name in ("learning_rate", "seed", *_KEPT, *_USED)},
    }


def _plain(value: Any) -> Any:
    value = value.value if isinstance(value, Enum) else value
    return value if isinstance(value, (bool, int, float, type(None))) else str(value)


def _data(items: Any) -> dict[str, Any]:
    if isinstance(items, StreamItems):
        return {
            "kind": "a stream",
            "first rows": items.opening_fingerprint(),
            **items.made_of,
            "packed to": items.capacity,
            "packing_strategy": items.strategy if items.capacity else None,
            "shuffle_buffer_size": items.shuffle_window,
        }
    assert isinstance(items, RowItems)
    return {
        "kind": "rows" if items.bins is None else "packed rows",
        "number of items": len(items),
        "content": items.fingerprint(),
    }


def compare(trainer: Any, checkpoint: Path, now: Any) -> None:
    """Hold this run against the one that wrote the checkpoint.

    Raises `ConfigError` for another trainer or model, and, unless `resume_with_changes`, for other data or another
    order. What may differ is said.
    """
    then = read_record(checkpoint)
    if then is None:
        _compare_foreign(checkpoint, now)
        say(
            f"{checkpoint} has no {RECORD} of this library: whether data and batch sizes are the same cannot be checked"
        )
        return
    where = f"`resume_from_checkpoint`: {checkpoint}"
    if then["trainer"] != now["trainer"]:
        raise ConfigError(f"{where} was written by {then['trainer']}, and this is {now['trainer']}; resume with that.")
    _refuse_other_model(where, then, now)
    if then["optim"] != now["optim"]:
        raise ConfigError(
            f"{where} holds the state of `optim` {then['optim']!r}, and this run has {now['optim']!r}; set that, or "
            "start a new run with `model_name_or_path` set to it."
        )
    changed = [*_changes(then["data"], now["data"], "training data, "), *_changes(then["order"], now["order"])]
    if changed:
        text = f"{where} was written with other rows or another order: {'; '.join(changed)}"
        if not trainer.args.resume_with_changes:
            raise ConfigError(
                f"{text}. Rows would come twice or never. Set them back, or accept that with `resume_with_changes: "
                "true`."
            )
        say(f"{text}: rows may come twice or never (`resume_with_changes`)")
    _say_changes(then, now)


def read_record(checkpoint: Path) -> dict[str, Any] | None:
    """What `describe` gave when it was written; None where there is none, or another program's file of that name."""
    try:
        found = json.loads((checkpoint / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or any(not isinstance(found.get(name), kind) for name, kind in _ENTRIES.items()):
        return None
    return found


def _changes(then: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """e.g. {"data_seed": 1}, {"data_seed": 2} -> ["data_seed: 1 there, 2 here"]"""
    names = list(dict.fromkeys([*then, *now]))
    return [
        f"{prefix}{n}: {_short(then.get(n))} there, {_short(now.get(n))} here"
        for n in names
        if then.get(n) != now.get(n)
    ]


def _short(value: Any) -> str:
    return f"{value[:8]}…" if isinstance(value, str) and len(value) == 32 else repr(value)


def _refuse_other_model(where: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    if then["adapter"] != now["adapter"]:
        kinds = {True: "an adapter", False: "a whole model"}
        raise ConfigError(
            f"{where} holds {kinds[then['adapter']]}, and this run trains {kinds[now['adapter']]}; set `peft_config` "
            "as it was."
        )
    _refuse_shapes(where, then["shapes"], now["shapes"], then["model"], now["model"])
    if then["model"] != now["model"]:
        say(f"the checkpoint was written for the model {then['model']!r}, and this run has {now['model']!r}")


def _refuse_shapes(where: str, then: Mapping[str, Any], now: Mapping[str, Any], was: str, here: str) -> None:
    wrong = [name for name in [*now, *(n for n in then if n not in now)] if then.get(name) != now.get(name)]
    if wrong:
        name = wrong[0]
        raise ConfigError(
            f"{where} is another model's ({was!r} there, {here!r} here): {name} is {_shape(then.get(name))} there and "
            f"{_shape(now.get(name))} here; {len(wrong)} of {len(now)} tensors differ. Resume with the model that was "
            "trained."
        )


def _shape(shape: Any) -> str:
    return "missing" if shape is None else "×".join(map(str, shape))


def _compare_foreign(checkpoint: Path, now: Mapping[str, Any]) -> None:
    """Without a record: the shapes in its weight files."""
    adapted = now["adapter"]
    files = list(checkpoint.glob("*.safetensors"))
    if files and adapted != (checkpoint / "adapter_config.json").is_file():
        _refuse_other_model(f"`resume_from_checkpoint`: {checkpoint}", {"adapter": not adapted}, {"adapter": adapted})
    then: dict[str, list[int]] = {}
    for path in [] if adapted else files:
        with safe_open(str(path), framework="pt") as file:
            then |= {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    here = {name: shape for name, shape in now["shapes"].items() if name in then}
    there = {name: shape for name, shape in then.items() if name in here}
    _refuse_shapes(f"`resume_from_checkpoint`: {checkpoint}", there, here, "unknown", now["model"])


def _say_changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    if then["ranks"] != now["ranks"]:
        say(
            f"going on with {now['ranks']} processes, where {then['ranks']} saved: rows and their order stay; the "
            "state of the random generators does not fit, so dropout draws anew"
        )
    for names, what in (
        (_KEPT, "the optimizer's state keeps what it was saved with"),
        (("seed",), "the random generators go on as they were saved"),
        (_USED, "used from here on"),
    ):
        before = {name: then["settings"].get(name) for name in names}
        for text in _changes(before, {name: now["settings"][name] for name in names}):
            say(f"{text}; {what}")


# ---- going on --------------------------------------------------------------------------------------------------------


def restore(trainer: Any, checkpoint: Path) -> None:
    """What the base class does not: the cursor of a stream, and what callbacks keep or count."""
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    items, cursor = trainer.train_dataset, checkpoint / CURSOR
    if isinstance(items, StreamItems) and cursor.is_file():
        saved = torch.load(cursor, weights_only=True)
        items.load_state_dict(_unpacked(saved), state["global_step"] * trainer.args.gradient_accumulation_steps)
        if saved["place"]["stream"] is None:
            say(
                f"the stream does not say where it stands: {saved['place']['read']} rows are read again and passed "
                "over (a stream shuffled by `datasets`; `shuffle_dataset` is resumed without that)"
            )
    elif isinstance(items, StreamItems):
        say(f"{checkpoint} has no cursor: the stream is read again up to step {state['global_step']}")
    for callback in trainer.callback_handler.callbacks:
        read = getattr(callback, "read_state", None)
        if read is not None:
            read(checkpoint)
    if trainer.args.restore_callback_states_from_checkpoint:
        return
    stored = state.get("stateful_callbacks") or {}
    saved = {name: iter(each if isinstance(each, list) else [each]) for name, each in stored.items()}
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ExportableState):  # several of one class: in their order
            found = next(saved.get(type(callback).__name__, iter(())), None) or {}
            for name, value in found.get("attributes", {}).items():
                setattr(callback, name, value)


def going_on(
    trainer: Any, found: tuple[int, int], max_steps: int, updates: int, epochs: int, checkpoint: str | None, trial: Any
) -> tuple[int, int]:
    """The epoch and the micro-batch of it where a run begins, after the base class has read the state."""
    trainer.state.compute_steps(trainer.args, max_steps)  # logging and saving as asked now, not as they were
    best = trainer.state.best_global_step
    if checkpoint is not None and best and trainer.state.best_model_checkpoint is None:
        beside = Path(checkpoint).parent / f"checkpoint-{best}"  # its path is that of another folder, or has moved
        if beside.is_dir():
            trainer.state.best_model_checkpoint = str(beside)
    if trainer.state.global_step < max_steps:
        return found
    say(f"step {trainer.state.global_step} of {max_steps} is done: there is nothing left to train")
    return epochs, 0  # the base class would take one more step


def use_learning_rate(trainer: Any, checkpoint: str | None) -> None:
    """A learning rate that was changed takes effect, where it can, and which it was is said; loading the optimizer and
    the schedule brings the old one back."""
    record = read_record(Path(checkpoint)) if checkpoint is not None else None
    if record is None:
        return
    then, now = record["settings"].get("learning_rate"), trainer.args.learning_rate
    if then is None or then == now:
        return
    text = f"learning_rate: {then} there, {now} here"
    if trainer.is_deepspeed_enabled or not then:
        why = "DeepSpeed keeps what it saved" if trainer.is_deepspeed_enabled else "a rate of 0 cannot be scaled"
        say(f"{text}; the one saved stays, since {why}")
        return
    schedule, factor = trainer.lr_scheduler, now / then
    for group in trainer.optimizer.param_groups:
        group["lr"] *= factor
        group["initial_lr"] = group.get("initial_lr", then) * factor
    for name in ("base_lrs", "_last_lr"):  # a schedule that looks at the loss has no `base_lrs`
        if (rates := getattr(schedule, name, None)) is not None:
            setattr(schedule, name, [rate * factor for rate in rates])
    say(f"{text}; used from here on")


def write_run(trainer: Any, folder: Path) -> None:
    """`run.json`, and the cursor of a stream."""
    (folder / RECORD).write_text(json.dumps(trainer.run_record or describe(trainer), indent=1), encoding="utf-8")
    if isinstance(trainer.train_dataset, StreamItems):
        torch.save(_packed(trainer.train_dataset.state_dict()), folder / CURSOR)


def _packed(cursor: Mapping[str, Any]) -> dict[str, Any]:
    """Items held as tensors."""
    items = cursor["place"]["held"]
    held = [row for item in items for row in item]
    lengths = torch.tensor([len(row.input_ids) for row, _ in held], dtype=torch.int64)
    tensors = {
        "sizes": torch.tensor([len(item) for item in items], dtype=torch.int64),
        "lengths": lengths,
        "values": torch.tensor([row.values for row, _ in held], dtype=torch.float64),
        "input_ids": torch.tensor([i for row, _ in held for i in row.input_ids], dtype=torch.int32),
        "weights": torch.tensor([w for row, _ in held for w in row.weights], dtype=torch.float32),
        "source": torch.tensor([source for _, source in held], dtype=torch.int64),
    }
    return {**cursor, "place": {**cursor["place"], "held": tensors}}


def _unpacked(cursor: Mapping[str, Any]) -> dict[str, Any]:
    held = cursor["place"]["held"]
    lengths = held["lengths"].tolist()
    parts = (held[name].split(lengths) if lengths else () for name in ("input_ids", "weights"))
    rows = (
        (Row(ids.tolist(), weights.tolist(), tuple(values)), source)
        for ids, weights, values, source in zip(*parts, held["values"].tolist(), held["source"].tolist(), strict=True)
    )
    items = [[next(rows) for _ in range(size)] for size in held["sizes"].tolist()]
    return {**cursor, "place": {**cursor["place"], "held": items}}
