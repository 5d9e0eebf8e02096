"""Chats → drafts: which text is trained and with what weight.

A turn weighs 1, unless its message says otherwise with `weight` (a number, 0 or more) or `train` (true or false).
A turn whose thinking the template leaves out of the history weighs 0: a model that thinks would not have written it so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np

from posttrain.data.chat import completion_spans
from posttrain.data.encode import Draft
from posttrain.data.proof import Span, refuse_dropped, thinking
from posttrain.data.spans import locate
from posttrain.data.template import Message, Template
from posttrain.errors import DataError

logger = logging.getLogger(__name__)
ROW_WEIGHT, TOKEN_WEIGHTS = "sample_weight", "loss_weights"
_SAID: set[str] = set()


@dataclass(frozen=True)
class Turn:
    """A turn of the assistant in the rendered text."""

    span: Span
    weight: float


def chat_draft(template: Template, messages: list[dict[str, Any]], assistant_only: bool) -> Draft:
    """A conversation as a draft: the assistant's turns are trained, or the whole text.

    Raises `DataError` for a weight that is none, and a turn that the template does not write as it was given.
    """
    _check_others(messages, elsewhere_trained=not assistant_only)
    if not assistant_only:
        text = template.render(messages)
        refuse_dropped(template, messages, text)
        if not _needs_turns(messages, text):
            return Draft(text, [(0, len(text))])
        text, turns = find_turns(template, messages)
        return _overlaid(text, (0, len(text)), turns)
    text, turns = find_turns(template, messages)
    refuse_dropped(template, messages, text)
    borders = tuple(turn.span[0] for turn in turns if turn.span[0])
    return Draft(text, [turn.span for turn in turns], borders, weights=_weights(turns))


def pair_draft(
    template: Template,
    prompt: list[dict[str, Any]],
    completion: list[dict[str, Any]],
    completion_only: bool,
    assistant_only: bool,
) -> Draft:
    """A prompt and its completion as a draft. Trained: the completion, or all; with `assistant_only` the assistant's
    turns of it."""
    messages = [*prompt, *completion]
    _check_others(messages, elsewhere_trained=not (assistant_only or completion_only))
    text, (border, end) = completion_spans(template, prompt, completion)
    base = (border, end) if completion_only else (0, len(text))
    draft = Draft(text, [base], (border,) if border else (), is_pair=True)
    if assistant_only:
        turns = _clipped(find_turns(template, messages)[1], base[0])
        return replace(draft, spans=[turn.span for turn in turns], weights=_weights(turns))
    if not _needs_turns(completion if completion_only else messages, text):
        return draft
    turns = _clipped(find_turns(template, messages)[1], base[0])
    overlaid = _overlaid(text, base, turns)
    return replace(draft, spans=overlaid.spans, weights=overlaid.weights)


def find_turns(template: Template, messages: list[dict[str, Any]]) -> tuple[str, list[Turn]]:
    """The text of a conversation and the assistant's turns in it, with their weights."""
    text, spans = locate(template, messages)
    said = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if len(said) != len(spans):  # the template marks fewer turns
        weighed = next((index for index in said if _given(messages[index], index) is not None), None)
        if weighed is not None:
            raise DataError(
                f"message {weighed} has a weight, and the chat template marks {len(spans)} of {len(said)} turns, so "
                "which one it is cannot be told; take the {% generation %} markers out of the template."
            )
        return text, [Turn(span, 1.0) for span in spans]
    turns = []
    for index, span in zip(said, spans, strict=True):
        weight = _given(messages[index], index)
        if weight is None:
            weight = 1.0 if _thinks_aloud(messages, index, text[slice(*span)]) else 0.0
        turns.append(Turn(span, weight))
    return text, turns


def _thinks_aloud(messages: Sequence[Message], index: int, written: str) -> bool:
    """Whether the thinking of a turn, if there is any, was written. Raises where it had to be: in the last message."""
    thoughts = thinking(messages[index])
    if not thoughts or any(thought in written for thought in thoughts):
        return True
    if index == len(messages) - 1:
        raise DataError(
            f"message {index} (assistant) thinks ({thoughts[0]!r:.40}) and the chat template does not write it, so the "
            "answer would be trained without it. Set `chat_template_path` to a template that writes thinking, remove "
            "it from the row, or set 'train': true on the message to train what is written."
        )
    _say_once(
        "turns whose thinking the chat template leaves out of the history are not trained (weight 0): at inference the "
        "model thinks first. Set 'train': true on a message to train it as it is written; see docs/templates.md."
    )
    return False


