"""Rows of a data set → token ids and the weight of each token as a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from posttrain.data.chat import check_messages, template_of
from posttrain.data.drafts import chat_draft, pair_draft, row_weight, token_weights
from posttrain.data.encode import Draft, Encoder
from posttrain.data.formats import DatasetType, detect, is_conversational, maybe_convert_to_chatml, refuse_images
from posttrain.data.overflow import CONTINUED, KEPT, Limit, Overflow, PreparationReport
from posttrain.errors import ConfigError, DataError, EmptyDataError

# Rows a stream is read ahead by: enough to tokenize together, few enough to start at once.
STREAM_BATCH = 32
WEIGHED = ("row_weighed", "turns_weighed")


@dataclass(frozen=True)
class SFTRowOptions:
    """What `prepare_sft` needs of the config."""

    text_field: str = "text"
    max_length: int | None = 1024
    truncation_mode: str = "keep_start"
    overflow: Overflow = "truncate"
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    keep_long: bool = False  # leave rows longer than max_length to packing (wrapped)
    formatting_func: Callable[[dict[str, Any]], Any] | None = None  # row -> text or messages

    @property
    def limit(self) -> Limit:
        return Limit(None if self.keep_long else self.max_length, self.overflow, self.truncation_mode)


def prepare_sft(
    dataset: Any,
    tokenizer: Any,
    options: SFTRowOptions,
    num_proc: int | None = None,
    name: str = "train",
    allow_empty: bool = False,
) -> tuple[Any, PreparationReport]:
    """Return a data set with the columns `input_ids` (int32), `weights` (float32) and `source` (the row it came from),
    and the report.

    Rows are text, chats, prompt-completion pairs or token ids; see `posttrain.data.formats`. A list of mappings is
    taken as a data set. A stream stays one: its report fills as rows flow.

    e.g. {"prompt": "2+2=", "completion": "4"} -> the ids of "2+2=4<eos>" with weights 0, 0, 0, 0, 1, 1
    Raises `DataError` naming row, column and fix, `ConfigError` for an option that does not fit the rows, and
    `EmptyDataError` when no row is left to train, unless `allow_empty`.
    """
    from datasets import IterableDataset

    if isinstance(dataset, list):
        dataset = in_memory(dataset, name)
    streaming = isinstance(dataset, IterableDataset)
    first = next(iter(dataset), None)
    if first is None:
        raise EmptyDataError(f"The {name} set has no rows; check the file, the split and any filter.")
    columns = list(dict.fromkeys([*(dataset.column_names or ()), *first]))
    if "seq_lengths" in columns and "input_ids" in columns:
        dataset = dataset.map(_unpacked, batched=True, remove_columns=columns)
        first = next(iter(dataset))
        columns = list(first)
    kind = _kind(dict(first), columns, options, name)
    _check_options(kind, dict(first), options)
    report = PreparationReport(name)
    prepare = _Preparer(tokenizer, options, kind, name, report if streaming else None)
    arguments: dict[str, Any] = {
        "batched": True,
        "with_indices": True,
        "remove_columns": columns,
        "features": _features(counted=not streaming),
    }
    if streaming:
        prepare.known = frozenset(columns)
        prepared = dataset.map(prepare, batch_size=STREAM_BATCH, **arguments)
        # Selected again: a later row may bring columns the first one did not have.
        return prepared.select_columns(["input_ids", "weights", "source"]), report
    prepared = dataset.map(prepare, num_proc=num_proc, desc=f"Preparing the {name} set", **arguments)
    counted = [np.asarray(prepared.data.column(c)) for c in ("state", "cut", "tokens", "targets", "source")]
    report.add(*counted)
    report.add_weighed(*(np.asarray(prepared.data.column(c)) for c in WEIGHED))
    if not report.rows_kept and not allow_empty:
        raise EmptyDataError(report.why_empty(options.max_length))
    laid = np.isin(counted[0], (KEPT, CONTINUED))
    if not laid.all():
        # Flattened: rows behind an indices table are read one by one, which is slow in every epoch.
        prepared = prepared.select(np.flatnonzero(laid)).flatten_indices()
    return prepared.select_columns(["input_ids", "weights", "source"]), report


def whole_rows(
    dataset: Any, indices: Sequence[int], tokenizer: Any, options: SFTRowOptions, name: str = "train"
) -> tuple[DatasetType, list[tuple[np.ndarray, np.ndarray]]]:
    """The type of a data set in memory, and token ids and weights of some of its rows as they are before `max_length`.

    Raises `DataError` as `prepare_sft` does.
    """
    columns = list(dataset.column_names)
    first = dict(dataset[0])
    kind = _kind(first, columns, options, name)
    _check_options(kind, first, options)
    if not indices:
        return kind, []
    return kind, _Preparer(tokenizer, options, kind, name, None).encode(dataset[list(indices)], indices)


def in_memory(rows: list[dict[str, Any]], name: str) -> Any:
    """Rows in memory as a data set; a column that a row lacks is None there. Images are refused first: beside text they
    make no table."""
    import pyarrow as pa
    from datasets import Dataset

    for row in rows:
        refuse_images(row)
    try:
        # `datasets` would take the columns of the first row, and leave out the others without a word.
        columns = dict.fromkeys(column for row in rows for column in row)
        return Dataset.from_list([{**dict.fromkeys(columns), **row} for row in rows[:1]] + rows[1:])
    except (pa.ArrowException, TypeError) as error:
        raise DataError(
            f"The {name} set: its rows make no table ({error}); give a column one type in all rows."
        ) from error


def _unpacked(batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Rows that `pack_dataset` joined, one by one again: joined, they would see each other."""
    cuts = [np.cumsum([0, *lengths]).tolist() for lengths in batch["seq_lengths"]]
    parts: dict[str, list[Any]] = {name: [] for name in batch if name != "seq_lengths"}
    for name, values in parts.items():
        for row, cut in zip(batch[name], cuts, strict=True):
            values.extend(row[start:end] for start, end in pairwise(cut))
    return parts


