"""Rows of a prompt and one response with a label → sequences, and what the loss needs of each.

Pairs are taken too: each becomes two rows, the chosen response desirable, the rejected one not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from posttrain.data.drafts import row_weight
from posttrain.data.encode import Encoder
from posttrain.data.formats import maybe_convert_to_chatml, refuse_images
from posttrain.data.joining import is_stream
from posttrain.data.pairs import PairOptions, Tokens, bordered, cut_response, number, prompt_excess, tokenized
from posttrain.data.preference import maybe_extract_prompt, unpair_preference_dataset
from posttrain.data.prepared import Plan, keep, opened
from posttrain.data.rows import STREAM_BATCH, at_row, completion_draft
from posttrain.errors import ConfigError, DataError, EmptyDataError

VALUES = ("desirable", "weight", "reference")
"""What comes with a sequence: 1 for a desirable response and 0 for another, the weight of the row, and the
log-probability of the response under the reference, NaN where it is not known."""

TOKENIZED = ("prompt_ids", "completion_ids")
_REFERENCE = "ref_logps"
_COUNTS = ("kept", "prompt_cut", "response_cut", "tokens", "label")


@dataclass
class UnpairedReport:
    """What happened to the rows. Nothing is dropped or cut that is not counted here."""

    name: str = "train"
    pairs: int = 0  # pairs of which two rows were made each
    paired: bool = False  # whether the rows are made of pairs
    rows_in: int = 0
    rows_kept: int = 0
    rows_empty: int = 0  # a response without a token
    desirable: int = 0  # of the rows kept
    undesirable: int = 0
    prompts_cut: int = 0
    responses_cut: int = 0
    tokens_cut: int = 0
    tokens: int = 0
    references: bool = False  # the rows bring log-probabilities under a reference

    @staticmethod
    def kept(found: Mapping[str, np.ndarray]) -> np.ndarray:
        return found["kept"] > 0

    def add(self, found: Mapping[str, np.ndarray]) -> None:
        """Count rows, from the columns that `_COUNTS` names."""
        kept = self.kept(found)
        self.rows_in += len(kept)
        self.rows_kept += int(kept.sum())
        self.rows_empty = self.rows_in - self.rows_kept
        self.pairs = self.rows_in // 2 if self.paired else 0
        self.desirable += int((kept & (found["label"] > 0)).sum())
        self.undesirable = self.rows_kept - self.desirable
        self.prompts_cut += int((found["prompt_cut"] > 0).sum())
        self.responses_cut += int((found["response_cut"] > 0).sum())
        self.tokens_cut += int(found["prompt_cut"].sum() + found["response_cut"].sum())
        self.tokens += int(found["tokens"].sum())

    def summary(self) -> str:
        """One line. e.g. "train: 9 of 10 rows, 1200 tokens; 5 desirable, 4 not; 1 with an empty response dropped" """
        parts = [f"{self.name}: {self.rows_kept} of {self.rows_in} rows, {self.tokens} tokens"]
        if self.pairs:
            parts.append(f"made of {self.pairs} pairs")
        parts.append(f"{self.desirable} desirable, {self.undesirable} not")
        if self.rows_empty:
            parts.append(f"{self.rows_empty} with an empty response dropped")
        if self.tokens_cut:
            parts.append(
                f"{self.prompts_cut} prompts and {self.responses_cut} responses cut, {self.tokens_cut} tokens lost"
            )
        if not (self.desirable and self.undesirable):
            parts.append("only one class: nothing tells the model what to prefer to what")
        if self.references:
            parts.append("reference log-probabilities are the rows' own")
        return "; ".join(parts)


def prepare_unpaired(
    dataset: Any, tokenizer: Any, options: PairOptions, num_proc: int | None = None, name: str = "train"
) -> tuple[Any, UnpairedReport]:
    """Return a data set with the columns `input_ids`, `weights`, `values` and `source` (the row it came from), and the
    report.

    Rows are `prompt`, `completion` and a boolean `label`, as text or chats, or token ids (`prompt_ids`,
    `completion_ids`); or pairs, with or without `prompt`. `sample_weight` and `ref_logps` are read where they are. A
    list of mappings is taken as a data set. A stream stays one; its report fills as rows flow. The prompt gives way
    first, as in `posttrain.data.pairs.cut_pair`.

    e.g. {"prompt": "2+2=", "completion": "4", "label": True} -> the ids of "2+2=4<eos>", values [1.0, 1.0, nan]
    Raises `DataError` naming row, column and fix, `ConfigError` for columns that the options say have no effect, and
    `EmptyDataError` when no row is left.
    """
    dataset, columns = opened(dataset, name)
    paired = {"chosen", "rejected"} <= {*columns}
    if paired:
        shown = {} if is_stream(dataset) else {"desc": f"Reading the {name} pairs"}
        dataset = dataset.map(_at_pair, with_indices=True, fn_kwargs={"name": name}, **shown)
        # As few at a time whole as streamed, so that the order is one.
        dataset = unpair_preference_dataset(dataset, batch_size=STREAM_BATCH)
    plan = _plan(dataset, tokenizer, options, num_proc, name)
    plan.report.paired = paired
    prepared, report = plan.rows(), plan.report
    if not is_stream(prepared) and not report.rows_kept:
        raise EmptyDataError(f"The {name} set: all of its {report.rows_in} rows have an empty response.")
    return prepared, report


def counted_rows(
    dataset: Any, tokenizer: Any, options: PairOptions, num_proc: int | None = None, name: str = "train"
) -> tuple[Any, UnpairedReport]:
    """As `prepare_unpaired` for rows that are no pairs, but with the dropped ones, and beside each what was cut. Not of
    a stream."""
    plan = _plan(dataset, tokenizer, options, num_proc, name)
    return plan.counted_rows(), plan.report


def _plan(dataset: Any, tokenizer: Any, options: PairOptions, num_proc: int | None, name: str) -> Plan[UnpairedReport]:
    dataset, columns = opened(dataset, name)
    _check_columns(columns, options, name)
    report, prepare = UnpairedReport(name, references=_REFERENCE in columns), UnpairedPreparer(tokenizer, options, name)
    return Plan(dataset, columns, prepare, report, _features(), _COUNTS, num_proc, name)


def _at_pair(row: dict[str, Any], index: int, name: str) -> dict[str, Any]:
    return at_row(index, name, with_prompt, row)


def laid_rows(counted: Any) -> Any:
    """The rows of `counted_rows` that are kept."""
    return keep(counted, UnpairedReport.kept, _COUNTS)


def with_prompt(row: dict[str, Any]) -> dict[str, Any]:
    """A pair whose prompt stands apart. Raises `DataError` for one without a response."""
    row = maybe_convert_to_chatml(row)
    sides = {name: row[name] for name in ("prompt", "chosen", "rejected") if row.get(name) is not None}
    if not {"chosen", "rejected"} <= set(sides):
        raise DataError("a pair holds None for 'chosen' or 'rejected'; write both in every row, or remove the row.")
    return row | maybe_extract_prompt(sides)


def _check_columns(columns: Sequence[str], options: PairOptions, name: str) -> None:
    if _REFERENCE in columns and options.references:
        raise ConfigError(f"The {name} set has the column {_REFERENCE!r}, and {options.references}; remove the column.")
    if not (set(TOKENIZED) <= set(columns) or {"prompt", "completion"} <= set(columns)):
        raise DataError(
            f"The {name} set has the columns {list(columns)}, and rows need 'prompt', 'completion' and 'label' (or "
            "'prompt_ids', 'completion_ids' and 'label'), or pairs 'chosen' and 'rejected'."
        )
    if "label" not in columns:
        raise DataError(
            f"The {name} set has no column 'label'; it says of each response whether it is desirable: true or false."
        )


def _features() -> dict[str, Any]:
    from datasets import List, Value

    of = {"input_ids": List(Value("int32")), "weights": List(Value("float32")), "values": List(Value("float32"))}
    return {**of, "source": Value("int64")}


class UnpairedPreparer:
    """A batch of rows → a batch of sequences. Final; a class so that it can be sent to other processes."""

    def __init__(self, tokenizer: Any, options: PairOptions, name: str) -> None:
        self.encoder, self.options, self.name = Encoder(tokenizer), options, name

    def __call__(self, batch: Mapping[str, Sequence[Any]], indices: Sequence[int]) -> dict[str, list[Any]]:
        rows = [{column: values[at] for column, values in batch.items()} for at in range(len(indices))]
        values = [at_row(i, self.name, _values, row) for i, row in zip(indices, rows, strict=True)]
        out: dict[str, list[Any]] = {name: [] for name in ("input_ids", "weights", *_COUNTS)}
        for x, (label, *_) in zip(self.encode(rows, indices), values, strict=True):
            cut, prompt_cut, lost = self.cut(x)
            kept = bool(cut.weights.any())
            counts = (1, prompt_cut, lost, len(cut.ids), int(label)) if kept else (0, 0, 0, 0, int(label))
            for name, value in zip(out, (cut.ids, cut.weights, *counts), strict=True):
                out[name].append(value)
        return {**out, "values": values, "source": list(indices)}

    def cut(self, x: Tokens) -> tuple[Tokens, int, int]:
        """A row cut to the limit, and the tokens that its prompt and its response lost."""
        prompt_cut = prompt_excess([x], self.options.max_length)
        cut = cut_response(x, prompt_cut, self.options)
        return cut, prompt_cut, len(x.ids) - len(cut.ids) - prompt_cut

    def encode(self, rows: list[dict[str, Any]], indices: Sequence[int]) -> list[Tokens]:
        """Rows before they are cut."""
        if all(rows[0].get(name) is not None for name in TOKENIZED):
            return [at_row(i, self.name, _tokenized, row)[0] for i, row in zip(indices, rows, strict=True)]
        drafts = [at_row(i, self.name, self._draft, row) for i, row in zip(indices, rows, strict=True)]
        return [bordered(ids, weights) for ids, weights in self.encoder.encode(drafts)]

    def _draft(self, row: dict[str, Any]) -> Any:
        row = maybe_convert_to_chatml(row)
        refuse_images({k: row[k] for k in ("prompt", "completion") if k in row})
        known = ("prompt", "completion", "tools", "chat_template_kwargs")
        return completion_draft(self.encoder, {k: row[k] for k in known if row.get(k) is not None}, True, False)


def _tokenized(row: Mapping[str, Any]) -> list[Tokens]:
    return tokenized(row, TOKENIZED)


def _values(row: Mapping[str, Any]) -> list[float]:
    """[3]: the numbers `VALUES` names."""
    label = row.get("label")
    if not isinstance(label, (bool, np.bool_)):
        raise DataError(f"column 'label' is {label!r}; write true for a desirable response and false for another.")
    return [float(label), row_weight(row), number(row, _REFERENCE, math.nan)]