def _say_once(text: str) -> None:
    if text not in _SAID:
        _SAID.add(text)
        logger.warning("%s", text)


def _needs_turns(messages: Sequence[Message], text: str) -> bool:
    """Whether something in a conversation that is trained as a whole weighs other than 1."""
    return any(
        message.get("weight") is not None
        or message.get("train") is not None
        or any(thought not in text for thought in thinking(message))
        for message in messages
        if message["role"] == "assistant"
    )


def _clipped(turns: Sequence[Turn], low: int) -> list[Turn]:
    return [Turn((max(turn.span[0], low), turn.span[1]), turn.weight) for turn in turns if turn.span[1] > low]


def _overlaid(text: str, base: Span, turns: Sequence[Turn]) -> Draft:
    """`base` with weight 1, and the turns in it with their own."""
    spans, weights, at = [], [], base[0]
    for turn in turns:
        start, end = turn.span[0], min(turn.span[1], base[1])
        spans += [(at, start), (start, end)]
        weights += [1.0, turn.weight]
        at = end
    pairs = [(s, w) for s, w in zip([*spans, (at, base[1])], [*weights, 1.0], strict=True) if s[0] < s[1]]
    return Draft(text, [span for span, _ in pairs], weights=tuple(weight for _, weight in pairs))


def _weights(turns: Sequence[Turn]) -> tuple[float, ...] | None:
    return None if all(turn.weight == 1.0 for turn in turns) else tuple(turn.weight for turn in turns)


# ---- weights that rows give ------------------------------------------------------------------------------------------


def row_weight(row: Mapping[str, Any]) -> float:
    """The column `sample_weight`, 1 where it is missing or None. Raises `DataError` for what is no weight."""
    value = row.get(ROW_WEIGHT)
    return 1.0 if value is None else number(value, f"column {ROW_WEIGHT!r}")


def token_weights(row: Mapping[str, Any], length: int) -> np.ndarray:
    """[length] the column `loss_weights` (1 where it is missing) times `sample_weight`, float32."""
    weight, values = row_weight(row), row.get(TOKEN_WEIGHTS)
    if values is None:
        return np.full(length, weight, dtype=np.float32)
    if not isinstance(values, (list, tuple, np.ndarray)) or len(values) != length:
        count = f"{len(values)} values" if isinstance(values, (list, tuple, np.ndarray)) else f"{values!r:.40}"
        raise DataError(f"column {TOKEN_WEIGHTS!r} has {count} and 'input_ids' {length}; write one a token.")
    if any(value is None or isinstance(value, (bool, str)) for value in values):
        number(next(v for v in values if v is None or isinstance(v, (bool, str))), f"column {TOKEN_WEIGHTS!r}")
    found = np.asarray(values, dtype=np.float64)
    bad = np.flatnonzero(~np.isfinite(found) | (found < 0))
    if len(bad):
        number(float(found[bad[0]]), f"column {TOKEN_WEIGHTS!r}, token {bad[0]},")
    return (found * weight).astype(np.float32)


def number(value: Any, where: str) -> float:
    """A weight. Raises `DataError` unless it is a finite number, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or value < 0:
        raise DataError(f"{where} is {value!r:.40}; a weight is a finite number, 0 or more.")
    return float(value)


def _given(message: Message, index: int) -> float | None:
    """The weight a message asks for; None where it says nothing."""
    weight, train = message.get("weight"), message.get("train")
    if train is not None and not isinstance(train, bool):
        raise DataError(f"message {index}: 'train' is {train!r:.40}; write true or false.")
    if weight is not None:
        weight = number(weight, f"message {index}: 'weight'")
    if weight is None:
        return None if train is None else float(train)
    return weight if train is not False else 0.0


def _check_others(messages: Sequence[Message], elsewhere_trained: bool) -> None:
    """Refuse weights that would have no effect."""
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            continue
        weight = _given(message, index)
        if weight:
            raise DataError(
                f"message {index} ({message['role']}) has a weight; only the assistant's can have one. Remove it."
            )
        if weight is not None and elsewhere_trained:
            raise DataError(
                f"message {index} ({message['role']}) is not to be trained, and everything of a chat is: set "
                "`assistant_only_loss`, or remove its 'weight' or 'train'."
            )
