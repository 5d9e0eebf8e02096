"""Dataset types: which columns make one, how it is recognised, and what a row of it must hold.

`TYPES` is the one table. A type is recognised by the columns that hold something, the first that fits; other columns
are kept. Every type is standard (text) or conversational (lists of messages), but for token ids. The rows of one set
are of one type. `detect` names, for supervised fine-tuning, what a row is trained on.

Chats are written with `role` and `content`, or with `from` and `value`. Beside any of them: `tools` (a list or its JSON
text) and `chat_template_kwargs` (a mapping).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from posttrain.errors import DataError, suggest

TypeName = Literal[
    "tokenized",
    "stepwise_supervision",
    "unpaired_preference",
    "preference",
    "implicit_preference",
    "prompt_completion",
    "language_modeling",
    "prompt_only",
]
TYPES: dict[TypeName, tuple[str, ...]] = {
    "tokenized": ("input_ids",),
    "stepwise_supervision": ("prompt", "completions", "labels"),
    "unpaired_preference": ("prompt", "completion", "label"),
    "preference": ("prompt", "chosen", "rejected"),
    "implicit_preference": ("chosen", "rejected"),
    "prompt_completion": ("prompt", "completion"),
    "language_modeling": ("messages",),  # or ("text",)
    "prompt_only": ("prompt",),
}

DatasetType = Literal["tokenized", "messages", "prompt_completion", "text"]

COLUMNS: dict[DatasetType, frozenset[str]] = {
    "tokenized": frozenset(TYPES["tokenized"]),
    "messages": frozenset(TYPES["language_modeling"]),
    "prompt_completion": frozenset(TYPES["prompt_completion"]),
    "text": frozenset({"text"}),
}
IMAGE_COLUMNS = ("images", "image", "pixel_values")
CHAT_COLUMNS = ("prompt", "chosen", "rejected", "completion", "messages")
# What may hold messages; `reference` beside a pair.
_OF_MESSAGES = (*CHAT_COLUMNS, "conversations", "reference")
# Names of the speakers in ShareGPT files; templates know only the names on the right.
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
# Who may speak in any chat; the others where the template names them.
STANDARD_ROLES = ("system", "developer", "user", "assistant", "tool")
# Roles that templates of the model families in use know.
ROLES = (*STANDARD_ROLES, "function", "ipython", "observation", "environment")
OTHER_NAMES = {"human": "user", "gpt": "assistant", "bot": "assistant", "ai": "assistant", "model": "assistant"}
# What may stand in the place of content.
INSTEAD = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")


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
    for column in _OF_MESSAGES:
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
    for column in _OF_MESSAGES:
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


# What a row is, and whether it is whole


@dataclass(frozen=True)
class Format:
    """What a row is. e.g. Format("preference", conversational=True)"""

    type: TypeName
    conversational: bool

    def __str__(self) -> str:
        return f"{'conversational' if self.conversational else 'standard'} {self.type}"


def format_of(row: Mapping[str, Any], text_field: str = "text") -> Format | None:
    """The format of one row, from the columns that hold something; None when no type fits.

    e.g. {"prompt": "a", "completion": "b", "label": None} -> Format("prompt_completion", conversational=False)
    """
    held = {name for name, value in row.items() if value is not None}
    if "conversations" in held:
        held.add("messages")
    for kind, required in TYPES.items():
        if kind == "prompt_only" and text_field in held and text_field != "prompt":
            break
        if held.issuperset(required):
            return Format(kind, kind == "language_modeling" or any(_is_chat(row.get(name)) for name in required))
    return Format("language_modeling", False) if text_field in held else None


def _is_chat(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], Mapping)


def validate_row(row: Mapping[str, Any], text_field: str = "text") -> Format:
    """Return the format of a row, or raise `DataError` naming the column, the value seen and the fix."""
    found = format_of(row, text_field)
    if found is None:
        columns = [name for name, value in row.items() if value is not None]
        raise DataError(_no_type_fits(columns, {**COLUMNS, "text": frozenset({text_field})}, text_field))
    _check(row, found, text_field)
    return found


def _check(row: Mapping[str, Any], found: Format, text_field: str) -> None:
    refuse_images(row)
    chat = maybe_convert_to_chatml(row)
    if found.type == "language_modeling" and found.conversational:
        check_chat(chat.get("messages"), "messages")
    elif found.type == "language_modeling":
        _text(chat, text_field)
    elif found.type == "stepwise_supervision":
        _one_kind(chat, ("prompt",))
        check_steps(chat)
    elif found.type != "tokenized":
        _one_kind(chat, [name for name in TYPES[found.type] if name != "label"])
        if found.type == "unpaired_preference" and chat["label"] not in (True, False):
            raise DataError(f"column 'label' is {_shown(chat['label'])}; write true or false.")
    if found.conversational:  # text has no template that would read them
        _tools(row.get("tools"))
        _kwargs(row.get("chat_template_kwargs"))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _one_kind(row: Mapping[str, Any], columns: Sequence[str]) -> None:
    chats = [name for name in columns if not isinstance(row.get(name), str)]
    texts = [name for name in columns if isinstance(row.get(name), str)]
    for name in chats:
        check_chat(row.get(name), name)
    if chats and texts and not _repeats_its_prompt(row, chats, texts):
        raise DataError(f"column {texts[0]!r} is text and {chats[0]!r} a chat; write both alike.")


def _repeats_its_prompt(row: Mapping[str, Any], chats: Sequence[str], texts: Sequence[str]) -> bool:
    """A text prompt beside answers that are whole chats, which hold it again (`maybe_extract_prompt`)."""
    whole = list(texts) == ["prompt"] and list(chats) == ["chosen", "rejected"]
    return whole and row["chosen"][0].get("role") != "assistant"


def _text(row: Mapping[str, Any], column: str) -> None:
    if not isinstance(row.get(column), str):
        raise DataError(f"column {column!r} is {_shown(row.get(column))}; write text.")


def check_steps(row: Mapping[str, Any]) -> None:
    """Raise `DataError` when `completions` are no texts, or `labels` not one boolean for each."""
    steps, labels = row["completions"], row["labels"]
    if not isinstance(steps, (list, tuple)) or not steps or not all(isinstance(step, str) for step in steps):
        raise DataError(f"column 'completions' is {_shown(steps)}; write a list of texts, one a step.")
    if not isinstance(labels, (list, tuple)) or any(label not in (True, False) for label in labels):
        raise DataError(f"column 'labels' is {_shown(labels)}; write a list of true and false, one a step.")
    if len(steps) != len(labels):
        raise DataError(f"column 'completions' has {len(steps)} steps and 'labels' {len(labels)}; write one a step.")


def check_chat(messages: Any, column: str, roles: bool = True) -> None:
    """Raise `DataError` naming the column, the message and the fix when this is no chat. `roles`: look for misspelt
    ones too, which is the template's to say where there is one."""
    if not isinstance(messages, (list, tuple)):
        raise DataError(f"column {column!r} is {_shown(messages)}; write text or a list of messages.")
    if not messages:
        raise DataError(f"column {column!r} is an empty list; a chat needs at least one message. Remove the row.")
    for index, message in enumerate(messages):
        where = f"column {column!r}, message {index}"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"{where} is {_shown(message)}; write a mapping with 'role' and 'content'.")
        if roles:
            _role(message["role"], where)
        content = message.get("content")
        if content is None and not any(message.get(name) for name in INSTEAD):
            raise DataError(f"{where} ({message['role']}) has no content; write text, even if empty, or remove it.")
        if content is not None and not isinstance(content, (str, list, Mapping)):
            raise DataError(f"{where}: content is {_shown(content)}; write text.")


