"""Preference rows → two sequences that start with one prompt, or three, and what the loss needs of each.

Prepared, a pair is two rows, the chosen one first and then the rejected one, and where a loss learns from a third
response that one last; each with its `values`: what `VALUES` names, one number each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from posttrain.data.drafts import row_weight
from posttrain.data.encode import Draft, Encoder
from posttrain.data.formats import maybe_convert_to_chatml, refuse_images
from posttrain.data.joining import is_stream
from posttrain.data.preference import prompt_apart
from posttrain.data.prepared import Plan, keep, opened
from posttrain.data.rows import at_row, completion_draft
from posttrain.errors import ConfigError, DataError, EmptyDataError

VALUES = ("margin", "weight", "reference")
"""What comes with a sequence: the margin and the weight of its pair, and the log-probability of its response under the
reference, NaN where it is not known; 0 for a third response, which is compared with none."""

TOKENIZED = ("prompt_ids", "chosen_ids", "rejected_ids")
SIDES = ("chosen", "rejected")
THIRD = "reference"
"""The column of a third response, as TRL's TPO has it: the best one known, to be learned by likelihood."""
_REFERENCES = ("ref_chosen_logps", "ref_rejected_logps")
KEPT, EMPTY, EQUAL, LONG = 0, 1, 2, 3
"""What becomes of a pair: it is kept, a response is empty, both are the same, or it is longer than the limit."""


@dataclass(frozen=True)
class PairOptions:
    """What `prepare_pairs` needs of the config."""

    max_length: int | None = 1024
    truncation_mode: str = "keep_start"
    margins: str = ""  # why the column `margin` would have no effect
    references: str = ""  # and the log-probabilities under a reference
    drop_long: bool = False  # a pair that is longer than the limit is dropped instead of cut
    at_end: bool = False  # the last token of each response has weight 1, and no other
    third: bool = False  # a loss learns from a third response

    @property
    def sides(self) -> tuple[str, ...]:
        """The columns of the responses."""
        return (*SIDES, THIRD) if self.third else SIDES


@dataclass
class PairReport:
    """What happened to the pairs. Nothing is dropped or cut that is not counted here."""

    name: str = "train"
    rows_in: int = 0
    rows_kept: int = 0
    rows_empty: int = 0  # a response without a token
    rows_equal: int = 0  # chosen and rejected are the same tokens
    third_equal: int = 0  # kept, and the third response is the same as one of the two
    rows_long: int = 0  # longer than the limit, where such pairs are not cut
    prompts_cut: int = 0
    responses_cut: int = 0
    tokens_cut: int = 0
    tokens: int = 0
    references: bool = False  # the rows bring log-probabilities under a reference
    third_unread: bool = False  # they bring a third response, and no loss learns from it

    @staticmethod
    def kept(found: Mapping[str, np.ndarray]) -> np.ndarray:
        return found["state"] == KEPT

    def add(self, found: Mapping[str, np.ndarray]) -> None:
        """Count pairs, from the columns that `_Counts` names."""
        state, kept = found["state"], self.kept(found)
        self.rows_in += len(state)
        self.rows_kept += int(kept.sum())
        self.rows_empty += int((state == EMPTY).sum())
        self.rows_equal += int((state == EQUAL).sum())
        self.rows_long += int((state == LONG).sum())
        self.third_equal += int(found["third_equal"].sum())
        self.prompts_cut += int((found["prompt_cut"] > 0).sum())
        self.responses_cut += int(found["responses_cut"].sum())
        self.tokens_cut += int(found["tokens_cut"].sum())
        self.tokens += int(found["tokens"].sum())

    def summary(self) -> str:
        """One line. e.g. "train: 9 of 10 pairs, 1200 tokens; 1 pair with equal responses dropped" """
        parts = [f"{self.name}: {self.rows_kept} of {self.rows_in} pairs, {self.tokens} tokens"]
        if self.rows_empty:
            parts.append(f"{self.rows_empty} with an empty response dropped")
        if self.rows_equal:
            parts.append(f"{self.rows_equal} with equal responses dropped")
        if self.rows_long:
            parts.append(f"{self.rows_long} longer than `max_length` dropped")
        if self.tokens_cut:
            parts.append(
                f"{self.prompts_cut} prompts and {self.responses_cut} responses cut, {self.tokens_cut} tokens lost"
            )
        if self.third_equal:
            parts.append(f"{self.third_equal} whose column {THIRD!r} is one of the two responses kept")
        if self.third_unread:
            parts.append(f"column {THIRD!r} is not read: no loss learns from a third response")
        if self.references:
            parts.append("reference log-probabilities are the rows' own")
        return "; ".join(parts)


