"""Every conversion between dataset types, as functions of rows, and the table of them.

A conversion takes a row of one type and returns the rows of another, or raises `Dropped` with the reason why there are
none. Other columns are kept on every row that comes of it. Rows are taken as `validate_row` lets them pass.

`CONVERSIONS[source, target]` finds one. The two that look at all rows, to pair the answers to one prompt, are in
`posttrain.data.convert`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.data.formats import TYPES, TypeName
from posttrain.data.preference import extract_prompt

Row = dict[str, Any]
RowConversion = Callable[[Mapping[str, Any], "Options"], list[Row]]


class Dropped(Exception):
    """The row has no counterpart in the type asked for; the text is the reason, and is counted."""


@dataclass(frozen=True)
class Options:
    """What a conversion may be told."""

    step_separator: str = "\n"  # between the steps of a stepwise row, written as one answer


def _replace(row: Mapping[str, Any], source: TypeName, **columns: Any) -> Row:
    """The row with the columns of its type taken out and others put in, in their place at the front."""
    own = {*TYPES[source], *({"text"} if source == "language_modeling" else ())}
    return {**columns, **{name: value for name, value in row.items() if name not in own}}


def _join(prompt: Any, completion: Any) -> Any:
    return [*prompt, *completion] if isinstance(prompt, (list, tuple)) else prompt + completion


def _as_modeling(row: Mapping[str, Any], source: TypeName, whole: Any) -> list[Row]:
    return [_replace(row, source, **{"text" if isinstance(whole, str) else "messages": whole})]


# Language modelling


def _messages(row: Mapping[str, Any]) -> list[Any]:
    if not isinstance(row.get("messages"), (list, tuple)):
        raise Dropped("text says not where the prompt ends; only chats can be split")
    return list(row["messages"])


def modeling_to_completion(row: Mapping[str, Any], options: Options) -> list[Row]:
    """The last turn of the assistant, with what it called and was told, is the completion.

    e.g. messages u1 a1 u2 a2 -> prompt u1 a1 u2, completion a2
    """
    messages = _messages(row)
    start = len(messages)
    while start and messages[start - 1].get("role") not in ("user", "system", "developer"):
        start -= 1
    if start == len(messages):
        raise Dropped("the chat does not end with the assistant")
    if not start:
        raise Dropped("the chat begins with the assistant, so there is no prompt")
    return [_replace(row, "language_modeling", prompt=messages[:start], completion=messages[start:])]


def modeling_to_prompt(row: Mapping[str, Any], options: Options) -> list[Row]:
    """The chat without the last turn of the assistant; whole, where it ends with the user."""
    messages = _messages(row)
    if messages[-1].get("role") == "user":
        return [_replace(row, "language_modeling", prompt=messages)]
    (pair,) = modeling_to_completion(row, options)
    return [{name: value for name, value in pair.items() if name != "completion"}]


# Prompt and completion


def completion_to_modeling(row: Mapping[str, Any], options: Options) -> list[Row]:
    """Prompt and completion, one after the other. e.g. "2+2=", "4" -> text "2+2=4" """
    return _as_modeling(row, "prompt_completion", _join(row["prompt"], row["completion"]))


def completion_to_prompt(row: Mapping[str, Any], options: Options) -> list[Row]:
    """The prompt alone."""
    return [_replace(row, "prompt_completion", prompt=row["prompt"])]


# Preference


def preference_to_unpaired(row: Mapping[str, Any], options: Options) -> list[Row]:
    """Two rows: `chosen` with label true, then `rejected` with label false."""
    answers = ((row["chosen"], True), (row["rejected"], False))
    return [_replace(row, "preference", prompt=row["prompt"], completion=a, label=label) for a, label in answers]


def preference_to_completion(row: Mapping[str, Any], options: Options) -> list[Row]:
    """The chosen answer is the completion."""
    return [_replace(row, "preference", prompt=row["prompt"], completion=row["chosen"])]


def preference_to_prompt(row: Mapping[str, Any], options: Options) -> list[Row]:
    """The prompt alone."""
    return [_replace(row, "preference", prompt=row["prompt"])]


def preference_to_modeling(row: Mapping[str, Any], options: Options) -> list[Row]:
    """The prompt and the chosen answer."""
    return _as_modeling(row, "preference", _join(row["prompt"], row["chosen"]))


def preference_to_implicit(row: Mapping[str, Any], options: Options) -> list[Row]:
    """The prompt is written before both answers."""
    chosen, rejected = (_join(row["prompt"], row[name]) for name in ("chosen", "rejected"))
    return [_replace(row, "preference", chosen=chosen, rejected=rejected)]


def implicit_to_preference(row: Mapping[str, Any], options: Options) -> list[Row]:
    """What both answers begin with is the prompt (`extract_prompt`)."""
    pair = extract_prompt(row)
    if not pair["prompt"]:
        raise Dropped("the answers have no beginning in common, so there is no prompt")
    return [_replace(row, "implicit_preference", **pair)]


def implicit_to_modeling(row: Mapping[str, Any], options: Options) -> list[Row]:
    """The chosen answer, which holds the prompt."""
    return _as_modeling(row, "implicit_preference", row["chosen"])


# How steps that exist already are put together; the text is what the table in docs/data.md says.
def _after(first: RowConversion, second: RowConversion, text: str) -> RowConversion:
    def both(row: Mapping[str, Any], options: Options) -> list[Row]:
        return [result for middle in first(row, options) for result in second(middle, options)]

    both.__doc__ = text
    return both


# Unpaired preference


def _wanted(row: Mapping[str, Any]) -> None:
    if not row["label"]:
        raise Dropped("the label is false, and the answer is not to be learned")


def unpaired_to_completion(row: Mapping[str, Any], options: Options) -> list[Row]:
    """Answers with label true; the others are dropped."""
    _wanted(row)
    return [_replace(row, "unpaired_preference", prompt=row["prompt"], completion=row["completion"])]


def unpaired_to_modeling(row: Mapping[str, Any], options: Options) -> list[Row]:
    """Prompt and answer of rows with label true; the others are dropped."""
    _wanted(row)
    return _as_modeling(row, "unpaired_preference", _join(row["prompt"], row["completion"]))


def unpaired_to_prompt(row: Mapping[str, Any], options: Options) -> list[Row]:
    """The prompt alone, whatever the label."""
    return [_replace(row, "unpaired_preference", prompt=row["prompt"])]


# Stepwise supervision


def _answer(row: Mapping[str, Any], steps: Sequence[str], options: Options) -> Any:
    text = options.step_separator.join(steps)
    return text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]


def stepwise_to_unpaired(row: Mapping[str, Any], options: Options) -> list[Row]:
    """The steps as one answer, with label true when every step's is."""
    answer, label = _answer(row, row["completions"], options), all(row["labels"])
    return [_replace(row, "stepwise_supervision", prompt=row["prompt"], completion=answer, label=label)]


