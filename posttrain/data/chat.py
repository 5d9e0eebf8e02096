"""Chats → text, and chats → text with the spans that are trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.data.formats import is_conversational
from posttrain.data.spans import Span, end_of_turn, locate
from posttrain.data.template import Template, common_prefix, parse_kwargs, parse_tools
from posttrain.errors import DataError, suggest

# The combinations of chat columns that make a row.
SUPPORTED = (
    {"messages"},
    {"prompt"},
    {"prompt", "completion"},
    {"prompt", "chosen", "rejected"},
    {"chosen", "rejected"},
    {"prompt", "completion", "label"},
)
# Who may speak. Other roles are taken where the template names them.
ROLES = ("system", "developer", "user", "assistant", "tool")
COLUMNS = {"messages", "prompt", "completion", "chosen", "rejected", "label"}


def template_of(tokenizer: Any, row: Mapping[str, Any], tools: Any = None, **template_kwargs: Any) -> Template:
    """The tokenizer's template with the tools and arguments a row brings (`tools`, `chat_template_kwargs`)."""
    tools = tools if tools is not None else row.get("tools")
    kwargs = {**parse_kwargs(row.get("chat_template_kwargs")), **template_kwargs}
    return Template(tokenizer, parse_tools(tools), kwargs)


def apply_chat_template(
    example: Mapping[str, Any],
    tokenizer: Any = None,
    tools: Any = None,
    *,
    processing_class: Any = None,
    **template_kwargs: Any,
) -> dict[str, Any]:
    """Render the chats of a row as text.

    `messages` becomes `text`; `prompt` ends where the model starts to write (or goes on, when its last message is the
    assistant's); `completion`, `chosen` and `rejected` are what the template writes after the prompt. `label` is kept.

    e.g. {"prompt": [{"role": "user", "content": "Hi"}], "completion": [{"role": "assistant", "content": "Yo"}]}
      -> {"prompt": "<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n", "completion": "Yo<|im_end|>\\n"}
    `processing_class` is another name of `tokenizer`.
    Raises `DataError` for other columns, an empty chat, or a tokenizer without a template.
    """
    tokenizer = _one_tokenizer(tokenizer, processing_class)
    columns = COLUMNS & set(example)
    if columns not in SUPPORTED:
        raise DataError(
            f"A chat row with the columns {sorted(columns)} cannot be rendered; supported are "
            f"{[sorted(names) for names in SUPPORTED]}."
        )
    template = template_of(tokenizer, example, tools, **template_kwargs)
    if "messages" in example:
        return {"text": template.render(check_messages(example["messages"], "messages"))}
    if "prompt" not in example:
        return {name: template.render(check_messages(example[name], name)) for name in ("chosen", "rejected")}
    prompt = check_messages(example["prompt"], "prompt")
    opened = open_prompt(template, prompt)
    whole = {
        name: template.render([*prompt, *check_messages(example[name], name)])
        for name in ("chosen", "rejected", "completion")
        if name in example
    }
    # A generation prompt may write more than the turn itself repeats (an opened thinking block, say).
    border = min([common_prefix(opened, text) for text in whole.values()], default=len(opened))
    rendered: dict[str, Any] = {"prompt": opened[:border], **{name: text[border:] for name, text in whole.items()}}
    if "label" in example:
        rendered["label"] = example["label"]
    return rendered


def maybe_apply_chat_template(
    example: Mapping[str, Any],
    tokenizer: Any = None,
    tools: Any = None,
    *,
    processing_class: Any = None,
    **template_kwargs: Any,
) -> dict[str, Any]:
    """As `apply_chat_template` for a row that holds chats; any other row is returned as it is."""
    tokenizer = _one_tokenizer(tokenizer, processing_class)
    if is_conversational(example):
        return apply_chat_template(example, tokenizer, tools, **template_kwargs)
    return dict(example)


def _one_tokenizer(tokenizer: Any, processing_class: Any) -> Any:
    if (tokenizer is None) == (processing_class is None):
        raise DataError("A chat template is applied with `tokenizer`, or `processing_class` in its place: give one.")
    return processing_class if tokenizer is None else tokenizer


def open_prompt(template: Template, prompt: list[dict[str, Any]]) -> str:
    """The text a model is given: the prompt up to where it starts to write, or goes on writing."""
    role = prompt[-1]["role"]
    if role == "assistant":
        return template.render(prompt, continue_final_message=True)
    if role in ("user", "tool"):
        return template.render(prompt, add_generation_prompt=True)
    raise DataError(f"The last message of a prompt has the role {role!r}; it must be 'user', 'tool' or 'assistant'.")


def check_messages(messages: Any, column: str, template: Template | None = None) -> list[dict[str, Any]]:
    """Return the messages, or raise `DataError` naming the column, the message and what is wrong with it.

    With a template, a role must be one of `ROLES` or one that the template names: most templates write any role, so a
    misspelt one would be a speaker of its own, and never trained.
    """
    if not isinstance(messages, (list, tuple)):
        raise DataError(f"column {column!r} holds a {type(messages).__name__}; a chat is a list of messages.")
    if not messages:
        raise DataError(f"column {column!r} is an empty list; a chat needs at least one message. Remove the row.")
    for index, message in enumerate(messages):
        where = f"column {column!r}, message {index}"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"{where} is {message!r:.80}; write a mapping with 'role' and 'content'.")
        role = message["role"]
        if template is not None and role not in ROLES and not template.names(role):
            hint = suggest(role.lower(), ROLES) or f" Write one of {', '.join(ROLES)}."
            raise DataError(f"{where} has the role {role!r}, which the chat template does not name.{hint}")
        content = message.get("content")
        if content is None and not any(message.get(k) for k in ("tool_calls", "reasoning_content", "thinking")):
            raise DataError(f"{where} ({message['role']}) has no content; write text, even if empty, or remove it.")
        if content is not None and not isinstance(content, (str, list, Mapping)):
            raise DataError(f"{where}: content is a {type(content).__name__}; write text.")
    return [dict(message) for message in messages]


def chat_spans(template: Template, messages: list[dict[str, Any]]) -> tuple[str, list[Span]]:
    """The text of a conversation and the spans of it the assistant wrote, each with its stop token.

    Special tokens spelled out in a message are kept as the template's own tokenization reads them: as those tokens.
    They are trained only inside the assistant's own turns.
    """
    return locate(template, messages)


def completion_spans(
    template: Template, prompt: list[dict[str, Any]], completion: list[dict[str, Any]]
) -> tuple[str, Span]:
    """The text of prompt and completion, and the span of the completion, to its last stop token.

    The prompt's part is the text the model is given at inference wherever the template repeats it.
    """
    text = template.render([*prompt, *completion])
    opened = open_prompt(template, prompt)
    border = common_prefix(text, opened)
    if border < len(opened):
        # The prompt opens more than the turn repeats (a thinking block, say): agreement by chance is no prompt.
        border = template.clean_border(text, border)
    tail = template.facts.tail
    end = len(text)
    if tail.strip():
        # What a template writes after the stop token (a newline, an end of text) no model is asked for.
        end = end_of_turn(template, text, end - len(tail)) if text.endswith(tail) else len(text.rstrip())
    return text, (border, max(border, end))