class _Counts(NamedTuple):
    state: int
    prompt_cut: int
    responses_cut: int
    tokens_cut: int
    tokens: int
    third_equal: int = 0


class Tokens(NamedTuple):
    """Tokens of a prompt and a response, and where the response starts."""

    ids: np.ndarray
    weights: np.ndarray
    border: int

    @property
    def response(self) -> int:
        return len(self.ids) - self.border


def prepare_pairs(
    dataset: Any, tokenizer: Any, options: PairOptions, num_proc: int | None = None, name: str = "train"
) -> tuple[Any, PairReport]:
    """Return a data set with a row for each response of a pair (chosen, rejected, and the third where one is learned),
    in the columns `input_ids`, `weights`, `values` and `source` (the row it came from), and the report.

    Rows are `chosen` and `rejected` (and `reference`) with or without `prompt`, as text or chats, or token ids
    (`prompt_ids`, `chosen_ids`, `rejected_ids`, `reference_ids`); `margin`, `sample_weight`, and together
    `ref_chosen_logps` and `ref_rejected_logps` are read where they are. A list of mappings is taken as a data set. A
    stream stays one, of a row a pair, with a list for each response; its report fills as rows flow.

    e.g. {"prompt": "2+2=", "chosen": "4", "rejected": "5"} -> the ids of "2+2=4<eos>" and of "2+2=5<eos>"
    Raises `DataError` naming row, column and fix, `ConfigError` for columns that the options say have no effect, and
    `EmptyDataError` when no pair is left.
    """
    plan = _plan(dataset, tokenizer, options, num_proc, name)
    prepared, report = plan.rows(), plan.report
    if is_stream(prepared):
        return prepared, report
    if not report.rows_kept:
        raise EmptyDataError(
            f"The {name} set: none of its {report.rows_in} pairs can be trained: {report.rows_empty} have an empty "
            f"response, in {report.rows_equal} chosen and rejected are equal, and {report.rows_long} are longer than "
            f"`max_length` {options.max_length}."
        )
    return _laid(prepared, name), report


def counted_pairs(
    dataset: Any, tokenizer: Any, options: PairOptions, num_proc: int | None = None, name: str = "train"
) -> tuple[Any, PairReport]:
    """As `prepare_pairs`, but a row a pair, dropped ones included: the columns hold the responses, beside `state` and
    what was cut. Not of a stream."""
    plan = _plan(dataset, tokenizer, options, num_proc, name)
    return plan.counted_rows(), plan.report


def _plan(dataset: Any, tokenizer: Any, options: PairOptions, num_proc: int | None, name: str) -> Plan[PairReport]:
    dataset, columns = opened(dataset, name)
    _check_columns(columns, options, name)
    unread = not options.third and bool({THIRD, f"{THIRD}_ids"} & set(columns))
    report = PairReport(name, references=_REFERENCES[0] in columns, third_unread=unread)
    prepare, made = PairPreparer(tokenizer, options, name), _features(nested=True)
    return Plan(dataset, columns, prepare, report, made, _Counts._fields, num_proc, name)


def laid_pairs(counted: Any, name: str = "train") -> Any:
    """The pairs of `counted_pairs` that are kept, as a row a response."""
    return _laid(keep(counted, PairReport.kept, _Counts._fields), name)


def _laid(prepared: Any, name: str) -> Any:
    from datasets import Features

    return prepared.map(
        _apart,
        batched=True,
        remove_columns=prepared.column_names,
        features=Features(_features(nested=False)),
        desc=f"Laying out the {name} set",
    )


