"""Dataset types: which columns make one, how it is recognised, and the conversions between ways of writing it.

A type is recognised by its columns, the most specific first; other columns are ignored.

    type                columns
    tokenized           input_ids                (optional: labels, attention_mask, completion_mask, assistant_masks)
    messages            messages, or conversations with from/value pairs (optional: tools, chat_template_kwargs)
    prompt_completion   prompt, completion       (both text or both messages)
    text                the column named by `dataset_text_field`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from posttrain.errors import DataError, suggest

DatasetType = Literal["tokenized", "messages", "prompt_completion", "text"]

COLUMNS: dict[DatasetType, frozenset[str]] = {
    "tokenized": frozenset({"input_ids"}),
    "messages": frozenset({"messages"}),
    "prompt_completion": frozenset({"prompt", "completion"}),
    "text": frozenset({"text"}),
}
IMAGE_COLUMNS = ("images", "image", "pixel_values")
CHAT_COLUMNS = ("prompt", "chosen", "rejected", "completion", "messages")
# Names of the speakers in ShareGPT files; templates know only the names on the right.
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


def detect(columns: Iterable[str], example: Mapping[str, Any], text_field: str = "text") -> DatasetType:
    """Return the type of a data set, given the names of its columns and one row.

    e.g. detect(["messages", "id"], row) -> "messages"
    Raises `DataError` when no type fits, or when the row holds images.
    """
    seen = list(columns)
    refuse_images(example, seen)
    table: dict[DatasetType, frozenset[str]] = {**COLUMNS, "text": frozenset({text_field})}
    if "conversations" in seen:
        table["messages"] = frozenset({"conversations"}) if "messages" not in seen else table["messages"]
    for kind, required in table.items():
        if required <= set(seen):
            return kind
    raise DataError(_no_type_fits(seen, table, text_field))


def _no_type_fits(seen: list[str], table: Mapping[DatasetType, frozenset[str]], text_field: str) -> str:
    wanted = sorted({name for required in table.values() for name in required} | {"conversations"})
    misspelt = [(name, suggest(name, wanted)) for name in seen if name not in wanted]
    hints = [f"Column {name!r}:{hint}" for name, hint in misspelt if hint]
    half = {"prompt", "completion"} & set(seen)
    if half:
        missing = ({"prompt", "completion"} - half).pop()
        hints.append(f"Column {half.pop()!r} needs {missing!r} beside it.")
    return (
        f"No dataset type fits the columns {seen}. Expected one of: {text_field!r} (text, named by "
        f"`dataset_text_field`); 'messages' or 'conversations' (chats); 'prompt' and 'completion'; 'input_ids' "
        f"(already tokenized). {' '.join(hints)}".rstrip()
    )


def refuse_images(example: Mapping[str, Any], columns: Iterable[str] = ()) -> None:
    """Raise `DataError` when a column or a part of a message holds an image."""
    for column in IMAGE_COLUMNS:
        if column in columns or column in example:
            raise DataError(f"Column {column!r}: images are not supported: text only for now. Remove the column.")
    for column in (*CHAT_COLUMNS, "conversations"):
        for message in _messages_of(example.get(column)):
            parts = message.get("content")
            for part in parts if isinstance(parts, list) else ():
                kind = part.get("type") if isinstance(part, Mapping) else None
                if kind not in (None, "text"):
                    raise DataError(
                        f"Column {column!r} holds a content part of type {kind!r}: {kind}s are not supported: "
                        "text only for now. Keep only parts of type 'text'."
                    )


def _messages_of(value: Any) -> list[Mapping[str, Any]]:
    return [m for m in value if isinstance(m, Mapping)] if isinstance(value, list) else []


def is_conversational(example: Mapping[str, Any]) -> bool:
    """Whether a row holds chats: lists of messages with a role.

    e.g. is_conversational({"prompt": [{"role": "user", "content": "Hi"}]}) -> True; {"prompt": "Hi"} -> False
    """
    for column in CHAT_COLUMNS:
        messages = example.get(column)
        if isinstance(messages, list) and messages and isinstance(messages[0], Mapping) and "role" in messages[0]:
            return True
    return False


def is_conversational_from_value(example: Mapping[str, Any]) -> bool:
    """Whether a row holds a chat written with `from` and `value`, as ShareGPT files are.

    e.g. is_conversational_from_value({"conversations": [{"from": "human", "value": "Hi"}]}) -> True
    """
    messages = example.get("conversations")
    if not (isinstance(messages, list) and messages and isinstance(messages[0], Mapping)):
        return False
    return "from" in messages[0] and "value" in messages[0]


def maybe_convert_to_chatml(example: Mapping[str, Any]) -> dict[str, Any]:
    """Rename `from` to `role`, `value` to `content` and the column `conversations` to `messages`.

    The speakers `human` and `gpt` become `user` and `assistant`. A row written the other way is returned as it is.
    e.g. {"conversations": [{"from": "human", "value": "Hi"}]} -> {"messages": [{"role": "user", "content": "Hi"}]}
    """
    row = dict(example)
    for column in (*CHAT_COLUMNS, "conversations"):
        messages = row.get(column)
        if isinstance(messages, list) and any(isinstance(m, Mapping) and "from" in m for m in messages):
            row[column] = [_to_chatml(message) for message in messages]
    if "conversations" in row:
        row["messages"] = row.pop("conversations")
    return row


def _to_chatml(message: Mapping[str, Any]) -> dict[str, Any]:
    renamed = {{"from": "role", "value": "content"}.get(key, key): value for key, value in message.items()}
    renamed["role"] = SHAREGPT_ROLES.get(renamed.get("role", ""), renamed.get("role"))
    return renamed


# Preference pairs


def extract_prompt(example: Mapping[str, Any]) -> dict[str, Any]:
    """Split off what `chosen` and `rejected` begin with in common: of chats whole messages, of text characters.

    The space before a text completion belongs to the completion. A chat keeps at least one message on each side.
    e.g. {"chosen": "The sky is blue.", "rejected": "The sky is green."}
      -> {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}
    Raises `DataError` when the two are not of one kind.
    """
    chosen, rejected = example["chosen"], example["rejected"]
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError("One of 'chosen' and 'rejected' is text and the other a chat; write both alike.")
    is_text = isinstance(chosen, str)
    limit = min(len(chosen), len(rejected)) - (not is_text)
    end = next((i for i in range(limit) if chosen[i] != rejected[i]), max(limit, 0))
    if is_text:
        end = len(chosen[:end].rstrip(" "))
    return {"prompt": chosen[:end], "chosen": chosen[end:], "rejected": rejected[end:]}


def maybe_extract_prompt(example: Mapping[str, Any]) -> dict[str, Any]:
    """As `extract_prompt` for a pair whose prompt is inside its answers; any other row is returned as it is.

    A text `prompt` beside answers that are whole chats repeats what they hold, so it is replaced.
    """
    if "chosen" not in example or "rejected" not in example:
        return dict(example)
    if "prompt" in example:
        prompt, chosen = (is_conversational({"prompt": example[name]}) for name in ("prompt", "chosen"))
        if prompt == chosen:
            return dict(example)
    return extract_prompt(example)


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
        columns = list(next(iter(dataset)))
    if not {"chosen", "rejected"} <= set(columns):
        return dataset
    return unpair_preference_dataset(dataset, num_proc=num_proc, desc=desc)