def _features(counted: bool) -> Any:
    from datasets import Features, List, Value

    features = {"input_ids": List(Value("int32")), "weights": List(Value("float32")), "source": Value("int64")}
    if counted:
        features |= {name: Value("int32") for name in ("state", "cut", "tokens", "targets", *WEIGHED)}
    return Features(features)


def _kind(first: dict[str, Any], columns: list[str], options: SFTRowOptions, name: str) -> DatasetType:
    try:
        if options.formatting_func is None:
            return detect(columns, first, options.text_field)
        return "text" if isinstance(_formatted(options.formatting_func, first), str) else "messages"
    except DataError as error:
        raise DataError(f"Row 0 of the {name} set: {error}") from error


def _formatted(formatting_func: Callable[[dict[str, Any]], Any], row: dict[str, Any]) -> Any:
    value = formatting_func(row)
    if not isinstance(value, str) and not (isinstance(value, list) and value and isinstance(value[0], Mapping)):
        raise DataError(f"`formatting_func` returned a {type(value).__name__}; return text or a list of messages.")
    return value


def _check_options(kind: DatasetType, first: dict[str, Any], options: SFTRowOptions) -> None:
    chat = kind == "messages" or (kind == "prompt_completion" and is_conversational(maybe_convert_to_chatml(first)))
    if options.assistant_only_loss and not chat and not (kind == "tokenized" and "assistant_masks" in first):
        raise ConfigError(
            f"`assistant_only_loss` is on and the rows are {kind} without messages; turn it off, or give chats "
            "(or the column 'assistant_masks' beside 'input_ids')."
        )
    pairs = kind == "prompt_completion" or (kind == "tokenized" and {"completion_mask", "labels"} & set(first))
    if options.completion_only_loss and not pairs:
        raise ConfigError(
            f"`completion_only_loss` is on and the rows are {kind} without 'prompt' and 'completion'; turn it off"
            f"{', or use `assistant_only_loss`' if chat else ''}."
        )


