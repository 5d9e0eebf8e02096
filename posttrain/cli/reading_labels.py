"""Rows that a judge has been over, read with the code that trains: pairs, labelled responses, labelled steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np

from posttrain.cli.reading import Reader
from posttrain.data.overflow import PreparationReport
from posttrain.data.pairs import (
    EMPTY,
    EQUAL,
    KEPT,
    LONG,
    PairOptions,
    PairPreparer,
    counted_pairs,
    cut_pair,
    laid_pairs,
)
from posttrain.data.preference import unpair_preference_dataset
from posttrain.data.stepwise import StepOptions, StepPreparer, counted_steps, laid_steps
from posttrain.data.unpaired import UnpairedPreparer, counted_rows, laid_rows, with_prompt
from posttrain.errors import DataError
from posttrain.report.survey import Laid, RowView
from posttrain.trainer.options import pair_options, unpaired_options
from posttrain.trainer.prm import step_options
from posttrain.trainer.reward import reward_pairs

SIDES = ("chosen", "rejected")
_PAIR = "pair number"  # a column of ours
_PAIR_FATES = {
    EMPTY: ("empty_response", "dropped: a response has no token"),
    EQUAL: ("equal", "dropped: chosen and rejected are the same"),
    LONG: ("too_long", "dropped: longer than max_length={limit}"),
}


def _examples(**marked: Any) -> dict[str, list[int]]:
    """Places of the rows of each kind."""
    return {name: np.flatnonzero(where).tolist() for name, where in marked.items()}


def _fate(prompt_cut: int, response_cut: int) -> str:
    """e.g. 3, 0 -> "cut: the prompt loses 3 tokens" """
    lost = [f"the {name} loses {n:,} tokens" for name, n in (("prompt", prompt_cut), ("response", response_cut)) if n]
    return f"cut: {' and '.join(lost)}" if lost else "kept"


@final
class PairReader(Reader):
    """Pairs as DPO reads them; `is_reward`: as a reward model does."""

    def __init__(self, tokenizer: Any, args: Any, name: str, is_reward: bool = False) -> None:
        super().__init__(tokenizer, args, name)
        self.options: PairOptions = reward_pairs(args) if is_reward else pair_options(args)
        # Counted are the tokens of responses, also where only the last one is read.
        self.counted = replace(self.options, at_end=False)
        self.preparer = PairPreparer(tokenizer, self.options, name)

    def prepare(self, raw: Any) -> tuple[Any, PreparationReport]:
        counted, found = counted_pairs(raw, self.tokenizer, self.counted, self.args.dataset_num_proc, self.name)
        state, prompt_cut, responses_cut = (
            np.asarray(counted.data.column(name)) for name in ("state", "prompt_cut", "responses_cut")
        )
        report = PreparationReport(self.name, found.rows_in, found.rows_kept, tokens_cut=found.tokens_cut)
        report.tokens, report.rows_too_long = found.tokens, found.rows_long
        report.rows_cut = int(((prompt_cut > 0) | (responses_cut > 0)).sum())
        report.examples = _examples(
            **{name: state == number for number, (name, _) in _PAIR_FATES.items()},
            prompt_cut=prompt_cut > 0,
            response_cut=responses_cut > 0,
        )
        return laid_pairs(counted, self.name), report

    def try_row(self, raw: Any, at: int) -> None:
        self.preparer(raw[at : at + 1], [at])

    def view(self, raw: Any, at: int, number: int) -> RowView:
        [pair] = self.preparer.encode([raw[at]], [at])
        cut, counts = cut_pair(pair, self.options)
        if counts.state != KEPT:
            fate = _PAIR_FATES[counts.state][1].format(limit=self.options.max_length)
            return _pair_view(number, fate, self.options.sides, [(x.ids, np.zeros(len(x.ids))) for x in pair])
        lost = max(len(x.ids) - len(y.ids) for x, y in zip(pair, cut, strict=True)) - counts.prompt_cut
        return _pair_view(number, _fate(counts.prompt_cut, lost), self.options.sides, [(x.ids, x.weights) for x in cut])

    def details(self) -> dict[str, Any]:
        marks = "the tokens where the reward is read" if self.options.at_end else "trained tokens"
        weighted = "of responses" if self.options.at_end else "trained"
        sides = len(self.options.sides)
        return {"per_row": sides, "writes": not self.options.at_end, "weighted": weighted, "marks": (marks, "")}


def _pair_view(number: int, fate: str, sides: Sequence[str], pair: Sequence[tuple[np.ndarray, np.ndarray]]) -> RowView:
    """The responses, and what all begin with: all, where they are the same."""
    size = min(len(ids) for ids, _ in pair)
    first, weights = pair[0]
    same = np.all([ids[:size] == first[:size] for ids, _ in pair], axis=0)
    apart = size if same.all() else int(np.argmin(same))
    shared = Laid(first[:apart].tolist(), weights[:apart].tolist(), "both" if len(sides) == 2 else "all")
    parts = tuple(
        Laid(ids[apart:].tolist(), weights[apart:].tolist(), label, apart)
        for label, (ids, weights) in zip(sides, pair, strict=True)
    )
    return RowView(number, fate, parts if any(part.ids for part in parts) else (), shared if apart else None)


@final
class UnpairedReader(Reader):
    """Labelled responses as KTO reads them. Weights of those that are not desirable are below 0."""

    def __init__(self, tokenizer: Any, args: Any, name: str) -> None:
        super().__init__(tokenizer, args, name)
        self.options: PairOptions = unpaired_options(args)
        self.preparer = UnpairedPreparer(tokenizer, self.options, name)

    def rows_of(self, raw: Any, numbers: list[int]) -> tuple[Any, list[int]]:
        """Of pair k the chosen response is row 2k, and the rejected one row 2k + 1."""
        if not len(raw) or not {*SIDES} <= {*raw.column_names}:
            return raw, numbers
        pairs = raw.add_column(_PAIR, numbers).map(_prompted, desc=f"Reading the {self.name} pairs")
        rows = unpair_preference_dataset(pairs)
        ours = [2 * at + (not label) for at, label in zip(rows[_PAIR], rows["label"], strict=True)]
        return rows.remove_columns(_PAIR), ours

    def prepare(self, raw: Any) -> tuple[Any, PreparationReport]:
        counted, found = counted_rows(raw, self.tokenizer, self.options, self.args.dataset_num_proc, self.name)
        kept, prompt_cut, response_cut = (
            np.asarray(counted.data.column(name)) for name in ("kept", "prompt_cut", "response_cut")
        )
        report = PreparationReport(self.name, found.rows_in, found.rows_kept, tokens_cut=found.tokens_cut)
        report.tokens, report.rows_cut = found.tokens, int(((prompt_cut > 0) | (response_cut > 0)).sum())
        report.examples = _examples(empty_response=kept == 0, prompt_cut=prompt_cut > 0, response_cut=response_cut > 0)
        return laid_rows(counted).map(_signed, batched=True, desc=f"Labelling the {self.name} set"), report

    def try_row(self, raw: Any, at: int) -> None:
        self.preparer(raw[at : at + 1], [at])

    def view(self, raw: Any, at: int, number: int) -> RowView:
        self.try_row(raw, at)
        row = raw[at]
        [x] = self.preparer.encode([row], [at])
        cut, prompt_cut, response_cut = self.preparer.cut(x)
        if not cut.weights.any():
            laid = Laid(x.ids.tolist(), [0.0] * len(x.ids))
            return RowView(number, "dropped: the response has no token", (laid,))
        fate = f"{_fate(prompt_cut, response_cut)}, {'desirable' if row['label'] else 'not desirable'}"
        return RowView(number, fate, (Laid(cut.ids.tolist(), (cut.weights * _sign(row["label"])).tolist()),))

    def details(self) -> dict[str, Any]:
        return {"marks": ("desirable responses", "others")}


def _prompted(row: dict[str, Any]) -> dict[str, Any]:
    """As training does; what that refuses is refused again where the rows are tried."""
    try:
        return with_prompt(row)
    except DataError:
        return {**row, "prompt": row.get("prompt")}


def _sign(label: Any) -> float:
    return 1.0 if label else -1.0


def _signed(batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    pairs = zip(batch["weights"], batch["values"], strict=True)
    return {"weights": [(np.asarray(weights, np.float32) * _sign(label)).tolist() for weights, (label, *_) in pairs]}


@final
class StepReader(Reader):
    """Labelled steps as a process reward model reads them. Weights of incorrect steps are below 0."""

    def __init__(self, tokenizer: Any, args: Any, name: str) -> None:
        super().__init__(tokenizer, args, name)
        self.options: StepOptions = step_options(args)
        self.preparer = StepPreparer(tokenizer, self.options, name)

    def prepare(self, raw: Any) -> tuple[Any, PreparationReport]:
        counted, found = counted_steps(raw, self.tokenizer, self.options, self.args.dataset_num_proc, self.name)
        steps, cut = (np.asarray(counted.data.column(name)) for name in ("steps", "steps_cut"))
        report = PreparationReport(self.name, found.rows_in, found.rows_kept, tokens=found.tokens)
        report.examples = _examples(steps_cut=cut > 0, no_step=steps == 0)
        return laid_steps(counted), report

    def try_row(self, raw: Any, at: int) -> None:
        self.preparer(raw[at : at + 1], [at])

    def view(self, raw: Any, at: int, number: int) -> RowView:
        found = self.preparer(raw[at : at + 1], [at])
        ids, weights, steps, cut = (found[name][0] for name in ("input_ids", "weights", "steps", "steps_cut"))
        if not steps:
            whole = self.preparer.encode(raw[at])
            laid = Laid(whole.ids.tolist(), [0.0] * len(whole.ids))
            return RowView(number, "dropped: no step is left", (laid,))
        fate = f"cut: {cut:,} of {steps + cut:,} steps end beyond the limit" if cut else "kept"
        return RowView(number, fate, (Laid(ids.tolist(), weights.tolist()),))

    def details(self) -> dict[str, Any]:
        return {"writes": False, "weighted": "judged", "marks": ("ends of correct steps", "of incorrect ones")}
