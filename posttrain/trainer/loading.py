"""The engine's own data loaders: rank-aware, and never handed to accelerate, which repeats rows to even batches out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from datasets import IterableDataset
from torch.utils.data import DataLoader

from posttrain.data.packing import Piece, drop_untrained, plan_bins
from posttrain.data.sampling import (
    Collator,
    Item,
    RowItems,
    WindowSampler,
    refuse_long_rows,
    refuse_unknown_ids,
    row_lengths,
)
from posttrain.data.stream import StreamItems
from posttrain.errors import ConfigError, EmptyDataError
from posttrain.parallel.ranks import rank, say, world_size

_WINDOW = 1000  # the default of `shuffle_buffer_size`


class EpochLoader(DataLoader):
    """A loader that tells its sampler the epoch; the base class asks the loader, not the sampler."""

    def set_epoch(self, epoch: int) -> None:
        if isinstance(self.batch_sampler, WindowSampler):
            self.batch_sampler.set_epoch(epoch)


def train_loader(items: RowItems | StreamItems, args: Any, collator: Collator) -> DataLoader:
    """Micro-batches of one rank, each {"batch": TokenBatch}."""
    if isinstance(items, StreamItems):
        return DataLoader(items, batch_size=None, collate_fn=collator, **_worker_options(args, streaming=True))
    strategy = args.train_sampling_strategy
    if strategy not in ("random", "sequential", "group_by_length"):
        raise ConfigError(f"`train_sampling_strategy` is {strategy!r}; expected random, sequential or group_by_length.")
    if strategy == "group_by_length":
        say("train_sampling_strategy: group_by_length is random here; without padding like lengths gain nothing")
    sampler = WindowSampler(
        len(items),
        args.per_device_train_batch_size,
        args.gradient_accumulation_steps,
        world_size(),
        rank(),
        seed=None if strategy == "sequential" else order_seed(args),
        costs=items.costs,
        drop_last=args.dataloader_drop_last,
    )
    if not len(sampler):
        raise ConfigError(
            f"`dataloader_drop_last` is on, and {len(items)} items fill no micro-batch of "
            f"`per_device_train_batch_size` {args.per_device_train_batch_size} on {world_size()} rank(s); "
            "lower it, or keep the last batch."
        )
    return EpochLoader(items, batch_sampler=sampler, collate_fn=collator, **_worker_options(args))


def order_seed(args: Any) -> int:
    """What the order of the rows is drawn from: `data_seed`, else `seed`."""
    return args.seed if args.data_seed is None else args.data_seed


def eval_loader(items: RowItems, args: Any, collator: Collator) -> DataLoader:
    """Micro-batches of one rank; the last ones may be empty, so that every rank has as many."""
    sampler = WindowSampler(len(items), args.per_device_eval_batch_size, 1, world_size(), rank())
    return DataLoader(items, batch_sampler=sampler, collate_fn=collator, **_worker_options(args))


def _worker_options(args: Any, streaming: bool = False) -> dict[str, Any]:
    workers = 0 if streaming else args.dataloader_num_workers
    if streaming and args.dataloader_num_workers:
        raise ConfigError("`dataloader_num_workers` must be 0 with streaming: each worker would read the whole stream.")
    # Its own generator: a loader would else draw from the global one, and evaluating would change training.
    options: dict[str, Any] = {
        "generator": torch.Generator().manual_seed(args.seed),
        "num_workers": workers,
        "pin_memory": args.dataloader_pin_memory and not args.use_cpu,
    }
    if workers:
        options["persistent_workers"] = args.dataloader_persistent_workers
        options["prefetch_factor"] = args.dataloader_prefetch_factor
        options["multiprocessing_context"] = args.dataloader_multiprocessing_context
    return options


def make_items(
    rows: Any, args: Any, packing: bool, name: str, made_of: dict[str, Any] | None = None, report: Any = None
) -> RowItems | StreamItems:
    """Prepared rows → what the loader indexes: rows, or bins of `max_length` tokens packed over the whole set.

    made_of, report: see `stream_items`
    """
    # Evaluation never cuts a row at a bin's border: its loss would depend on the packing.
    capacity = args.max_length if packing else None
    strategy = args.packing_strategy if packing and name == "train" else "bfd"
    shuffled = args.shuffle_dataset and name == "train"
    if isinstance(rows, IterableDataset):
        return stream_items(rows, args, name, made_of, report, capacity=capacity, strategy=strategy)
    _say_unused_window(args, name)
    if shuffled:
        rows = rows.shuffle(seed=order_seed(args))
    bins = None if capacity is None else plan_bins(row_lengths(rows), capacity, strategy)
    if bins is not None and strategy != "bfd":
        bins, dropped = drop_untrained(bins, rows["weights"][:])
        if dropped:
            say(f"{name}: {dropped} pieces of cut rows without targets dropped")
    return RowItems(rows, bins)


def _say_unused_window(args: Any, name: str) -> None:
    if name == "train" and args.shuffle_buffer_size != _WINDOW:
        say(
            f"`shuffle_buffer_size` {args.shuffle_buffer_size} is not used: the rows are no stream, and "
            "`shuffle_dataset` shuffles them all"
        )


def unpacked_items(
    rows: Any, report: Any, args: Any, name: str, made_of: dict[str, Any], sides: int = 1
) -> RowItems | StreamItems:
    """Prepared rows → one item for each `sides` of them, 2 or 3 of a pair; their report is said.

    made_of: see `stream_items`
    """
    if isinstance(rows, IterableDataset):
        return stream_items(rows, args, name, made_of, report, grouped=sides > 1)
    say(report.summary())
    _say_unused_window(args, name)
    if args.shuffle_dataset and name == "train":
        order = np.random.default_rng(order_seed(args)).permutation(len(rows) // sides)
        rows = rows.select((order[:, None] * sides + np.arange(sides)).ravel()).flatten_indices()
    return grouped_items(rows, sides)


def grouped_items(rows: Any, sides: int) -> RowItems:
    """One item for each `sides` rows."""
    if sides == 1:
        return RowItems(rows)
    pieces = [Piece(i, 0, length) for i, length in enumerate(row_lengths(rows))]
    return RowItems(rows, [pieces[i : i + sides] for i in range(0, len(pieces), sides)])


def stream_items(
    rows: Any, args: Any, name: str, made_of: dict[str, Any] | None, report: Any, **more: Any
) -> StreamItems:
    """Items of a prepared stream.

    made_of: what its rows come from and how they are made, for the record of the run. report: what is counted while it
    flows
    Raises `ConfigError` for a set to evaluate on, and for fields that need a length.
    """
    if name != "train":
        raise ConfigError("`eval_dataset` is a stream, which has no end to average over; take(n) rows into a Dataset.")
    if args.max_steps < 1:
        raise ConfigError(f"`max_steps` is {args.max_steps}; a streamed data set has no length: set the steps to run.")
    if getattr(args, "precompute_ref_log_probs", False):
        raise ConfigError(
            "`precompute_ref_log_probs` is on, and the train set is a stream, which is not scored before training; "
            "turn it off, or read the set whole (`dataset_streaming` off)."
        )
    return StreamItems(
        rows,
        args.per_device_train_batch_size,
        world_size(),
        rank(),
        on_empty=lambda: EmptyDataError(f"The {name} stream has no row with something to train: {report.summary()}."),
        shuffle_window=args.shuffle_buffer_size if args.shuffle_dataset else 0,
        seed=order_seed(args),
        made_of=made_of,
        report=report,
        **more,
    )


def first_items(items: RowItems | StreamItems | None, count: int) -> list[Item]:
    """The first items of a set, or as many as it has."""
    if isinstance(items, StreamItems):
        return items.first(count)
    return [items[i] for i in range(min(count, len(items)))] if items is not None else []


def check_ids(items: RowItems | StreamItems | None, vocabulary: int, positions: int | None = None) -> None:
    """Raise `DataError` when a row holds a token id that the model has no embedding for, or is longer than its table of
    positions; a stream is checked as it flows."""
    if isinstance(items, StreamItems):
        items.vocabulary, items.positions = vocabulary, positions
    elif items is not None:
        ids = items.rows.with_format("arrow")[:]["input_ids"]
        extremes = pc.call_function("min_max", [pc.call_function("list_flatten", [ids])]).as_py()
        refuse_unknown_ids(extremes["min"], extremes["max"], vocabulary)
        refuse_long_rows(items.row_lengths, positions)