class _Preparer:
    """A batch of rows → a batch of token ids. Final; a class so that it can be sent to other processes."""

    def __init__(
        self, tokenizer: Any, options: SFTRowOptions, kind: DatasetType, name: str, report: PreparationReport | None
    ) -> None:
        self.encoder = Encoder(tokenizer)
        self.options = options
        self.kind = kind
        self.name = name
        self.report = report
        self.known: frozenset[str] | None = None  # columns of a stream that are taken away
        self.seen = 0  # rows of a stream that were counted: it may begin again

    def __call__(self, batch: Mapping[str, Sequence[Any]], indices: Sequence[int]) -> dict[str, list[Any]]:
        whole, weighed = self._encoded(batch, indices)
        limit = self.options.limit
        made = [
            (index, piece)
            for index, (ids, weights) in zip(indices, whole, strict=True)
            for piece in self._at(index, limit.apply, ids, weights)
        ]
        states = [state for _, (_, _, state, _) in made]
        out: dict[str, list[Any]] = {
            "input_ids": [ids for _, (ids, *_) in made],
            "weights": [weights for _, (_, weights, *_) in made],
            "source": [index for index, _ in made],
        }
        counts: dict[str, list[Any]] = {
            "state": states,
            "cut": [cut for _, (*_, cut) in made],
            "tokens": [len(ids) for ids in out["input_ids"]],
            "targets": [int(np.count_nonzero(weights)) for weights in out["weights"]],
        }
        for at, name in enumerate(WEIGHED):  # on the first piece of each row
            left = dict(zip(indices, (pair[at] for pair in weighed), strict=True))
            counts[name] = [left.pop(index, 0) for index, _ in made]
        if self.report is None:
            return out | counts
        fresh = np.asarray(out["source"], dtype=np.int64) >= self.seen
        self.seen = max(self.seen, indices[-1] + 1)
        self.report.add_weighed(*(np.asarray(counts[name])[fresh] for name in WEIGHED))
        columns = (states, counts["cut"], counts["tokens"], counts["targets"], out["source"])
        self.report.add(*(np.asarray(values)[fresh] for values in columns))
        # A stream hands on what it is given, and rows are lists everywhere else.
        out |= {name: [values.tolist() for values in out[name]] for name in ("input_ids", "weights")}
        kept = {
            name: [v for v, s in zip(values, states, strict=True) if s in (KEPT, CONTINUED)]
            for name, values in out.items()
        }
        # A column that only later rows have stays in the stream, and must be as long as the others.
        late = [name for name in batch if name not in kept and name not in (self.known or ())]
        return kept | {name: [None] * len(kept["source"]) for name in late}

    def encode(self, batch: Mapping[str, Sequence[Any]], indices: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        """The whole rows, before `max_length`: token ids and weights of each."""
        return self._encoded(batch, indices)[0]

    def _encoded(
        self, batch: Mapping[str, Sequence[Any]], indices: Sequence[int]
    ) -> tuple[list[tuple[np.ndarray, np.ndarray]], list[tuple[int, int]]]:
        """What `encode` gives; and of each row whether it has a weight of its own, and how many of its turns have."""
        rows = [{column: values[at] for column, values in batch.items()} for at in range(len(indices))]
        if self.kind == "tokenized":
            whole = [self._at(index, _tokenized, row, self.options) for index, row in zip(indices, rows, strict=True)]
            own = (token_weights(row, len(row["input_ids"])) for row in rows)
            return whole, [(int((weights != 1).any()), 0) for weights in own]
        drafts = [self._at(index, self._weighed, row) for index, row in zip(indices, rows, strict=True)]
        turns = ([weight for weight in draft.weights or () if weight != 1] for draft in drafts)
        return self.encoder.encode(drafts), [
            (int(draft.weight != 1), len(own)) for draft, own in zip(drafts, turns, strict=True)
        ]

    def _at(self, index: int, fn: Callable[..., Any], *arguments: Any) -> Any:
        return at_row(index, self.name, fn, *arguments)

    def _weighed(self, row: dict[str, Any]) -> Draft:
        return replace(self._draft(row), weight=row_weight(row))

    def _draft(self, row: dict[str, Any]) -> Draft:
        if self.options.formatting_func is not None:
            value = _formatted(self.options.formatting_func, row)
            column = self.options.text_field if self.kind == "text" else "messages"
            row = {**{k: row[k] for k in ("tools", "chat_template_kwargs") if k in row}, column: value}
        row = maybe_convert_to_chatml(row)
        refuse_images({k: v for k, v in row.items() if k in ("messages", "prompt", "completion")})
        if self.kind == "text":
            text = _text(row, self.options.text_field)
            return Draft(text, [(0, len(text))], plain=True)
        if self.kind == "messages":
            return self._chat(row)
        only = self.options.completion_only_loss is not False
        return completion_draft(self.encoder, row, only, self.options.assistant_only_loss)

    def _chat(self, row: dict[str, Any]) -> Draft:
        template = template_of(self.encoder.tokenizer, row)
        messages = check_messages(row.get("messages"), "messages", template)
        return chat_draft(template, messages, self.options.assistant_only_loss)


def at_row(index: int, name: str, fn: Callable[..., Any], *arguments: Any) -> Any:
    """`fn(*arguments)`; its `DataError` then names the row and the set."""
    try:
        return fn(*arguments)
    except DataError as error:
        raise DataError(f"Row {index} of the {name} set: {error}") from error


def completion_draft(encoder: Encoder, row: Mapping[str, Any], completion_only: bool, assistant_only: bool) -> Draft:
    """A row with `prompt` and `completion`, both text or both chats, as a draft. Trained: the completion, or all."""
    if is_conversational(row):
        template = template_of(encoder.tokenizer, row)
        prompt, completion = (check_messages(row.get(name), name, template) for name in ("prompt", "completion"))
        return pair_draft(template, prompt, completion, completion_only, assistant_only)
    prompt, completion = _text(row, "prompt"), _text(row, "completion")
    whole = prompt + completion
    span = (len(prompt) if completion_only else 0, len(whole))
    return Draft(whole, [span], (len(prompt),) if prompt else (), is_pair=True, plain=True)


def _text(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise DataError(f"column {column!r} holds {_shown(value)}; write text in every row, or remove the row.")
    return value


def _shown(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _tokenized(row: dict[str, Any], options: SFTRowOptions) -> tuple[np.ndarray, np.ndarray]:
    value = row.get("input_ids")
    if not isinstance(value, (list, np.ndarray)):
        raise DataError(f"column 'input_ids' holds {_shown(value)}; write a list of token ids.")
    ids = np.asarray(value) if len(value) else np.empty(0, dtype=np.int32)
    if ids.dtype.kind not in "iu":
        raise DataError(f"column 'input_ids' holds {ids.dtype} values; write whole numbers.")
    ids = ids.astype(np.int32)
    positions = _aligned(row, "position_ids", len(ids))
    if positions is not None and not np.array_equal(positions, np.arange(len(ids))):
        raise DataError("column 'position_ids' restarts: the row was packed; give the rows apart, with `packing` on.")
    weights = np.ones(len(ids), dtype=np.float32)
    labels = _aligned(row, "labels", len(ids))
    if labels is not None:
        others = np.flatnonzero((labels != -100) & (labels != ids))
        if len(others):
            at = int(others[0])
            raise DataError(
                f"column 'labels' is {labels[at]} at token {at} and 'input_ids' is {ids[at]}; a label is the token "
                "itself, or -100 to leave it out (do not shift them)."
            )
        weights[labels == -100] = 0.0
    masks = [("completion_mask", options.completion_only_loss is not False)]
    masks.append(("assistant_masks", options.assistant_only_loss))
    for column, wanted in masks:
        mask = _aligned(row, column, len(ids)) if wanted else None
        if mask is not None:
            weights[mask == 0] = 0.0
    weights *= token_weights(row, len(ids))
    real = _aligned(row, "attention_mask", len(ids))
    # Padding never reaches the model, so it is taken out here.
    return (ids, weights) if real is None else (ids[real != 0], weights[real != 0])


def _aligned(row: Mapping[str, Any], column: str, length: int) -> np.ndarray | None:
    values = row.get(column)
    if values is None:
        return None
    if len(values) != length:
        raise DataError(f"column {column!r} has {len(values)} values and 'input_ids' {length}; write one a token.")
    return np.asarray(values, dtype=np.int64)
