"""One chat template and what it writes around a turn, found by rendering probes."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from posttrain.data.shapes import QUESTION, Shape, find_shape, fit, without_none
from posttrain.errors import DataError

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
# Letters of the private use area: no template trims, splits or escapes them, and no text begins or ends with them.
SENTINEL = "\ue0a1\ue0b2\ue0c3"


def common_prefix(a: str, b: str) -> int:
    """Length of the longest common prefix, by bisection over slices: long conversations make a loop too slow."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_suffix(a: str, b: str, limit: int) -> int:
    """Length of the longest common suffix of at most `limit` characters."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if a[len(a) - middle : len(a) - low] == b[len(b) - middle : len(b) - low]:
            low = middle
        else:
            high = middle - 1
    return low


def parse_tools(tools: Any) -> list[Any] | None:
    """Tools as templates take them, from a list or from its JSON text. e.g. '[{"type": "function"}]' -> [{...}]"""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError as error:
            raise DataError(f"Column 'tools' is not valid JSON ({error}); write a list of tool schemas.") from error
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)):
        raise DataError(
            f"Column 'tools' holds a {type(tools).__name__}; write a list of tool schemas, or its JSON text."
        )
    # An empty list reads as "tools are given" in many templates, and writes an empty tool section.
    return [without_none(tool) for tool in tools] or None


def parse_kwargs(value: Any) -> dict[str, Any]:
    """The column `chat_template_kwargs`. e.g. {"enable_thinking": False, "mode": None} -> {"enable_thinking": False}"""
    if value is not None and not isinstance(value, Mapping):
        raise DataError(f"Column 'chat_template_kwargs' holds a {type(value).__name__}; write a mapping.")
    return {name: item for name, item in (value or {}).items() if item is not None}


def special_tokens(tokenizer: Any) -> frozenset[str]:
    """Tokens the tokenizer matches as a whole, special or not: templates build turns from both."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    return frozenset(token for token in added | set(tokenizer.all_special_tokens) if token.strip())


@lru_cache(maxsize=64)
def token_pattern(tokens: frozenset[str]) -> re.Pattern[str]:
    """Matches any of the tokens, the longest first; never, when there are none."""
    alternatives = "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True))
    return re.compile(alternatives or r"(?!)")


@dataclass(frozen=True)
class Facts:
    """What a template writes. e.g. ChatML -> header "<|im_start|>assistant\\n", tail "<|im_end|>\\n" """

    shape: Shape  # how messages must be written
    header: str  # opens an assistant turn
    tail: str  # follows the text of the last assistant turn
    openers: frozenset[str]  # tokens that open a turn, so never end one


_FACTS: dict[tuple[Any, ...], Facts] = {}


@dataclass
class Template:
    """The template of a tokenizer with the tools and arguments of one row."""

    tokenizer: Any
    tools: list[Any] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template and "chat_template" not in self.kwargs:
            raise DataError(
                "The row is a chat and the tokenizer has no chat template; set `chat_template_path` to a Jinja file or "
                "to a model whose template to use."
            )

    @cached_property
    def text(self) -> str:
        return self.tokenizer.get_chat_template(self.kwargs.get("chat_template"), self.tools)

    @cached_property
    def tokens(self) -> re.Pattern[str]:
        return token_pattern(special_tokens(self.tokenizer))

    @cached_property
    def facts(self) -> Facts:
        variables = {name: value for name, value in self.kwargs.items() if name != "chat_template"}
        tokens = repr(self.tokenizer.special_tokens_map)
        key = (self.text, repr(sorted(variables.items())), tokens, self.tokens.pattern, self.tools is None)
        if key not in _FACTS:
            if len(_FACTS) > 256:
                _FACTS.clear()
            _FACTS[key] = self._probe()
        return _FACTS[key]

    def _probe(self) -> Facts:
        shape = find_shape(self._try)
        ask = fit([{"role": "user", "content": QUESTION}], shape)
        reply = [{"role": "assistant", "content": SENTINEL}]
        base, opened = self._try(ask), self._try(ask, add_generation_prompt=True)
        answered = self._try([*ask, *fit(reply, shape)]) or ""
        header = opened[self.token_start(opened, common_prefix(opened, base)) :] if opened and base else ""
        before = [match.group() for match in self.tokens.finditer((base or "").partition(QUESTION)[0])]
        openers = frozenset([*before[-1:], *[match.group() for match in self.tokens.finditer(header)][:1]])
        tail = answered.rpartition(SENTINEL)[2] if SENTINEL in answered else ""
        if not tail.strip():
            logger.warning(
                "The chat template writes no stop token after the assistant's turn, so none is trained: %.60r",
                self.text,
            )
        return Facts(shape, header, tail, openers)

    def _try(self, messages: Sequence[Message], **flags: Any) -> str | None:
        try:
            return self._render(messages, **flags)
        except Exception:  # a template may raise anything; a probe that fails is an answer
            return None

    def _render(self, messages: Sequence[Message], **flags: Any) -> str:
        return self.tokenizer.apply_chat_template(
            list(messages), tools=self.tools, tokenize=False, **{**flags, **self.kwargs}
        )

    def normalize(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Messages as this template takes them. Idempotent."""
        return fit(messages, self.facts.shape)

    def render(self, messages: Sequence[Message], **flags: Any) -> str:
        """The text of a conversation. Raises `DataError` with the template's own complaint."""
        try:
            return self._render(self.normalize(messages), **flags)
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"The chat template cannot render the conversation: {error}") from error

    def try_render(self, messages: Sequence[Message], **flags: Any) -> str | None:
        """As `render`; None where the template refuses."""
        return self._try(self.normalize(messages), **flags) if messages else None

    def generation_spans(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """The text and the spans a template marks itself, with `{% generation %}`."""
        from transformers.utils.chat_template_utils import render_jinja_template

        arguments = {**self.tokenizer.special_tokens_map, **self.kwargs, "chat_template": self.text}
        try:
            texts, spans = render_jinja_template(
                conversations=[self.normalize(messages)],  # pyright: ignore[reportArgumentType]
                tools=self.tools,
                return_assistant_tokens_mask=True,
                **arguments,
            )
        except Exception as error:
            raise DataError(f"The chat template cannot render the conversation: {error}") from error
        return texts[0], [(int(start), int(end)) for start, end in spans[0]]

    @property
    def marks_turns(self) -> bool:
        return re.search(r"\{%-?\s*generation\s*-?%\}", self.text) is not None

    def names(self, role: str) -> bool:
        """Whether the template's text names a role. e.g. message.role == "ipython" names "ipython" """
        return f"'{role}'" in self.text or f'"{role}"' in self.text

    def clean_border(self, text: str, end: int, start: int = 0) -> int:
        """The last place in text[start:end] where a header may end: after a token or a newline; else `start`."""
        ends = [match.end() for match in self.tokens.finditer(text, start, end)]
        return max([start, *ends[-1:], text.rfind("\n", start, end) + 1])

    def token_start(self, text: str, position: int) -> int:
        """`position`, moved back to the start of the token it lies inside of, if any.

        e.g. in "<|end|>" position 3 -> 0
        """
        for match in self.tokens.finditer(text, max(0, position - 200)):
            if match.start() >= position:
                break
            if match.end() > position:
                return match.start()
        return position
