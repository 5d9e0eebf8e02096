"""Preference pairs: a prompt inside both answers or beside them, and pairs as single answers with a label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.data.formats import is_conversational
from posttrain.errors import DataError


def extract_prompt(example: Mapping[str, Any]) -> dict[str, Any]:
    """Split off what `chosen` and `rejected` begin with in common: of chats whole messages, of text characters.

    The space before a text completion belongs to the completion. A chat keeps at least one message on each side.
    e.g. {"chosen": "The sky is blue.", "rejected": "The sky is green."}
      -> {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}
    Raises `DataError` when the two are not of one kind.
    """
    return _split(example, ("chosen", "rejected"))


def _split(example: Mapping[str, Any], sides: Sequence[str]) -> dict[str, Any]:
    first, *others = answers = [example[side] for side in sides]
    for side, other in zip(sides[1:], others, strict=True):
        if isinstance(first, str) != isinstance(other, str):
            raise DataError(f"One of {sides[0]!r} and {side!r} is text and the other a chat; write both alike.")
    is_text = isinstance(first, str)
    limit = min(map(len, answers)) - (not is_text)
    end = next((i for i in range(limit) if any(first[i] != other[i] for other in others)), max(limit, 0))
    if is_text:
        end = len(first[:end].rstrip(" "))
    return {"prompt": first[:end], **{side: answer[end:] for side, answer in zip(sides, answers, strict=True)}}


def maybe_extract_prompt(example: Mapping[str, Any]) -> dict[str, Any]:
    """As `extract_prompt` for a pair whose prompt is inside its answers; any other row is returned as it is.

    A text `prompt` beside answers that are whole chats repeats what they hold, so it is replaced.
    """
    if "chosen" not in example or "rejected" not in example:
        return dict(example)
    return prompt_apart(example, ("chosen", "rejected"))


def prompt_apart(example: Mapping[str, Any], sides: Sequence[str]) -> dict[str, Any]:
    """As `maybe_extract_prompt`, of two or more answers, the columns `sides`."""
    if "prompt" in example:
        prompt, answer = (is_conversational({"prompt": example[name]}) for name in ("prompt", sides[0]))
        if prompt == answer:
            return dict(example)
    return _split(example, sides)


def unpair_preference_dataset(dataset: Any, **map_kwargs: Any) -> Any:
    """A pair becomes two rows: `chosen` with label true, `rejected` with label false, in a column `completion`.

    Other columns are kept on both. Within a batch of the map all chosen rows come first. `dataset` is a `Dataset`, a
    `DatasetDict` or a stream of either kind; `map_kwargs` go to its `map`.
    e.g. {"prompt": "a", "chosen": "b", "rejected": "c"} -> {"prompt": "a", "completion": "b", "label": True}, …
    """
    return dataset.map(_unpair, batched=True, remove_columns=["chosen", "rejected"], **map_kwargs)


def _unpair(rows: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    count = len(rows["chosen"])
    kept = {name: [*values, *values] for name, values in rows.items() if name not in ("chosen", "rejected")}
    labels = [True] * count + [False] * count
    return {**kept, "completion": [*rows["chosen"], *rows["rejected"]], "label": labels}


def maybe_unpair_preference_dataset(dataset: Any, num_proc: int | None = None, desc: str | None = None) -> Any:
    """As `unpair_preference_dataset` for a data set that holds pairs; any other is returned as it is."""
    columns = dataset.column_names
    if isinstance(columns, Mapping):  # of a DatasetDict, by split
        columns = next(iter(columns.values()), [])
    if columns is None:  # of a stream, known from its first row
        columns = list(next(iter(dataset), {}))
    if not {"chosen", "rejected"} <= set(columns):
        return dataset
    return unpair_preference_dataset(dataset, num_proc=num_proc, desc=desc)