def _role(role: str, where: str) -> None:
    """Roles of one's own are left to the template; a known one misspelt would be trained on, or not, in silence."""
    if role in ROLES:
        return
    near = role.strip().lower()
    hint = suggest(near, ROLES) or (f" Did you mean {OTHER_NAMES[near]!r}?" if near in OTHER_NAMES else "")
    if hint or not near:
        raise DataError(f"{where} has the unknown role {role!r}; known are {', '.join(ROLES)}.{hint}")


def _tools(tools: Any) -> None:
    value = tools
    if isinstance(tools, str):
        try:
            value = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise DataError(
                f"column 'tools' is {_shown(tools)}, not valid JSON ({error}); write a list of tool schemas."
            ) from error
    if value is not None and not isinstance(value, (list, tuple)):
        raise DataError(f"column 'tools' is {_shown(tools)}; write a list of tool schemas, or its JSON text.")


def _kwargs(kwargs: Any) -> None:
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise DataError(f"column 'chat_template_kwargs' is {_shown(kwargs)}; write a mapping.")


def without_label(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row without `label`. Only unpaired preference reads that column; elsewhere it may hold anything, or nothing
    in some rows."""
    return {name: value for name, value in row.items() if name != "label"} if "label" in row else row


class FormatChecker:
    """Looks at rows as they pass, and holds them to the format of the first. Without `labels`, whatever `label` is."""

    def __init__(self, text_field: str = "text", strict: bool = True, labels: bool = True) -> None:
        self.text_field, self.strict, self.labels = text_field, strict, labels
        self.first: tuple[Format | None, str] | None = None

    def see(self, row: Mapping[str, Any], name: Callable[[], str]) -> None:
        """Raise `DataError` for a row that is not whole, or of another format than the first; `name` says where it is.

        Without `strict`, rows of no known type pass, as long as all are.
        """
        row = row if self.labels else without_label(row)
        found = format_of(row, self.text_field)
        if self.first is None:
            self.first = found, name()
        if found != self.first[0] and not (found and self.first[0] and _is_emptied(row, found, self.first[0])):
            seen, before = (str(f) if f else "of no known type" for f in (found, self.first[0]))
            columns = sorted(name for name, value in row.items() if value is not None)
            raise DataError(
                f"{name()} is {seen} (columns {columns}) and {self.first[1]} is {before}; the rows of one source are "
                "of one type: keep them in separate files, or write them alike."
            )
        if found or self.strict:
            try:
                validate_row(row, self.text_field) if found is None else _check(row, found, self.text_field)
            except DataError as error:
                raise DataError(f"{name()}: {error}") from error


def _is_emptied(row: Mapping[str, Any], found: Format, first: Format) -> bool:
    """Of the type of the first, with an empty list in the place of messages: that is an error of its own."""
    return found.type == first.type and any(row.get(name) == [] for name in TYPES[found.type])


def validate(rows: Iterable[Mapping[str, Any]], name: str = "train", text_field: str = "text") -> Format | None:
    """Check every row and return their format; None without rows.

    Raises `DataError` naming the row (from 0), the column, the value and the fix; for rows of different formats, both.
    """
    checker = FormatChecker(text_field)
    for index, row in enumerate(rows):
        checker.see(row, partial("Row {} of the {} set".format, index, name))
    return checker.first[0] if checker.first else None
