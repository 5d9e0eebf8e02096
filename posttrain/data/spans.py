"""Where the assistant's turns lie in a rendered conversation, for any template.

A turn is found by rendering the conversation again with a sentinel in its place: what changed is the turn's body. Its
start is moved back to the end of the generation header, where a model starts to write (so that an empty thinking block
which the template inserts is trained), and its end forward over the token that ends the turn (never over a newline
after it). Nothing of this needs markers in the template; a template that has them, `{% generation %}`, is believed.

A turn whose change reaches beyond it (templates that write tool results inside the turn that called) is bounded by
rendering the conversation up to it. Spans are checked: disjoint, in order, and clear of what tools said.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from posttrain.data.proof import REASONING, Span, call_not_written, prove, same_shape, shown
from posttrain.data.template import SENTINEL, Message, Template, common_prefix, common_suffix
from posttrain.errors import DataError


def locate(template: Template, messages: Sequence[Message]) -> tuple[str, list[Span]]:
    """Return the rendered text and one span a turn of the assistant, the turn's stop token included.

    e.g. "Hi" and "Yo" in ChatML -> "<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nYo<|im_end|>\\n" and the
    span of "Yo<|im_end|>"
    Raises `DataError` naming the turn that cannot be found.
    """
    if template.marks_turns:
        text, spans = template.generation_spans(messages)
        if spans:
            spans = [(span[0], _marked_end(template, text, span)) for span in spans]
            prove(template, template.normalize(messages), text, spans, marked=True)
            return text, spans
    text, spans = _Locator(template, messages).run()
    prove(template, template.normalize(messages), text, spans, marked=False)
    return text, spans


def end_of_turn(template: Template, text: str, position: int) -> int:
    """Move the end of a body over the stop token that follows it.

    Which one is read from the end of a conversation, where nothing but the stop token follows the last turn.
    """
    facts = template.facts
    run = re.match(rf"\s*((?:{template.tokens.pattern})+)", facts.tail)
    if run is None:
        literal = re.match(r"\s*\S+", facts.tail)
        return position + literal.end() if literal and text.startswith(literal.group(), position) else position
    ends = [run.start(1) + match.end() for match in template.tokens.finditer(run.group(1))]
    for end in reversed(ends):
        if text.startswith(facts.tail[:end], position):
            return position + end
    # A turn in the middle, or one that calls a tool, may end in another token than the last one does.
    other = template.tokens.match(text, position)
    return other.end() if other and other.group() not in facts.openers else position


def _marked_end(template: Template, text: str, span: Span) -> int:
    """End of a span the template marked: many mark only the content and leave the stop token out."""
    start, end = span
    body = text[start:end].rstrip()
    extended = end_of_turn(template, text, end)
    stop = template.facts.tail.strip()
    if text.startswith(stop, end) or not any(m.end() == len(body) for m in template.tokens.finditer(body)):
        return extended
    return start + len(body)  # without the newline after the stop token, which no model writes


class _Locator:
    def __init__(self, template: Template, messages: Sequence[Message]) -> None:
        self.template = template
        self.messages = template.normalize(messages)
        self.text = template.render(messages)
        self.has_tools = any(m.get("role") == "tool" or m.get("tool_calls") for m in self.messages)
        self.previous_end = 0
        self._bodies: dict[int, Span | None] = {}

    def run(self) -> tuple[str, list[Span]]:
        spans = []
        for index, message in enumerate(self.messages):
            if message.get("role") == "assistant":
                span = self._turn(index)
                spans.append(span)
                self.previous_end = span[1]
        return self.text, spans

    def _turn(self, index: int) -> Span:
        message = self.messages[index]
        for replacement in (_plain(message), same_shape(message)):
            body = self._changed(index, replacement)
            if body is None:
                continue
            start = self._start(index, body[0])
            for candidate in self._ends(index, body[1], calls="tool_calls" in replacement):
                if candidate is not None and self._is_clear(index, start, candidate):
                    self._check_calls(index, self.text[start:candidate])
                    return start, candidate
        said = str(message.get("content", ""))[:60]
        raise DataError(
            f"message {index} (assistant, {said!r}) cannot be located in the rendered chat: the template drops it, "
            f"rewrites it, or writes it inside another turn: {self._doubtful(index)}. Mark the turns in the template "
            "with {% generation %}, or train without `assistant_only_loss`."
        )

    def _ends(self, index: int, body: int, calls: bool) -> Iterator[int | None]:
        """Where the turn may end, the likeliest first. One by one: each takes a rendering."""
        yield self._end(body, calls)
        yield self._end_when_last(index)
        yield self._end_when_last(index, thinking=False)

    def _doubtful(self, index: int) -> str:
        """What replacing the turn changes, or where the rendering goes on after the turn before it."""
        body = self._changed(index, _plain(self.messages[index]))
        return shown(self.text, *(body or (self.previous_end, self.previous_end)))

    def _check_calls(self, index: int, written: str) -> None:
        for call in self.messages[index].get("tool_calls") or ():
            name = str((call.get("function") or call).get("name", ""))
            if name not in written:
                raise call_not_written(index, name)

    def _changed(self, index: int, replacement: dict[str, Any]) -> Span | None:
        """What changes in the text when message `index` is replaced; None if the template refuses or drops it."""
        other = self.template.try_render([*self.messages[:index], replacement, *self.messages[index + 1 :]])
        if other is None or SENTINEL not in other:
            return None
        start = common_prefix(self.text, other)
        suffix = common_suffix(self.text, other, min(len(self.text), len(other)) - start)
        return start, len(self.text) - suffix

    def _start(self, index: int, body: int) -> int:
        header = self.template.facts.header
        if header and self.text.endswith(header, 0, body):
            return body
        opened = self.template.try_render(self.messages[:index], add_generation_prompt=True)
        if opened is not None:
            shared = common_prefix(self.text, opened)
            if shared == len(opened):
                return shared
            base = self.template.try_render(self.messages[:index])
            if base is not None:
                opens = self.template.token_start(opened, common_prefix(opened, base))
                header = opened[opens:]
                if shared >= opens:
                    return self.template.clean_border(self.text, min(shared, body), opens)
        # The turns before this one read differently in a prefix (thinking is stripped from history): search.
        floor = max([self.previous_end, *(self._body(index - 1) or ())]) if index else 0
        for length in self._clean_lengths(header):
            at = self.text.rfind(header[:length], floor, body)
            if at >= 0:
                return at + length
        return body

    def _clean_lengths(self, header: str) -> list[int]:
        """Lengths of `header` at which a shorter form of it may end, the longest first."""
        ends = {match.end() for match in self.template.tokens.finditer(header)}
        ends |= {match.end() for match in re.finditer("\n", header)}
        return sorted(ends | {len(header)} - {0}, reverse=True)

    def _end(self, body: int, calls: bool) -> int:
        if not calls:
            return end_of_turn(self.template, self.text, body)
        # The sentinel stood inside the call, so the rest of the call lies between it and the stop token.
        end = body
        for token in self.template.tokens.finditer(self.text, body):
            if token.group() in self.template.facts.openers:
                break
            end = token.end()
        return end

    def _end_when_last(self, index: int, thinking: bool = True) -> int | None:
        """Where the conversation cut after this turn stops agreeing with the whole one.

        Without thinking where the whole one has none either: many templates write it in the last turn only.
        """
        until = self.messages[: index + 1]
        if not thinking:
            until = [{key: value for key, value in m.items() if key not in REASONING} for m in until]
        cut = self.template.try_render(until)
        if cut is None:
            return None
        shared = self.template.token_start(self.text, common_prefix(self.text, cut))
        return len(self.text[:shared].rstrip())

    def _is_clear(self, index: int, start: int, end: int) -> bool:
        if not self.previous_end <= start < end:
            return False
        if not self.has_tools:
            return True
        for other in (index - 1, index + 1):
            if not 0 <= other < len(self.messages) or self.messages[other].get("role") == "assistant":
                continue
            body = self._body(other)
            if body is not None and body[0] < end and start < body[1]:
                return False
        return True

    def _body(self, index: int) -> Span | None:
        if index not in self._bodies:
            self._bodies[index] = self._changed(index, {**self.messages[index], "content": SENTINEL})
        return self._bodies[index]


def _plain(message: Message) -> dict[str, Any]:
    """The turn as a bare sentence: everything it held, calls and reasoning included, is then part of the change."""
    return {"role": message["role"], "content": SENTINEL}
