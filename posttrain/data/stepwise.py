"""Rows of a prompt and labelled steps → sequences with a read-out at the end of each step.

Weights are signed here: above 0 where a step is correct, below where it is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from posttrain.data.chat import template_of
from posttrain.data.drafts import row_weight
from posttrain.data.encode import Draft, Encoder
from posttrain.data.formats import check_chat, check_steps, maybe_convert_to_chatml, refuse_images
from posttrain.data.joining import is_stream
from posttrain.data.prepared import Plan, keep, opened
from posttrain.data.rows import at_row
from posttrain.errors import DataError, EmptyDataError

TOKENIZED = ("input_ids", "labels")
_IGNORED = -100
_COUNTS = ("steps", "correct", "steps_cut", "tokens")


@dataclass(frozen=True)
class StepOptions:
    """What `prepare_steps` needs of the config."""

    max_length: int | None = 1024
    max_completion_length: int | None = None
    separator: str = "\n"
    last_only: bool = False  # train the last step of a row alone


@dataclass
class StepReport:
    """What happened to the rows. Nothing is dropped or cut that is not counted here."""

    name: str = "train"
    rows_in: int = 0
    rows_kept: int = 0
    steps: int = 0  # that are trained
    correct: int = 0  # of them
    steps_cut: int = 0  # that end beyond the limit, of all rows
    tokens: int = 0

    @staticmethod
    def kept(found: Mapping[str, np.ndarray]) -> np.ndarray:
        return found["steps"] > 0

    def add(self, found: Mapping[str, np.ndarray]) -> None:
        """Count rows, from the columns that `_COUNTS` names."""
        self.rows_in += len(found["steps"])
        self.rows_kept += int(self.kept(found).sum())
        self.steps += int(found["steps"].sum())
        self.correct += int(found["correct"].sum())
        self.steps_cut += int(found["steps_cut"].sum())
        self.tokens += int(found["tokens"].sum())

    def summary(self) -> str:
        """One line. e.g. "train: 9 of 10 rows, 1200 tokens; 40 steps, 31 correct; 4 steps beyond the limit dropped" """
        parts = [f"{self.name}: {self.rows_kept} of {self.rows_in} rows, {self.tokens} tokens"]
        parts.append(f"{self.steps} steps, {self.correct} correct")
        if self.steps_cut:
            parts.append(f"{self.steps_cut} steps beyond the limit dropped")
        if self.rows_kept < self.rows_in:
            parts.append(f"{self.rows_in - self.rows_kept} rows without a step left dropped")
        if self.correct in (0, self.steps):
            parts.append("only one class: nothing tells the model what is correct from what is not")
        return "; ".join(parts)


class Steps(NamedTuple):
    """Tokens of a prompt with its steps."""

    ids: np.ndarray
    ends: np.ndarray  # last token of each step's separator
    border: int  # where the first step starts
    labels: Sequence[bool]


def prepare_steps(
    dataset: Any, tokenizer: Any, options: StepOptions, num_proc: int | None = None, name: str = "train"
) -> tuple[Any, StepReport]:
    """Return a data set with the columns `input_ids`, `weights` and `source` (the row it came from), and the report.

    Rows are `prompt` (text or a chat), `completions` (the steps) and `labels` (whether each is correct); or `input_ids`
    with `labels`, 1 or 0 where a step ends and -100 elsewhere. `sample_weight` is read where it is. Prompt, steps and
    separators are tokenized apart, so the ids of the first steps do not depend on those that follow. A step that ends
    beyond the limit is dropped and counted. A list of mappings is taken as a data set. A stream stays one; its report
    fills as rows flow.

    e.g. {"prompt": "3*4+1=", "completions": ["3*4=12", "12+1=14"], "labels": [True, False]}, separator "\\n" -> the
    ids of "3*4+1=3*4=12\\n12+1=14\\n", weight 1 at the first "\\n" and -1 at the second
    Raises `DataError` naming row, column and fix, and `EmptyDataError` when no row is left.
    """
    plan = _plan(dataset, tokenizer, options, num_proc, name)
    prepared, report = plan.rows(), plan.report
    if not is_stream(prepared) and not report.rows_kept:
        raise EmptyDataError(
            f"The {name} set: in none of its {report.rows_in} rows is a step left to train: {report.steps_cut} steps "
            f"end beyond `max_length` {options.max_length} or `max_completion_length` {options.max_completion_length}, "
            "and rows of `sample_weight` 0 have none."
        )
    return prepared, report


def counted_steps(
    dataset: Any, tokenizer: Any, options: StepOptions, num_proc: int | None = None, name: str = "train"
) -> tuple[Any, StepReport]:
    """As `prepare_steps`, but with the dropped rows, and beside each row its steps and those that were cut. Not of a
    stream."""
    plan = _plan(dataset, tokenizer, options, num_proc, name)
    return plan.counted_rows(), plan.report


def laid_steps(counted: Any) -> Any:
    """The rows of `counted_steps` that are kept."""
    return keep(counted, StepReport.kept, _COUNTS)


def _plan(dataset: Any, tokenizer: Any, options: StepOptions, num_proc: int | None, name: str) -> Plan[StepReport]:
    dataset, columns = opened(dataset, name)
    if not ({"prompt", "completions", "labels"} <= {*columns} or set(TOKENIZED) <= {*columns}):
        raise DataError(
            f"The {name} set has the columns {columns}, and rows need 'prompt', 'completions' (a list of steps) and "
            "'labels' (true or false for each), or 'input_ids' and 'labels'."
        )
    prepare = StepPreparer(tokenizer, options, name)
    return Plan(dataset, columns, prepare, StepReport(name), _features(), _COUNTS, num_proc, name)


def _features() -> dict[str, Any]:
    from datasets import List, Value

    return {"input_ids": List(Value("int32")), "weights": List(Value("float32")), "source": Value("int64")}


class StepPreparer:
    """A batch of rows → a batch of sequences. Final; a class so that it can be sent to other processes."""

    def __init__(self, tokenizer: Any, options: StepOptions, name: str) -> None:
        self.encoder, self.options, self.name = Encoder(tokenizer), options, name

    def __call__(self, batch: Mapping[str, Sequence[Any]], indices: Sequence[int]) -> dict[str, list[Any]]:
        rows = [{column: values[at] for column, values in batch.items()} for at in range(len(indices))]
        out: dict[str, list[Any]] = {name: [] for name in ("input_ids", "weights", *_COUNTS)}
        for at, row in zip(indices, rows, strict=True):
            for name, value in zip(out, at_row(at, self.name, self._row, row), strict=True):
                out[name].append(value)
        return {**out, "source": list(indices)}

    def _row(self, row: dict[str, Any]) -> tuple[Any, ...]:
        weight, whole = row_weight(row), self.encode(row)
        kept = whole.ends[whole.ends < self._room(whole)]
        cut = len(whole.ends) - len(kept)
        signs = np.where(np.asarray(whole.labels[: len(kept)], bool), 1, -1)
        if self.options.last_only:  # of the row, not of what the limit leaves of it
            kept, signs = (kept[:0], signs[:0]) if cut else (kept[-1:], signs[-1:])
        if not weight or not len(kept):
            return np.zeros(0, np.int32), np.zeros(0, np.float32), 0, 0, cut, 0
        ids = whole.ids[: kept[-1] + 1]
        weights = np.zeros(len(ids), np.float32)
        weights[kept] = weight * signs
        return ids, weights, len(kept), int((signs > 0).sum()), cut, len(ids)

    def encode(self, row: dict[str, Any]) -> Steps:
        """A row before it is cut."""
        return _tokenized(row) if row.get("input_ids") is not None else self._encoded(row)

    def _room(self, steps: Steps) -> int:
        limits = (self.options.max_length, self.options.max_completion_length)
        whole, after = (len(steps.ids) if limit is None else limit for limit in limits)
        return min(whole, steps.border + after)

    def _encoded(self, row: dict[str, Any]) -> Steps:
        row = maybe_convert_to_chatml({name: value for name, value in row.items() if value is not None})
        refuse_images({k: row[k] for k in ("prompt",) if k in row})
        check_steps(row)
        prompt, prefix = self._prompt(row)
        texts = [prompt]
        for step in row["completions"]:
            texts += [step, self.options.separator]
        parts = self.encoder.apart(Draft("".join(texts), [], tuple(np.cumsum([len(text) for text in texts])[:-1])))
        lengths = np.array([len(part) for part in parts])
        if not lengths[2::2].all():
            raise DataError(f"`step_separator` is {self.options.separator!r}, which has no token here; set another.")
        ids = np.concatenate([np.asarray(prefix, np.int32), *parts])
        return Steps(ids, (len(prefix) + np.cumsum(lengths) - 1)[2::2], len(prefix) + lengths[0], row["labels"])

    def _prompt(self, row: Mapping[str, Any]) -> tuple[str, list[int]]:
        """Its text, and the ids that the tokenizer puts before every plain text."""
        prompt: Any = row.get("prompt")
        if isinstance(prompt, str):
            return prompt, self.encoder.prefix
        check_chat(prompt, "prompt")
        return template_of(self.encoder.tokenizer, row).render(prompt, add_generation_prompt=True), []


def _tokenized(row: Mapping[str, Any]) -> Steps:
    ids, labels = row["input_ids"], row.get("labels")
    if not isinstance(labels, (list, np.ndarray)) or len(labels) != len(ids):
        raise DataError(f"column 'labels' is {labels!r:.80}; write one number for each of the {len(ids)} tokens.")
    marks = np.asarray(labels)
    if not np.isin(marks, (0, 1, _IGNORED)).all():
        raise DataError(f"column 'labels' is {labels!r:.80}; write 1 or 0 where a step ends, and -100 elsewhere.")
    ends = np.flatnonzero(marks != _IGNORED)
    return Steps(np.asarray(ids, np.int32), ends, 0, (marks[ends] == 1).tolist())