def _apart(batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Pairs → rows, one a response."""
    out = {name: [row for pair in batch[name] for row in pair] for name in ("input_ids", "weights", "values")}
    pairs = zip(batch["source"], batch["values"], strict=True)
    return {**out, "source": [source for source, values in pairs for _ in values]}


def _check_columns(columns: Sequence[str], options: PairOptions, name: str) -> None:
    ignored = {"margin": options.margins, **dict.fromkeys(_REFERENCES, options.references)}
    for column, why in ignored.items():
        if column in columns and why:
            raise ConfigError(f"The {name} set has the column {column!r}, and {why}; remove the column.")
    if len({*columns} & {*_REFERENCES}) == 1:
        raise DataError(f"The {name} set has one of the columns {list(_REFERENCES)}; give both, or none.")
    tokenized = set(TOKENIZED) <= set(columns)
    third = f"{THIRD}_ids" if tokenized else THIRD
    if options.third and third not in columns:
        raise DataError(
            f"The {name} set has no column {third!r}, and `loss_type` 'tpo' learns from a third response; add it, or "
            "take 'cpo', or a mix of 'sigmoid' and 'sft'."
        )
    if tokenized or {*SIDES} <= set(columns):
        return
    raise DataError(
        f"The {name} set has the columns {list(columns)}, and pairs need 'chosen' and 'rejected' (with 'prompt', or "
        "with the prompt inside both), or 'prompt_ids', 'chosen_ids' and 'rejected_ids'."
    )


def _features(nested: bool) -> dict[str, Any]:
    from datasets import List, Value

    of = {"input_ids": List(Value("int32")), "weights": List(Value("float32")), "values": List(Value("float32"))}
    return {**({name: List(kind) for name, kind in of.items()} if nested else of), "source": Value("int64")}


class PairPreparer:
    """A batch of rows → a batch of pairs and their counts. Final; a class so that it can be sent to other processes."""

    def __init__(self, tokenizer: Any, options: PairOptions, name: str) -> None:
        self.encoder, self.options, self.name = Encoder(tokenizer), options, name

    def __call__(self, batch: Mapping[str, Sequence[Any]], indices: Sequence[int]) -> dict[str, list[Any]]:
        rows = [{column: values[at] for column, values in batch.items()} for at in range(len(indices))]
        found = self.encode(rows, indices)
        values = [at_row(i, self.name, self._values, row) for i, row in zip(indices, rows, strict=True)]
        cut, counts = [], []
        for pair in found:
            whole, count = cut_pair(pair, self.options)
            cut.append(whole)
            counts.append(count)
        out: dict[str, list[Any]] = {
            "input_ids": [[x.ids for x in pair] for pair in cut],
            "weights": [[x.weights for x in pair] for pair in cut],
            "values": values,
            "source": list(indices),
        }
        return {**out, **{name: [getattr(count, name) for count in counts] for name in _Counts._fields}}

    def encode(self, rows: list[dict[str, Any]], indices: Sequence[int]) -> list[list[Tokens]]:
        """The responses of each pair before they are cut."""
        sides = self.options.sides
        if all(rows[0].get(name) is not None for name in TOKENIZED):
            names = ("prompt_ids", *(f"{side}_ids" for side in sides))
            return [at_row(i, self.name, tokenized, row, names) for i, row in zip(indices, rows, strict=True)]
        drafts = [d for i, row in zip(indices, rows, strict=True) for d in at_row(i, self.name, self._drafts, row)]
        encoded = [bordered(ids, weights) for ids, weights in self.encoder.encode(drafts)]
        return [encoded[at : at + len(sides)] for at in range(0, len(encoded), len(sides))]

    def _drafts(self, row: dict[str, Any]) -> list[Draft]:
        row, sides = maybe_convert_to_chatml(row), self.options.sides
        for side in sides:
            if row.get(side) is None:
                raise DataError(f"column {side!r} holds None; write a response in every row, or remove the row.")
        refuse_images({k: row[k] for k in ("prompt", *sides) if k in row})
        # A column that other rows fill is None here.
        row |= prompt_apart({k: row[k] for k in ("prompt", *sides) if row.get(k) is not None}, sides)
        shared = {k: row[k] for k in ("prompt", "tools", "chat_template_kwargs") if row.get(k) is not None}
        return [completion_draft(self.encoder, shared | {"completion": row[side]}, True, False) for side in sides]

    def _values(self, row: Mapping[str, Any]) -> list[list[float]]:
        """[sides][3]: the numbers `VALUES` names, of each response."""
        margin, weight = number(row, "margin", 0.0), row_weight(row)
        references = [number(row, column, math.nan) for column in _REFERENCES]
        return [[margin, weight, value] for value in (*references, *[0.0] * self.options.third)]


def bordered(ids: np.ndarray, weights: np.ndarray) -> Tokens:
    """An encoded row, whose response is what is trained."""
    trained = np.flatnonzero(weights)
    return Tokens(ids, weights, int(trained[0]) if len(trained) else len(ids))


def tokenized(row: Mapping[str, Any], names: Sequence[str] = TOKENIZED) -> list[Tokens]:
    """A prompt's token ids with those of each response. `names`: the columns, the prompt's first."""
    parts = []
    for name in names:
        ids = np.asarray(row[name] if row[name] is not None else [], dtype=object)
        if any(not isinstance(i, (int, np.integer)) for i in ids):
            raise DataError(f"column {name!r} holds {row[name]!r:.80}; write a list of token ids.")
        parts.append(ids.astype(np.int32))
    prompt, *responses = parts
    return [
        Tokens(
            np.concatenate([prompt, response]),
            np.concatenate([np.zeros(len(prompt), np.float32), np.ones(len(response), np.float32)]),
            len(prompt),
        )
        for response in responses
    ]


def cut_pair(pair: Sequence[Tokens], options: PairOptions) -> tuple[list[Tokens], _Counts]:
    """Cut a pair, or three, to the limit. The prompt gives way first, at its start and for all alike, down to one
    token; a response has what the prompt leaves, whatever the others have.

    e.g. limit 10, prompt of 8, responses of 4 and 2 -> prompts of 6, responses of 4 and 2
    """
    limit = options.max_length
    if min(x.response for x in pair) == 0:
        return _nothing(EMPTY, len(pair))
    if np.array_equal(pair[0].ids, pair[1].ids):
        return _nothing(EQUAL, len(pair))
    if options.drop_long and limit is not None and max(len(x.ids) for x in pair) > limit:
        return _nothing(LONG, len(pair))
    prompt_cut = prompt_excess(pair, limit)
    cut = [cut_response(x, prompt_cut, options) for x in pair]
    lost = [len(x.ids) - len(y.ids) for x, y in zip(pair, cut, strict=True)]
    responses_cut = sum(each > prompt_cut for each in lost)
    if not all(x.weights.any() for x in cut):
        return _nothing(EMPTY, len(pair))
    if np.array_equal(cut[0].ids, cut[1].ids):
        return _nothing(EQUAL, len(pair))
    if options.at_end:
        cut = [x._replace(weights=np.eye(1, len(x.ids), len(x.ids) - 1, dtype=np.float32)[0]) for x in cut]
    third_equal = any(np.array_equal(x.ids, third.ids) for third in cut[2:] for x in cut[:2])
    counts = _Counts(KEPT, prompt_cut, responses_cut, sum(lost), sum(len(x.ids) for x in cut), int(third_equal))
    return cut, counts


def prompt_excess(responses: Sequence[Tokens], limit: int | None) -> int:
    """Tokens to take from the start of a prompt, so that the longest of its responses fits; one token of it stays."""
    if limit is None:
        return 0
    room = max(1, limit - max(x.response for x in responses))
    return max(0, min(x.border for x in responses) - room)


def cut_response(x: Tokens, prompt_cut: int, options: PairOptions) -> Tokens:
    """A prompt without its first `prompt_cut` tokens, and what the limit then leaves of the response."""
    limit = options.max_length
    over = 0 if limit is None else max(0, len(x.ids) - prompt_cut - limit)
    keep = np.r_[prompt_cut : x.border, x.border : len(x.ids) - over]
    if over and options.truncation_mode == "keep_end":
        keep = np.r_[prompt_cut : x.border, x.border + over : len(x.ids)]
    weights = x.weights[keep].copy()
    weights[:1] = 0.0  # the first token has nothing before it to be predicted from
    return Tokens(x.ids[keep], weights, x.border - prompt_cut)


def _nothing(state: int, sides: int) -> tuple[list[Tokens], _Counts]:
    none = Tokens(np.zeros(0, np.int32), np.zeros(0, np.float32), 0)
    return [none] * sides, _Counts(state, 0, 0, 0, 0)


def number(row: Mapping[str, Any], column: str, default: float) -> float:
    """A column that may be missing. Raises `DataError` for what is no finite number."""
    value = row.get(column)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise DataError(f"column {column!r} is {value!r}; write a finite number, or leave it out.")
    return float(value)