def stepwise_to_completion(row: Mapping[str, Any], options: Options) -> list[Row]:
    """The steps before the first wrong one, as the completion."""
    right = next((at for at, label in enumerate(row["labels"]) if not label), len(row["labels"]))
    if not right:
        raise Dropped("the first step is wrong, so nothing of the answer is to be learned")
    answer = _answer(row, row["completions"][:right], options)
    return [_replace(row, "stepwise_supervision", prompt=row["prompt"], completion=answer)]


def stepwise_to_prompt(row: Mapping[str, Any], options: Options) -> list[Row]:
    """The prompt alone."""
    return [_replace(row, "stepwise_supervision", prompt=row["prompt"])]


CONVERSIONS: dict[tuple[TypeName, TypeName], RowConversion] = {
    ("language_modeling", "prompt_completion"): modeling_to_completion,
    ("language_modeling", "prompt_only"): modeling_to_prompt,
    ("prompt_completion", "language_modeling"): completion_to_modeling,
    ("prompt_completion", "prompt_only"): completion_to_prompt,
    ("preference", "unpaired_preference"): preference_to_unpaired,
    ("preference", "prompt_completion"): preference_to_completion,
    ("preference", "prompt_only"): preference_to_prompt,
    ("preference", "language_modeling"): preference_to_modeling,
    ("preference", "implicit_preference"): preference_to_implicit,
    ("implicit_preference", "preference"): implicit_to_preference,
    ("implicit_preference", "unpaired_preference"): _after(
        implicit_to_preference, preference_to_unpaired, "The prompt is found, then as from `preference`."
    ),
    ("implicit_preference", "prompt_completion"): _after(
        implicit_to_preference, preference_to_completion, "The prompt is found, and the chosen answer completes it."
    ),
    ("implicit_preference", "prompt_only"): _after(
        implicit_to_preference, preference_to_prompt, "The prompt that both answers begin with."
    ),
    ("implicit_preference", "language_modeling"): implicit_to_modeling,
    ("unpaired_preference", "prompt_completion"): unpaired_to_completion,
    ("unpaired_preference", "language_modeling"): unpaired_to_modeling,
    ("unpaired_preference", "prompt_only"): unpaired_to_prompt,
    ("stepwise_supervision", "unpaired_preference"): stepwise_to_unpaired,
    ("stepwise_supervision", "prompt_completion"): stepwise_to_completion,
    ("stepwise_supervision", "prompt_only"): stepwise_to_prompt,
    ("stepwise_supervision", "language_modeling"): _after(
        stepwise_to_completion, completion_to_modeling, "Prompt and the steps before the first wrong one."
    ),
}
