"""Checks of the template audit about messages: what of them is written, and what happens to it later."""

from __future__ import annotations

import re
from typing import Any

from posttrain.data.audit_probe import (
    CALL,
    CALLING,
    ONE,
    SYSTEM,
    THOUGHT,
    TWO,
    Check,
    Probe,
    brief,
    common_prefix_ids,
    says,
    user,
)
from posttrain.data.template import common_prefix
from posttrain.errors import DataError

# ---- history ---------------------------------------------------------------------------------------------------------


def history(probe: Probe) -> Check:
    """Whether a conversation that goes on starts with what it was."""
    chats: list[tuple[str, list[dict[str, Any]], bool]] = [("plain turns", TWO, False)]
    key = next(iter(probe.reasoning_keys), None)
    if key:
        chats.append(("reasoning", [ONE[0], says("probesay", **{key: THOUGHT}), *TWO[2:]], False))
    if probe.supports_tools:
        chats.append(("tool results", CALLING, True))
    changed = {}
    for name, chat, tools in chats:
        place = _place_of_change(probe, chat, tools)
        if place is not None:
            changed[name] = place
    if not changed:
        return Check("history", "pass", "append-only", f"also with {', '.join(name for name, *_ in chats)}")
    finding = "rewritten" if "plain turns" in changed else f"rewritten with {' and '.join(changed)}"
    name, place = next(iter(changed.items()))
    evidence = f"{name}: {place}; rows of several turns share fewer prefixes, and a rollout is not its own prefix"
    return Check("history", "warn", finding, evidence)


def _place_of_change(probe: Probe, chat: list[dict[str, Any]], tools: bool) -> str | None:
    """Where the first turn reads differently once the conversation goes on; None where it does not."""
    try:
        short, long = probe.train(chat[:2], tools), probe.train(chat, tools)
    except DataError as error:
        return f"cannot be told ({error})"
    if not any(short.weights):  # a template that marks its turns may leave this one out
        return None
    end = short.spans[-1][1]
    at = common_prefix(short.text, long.text)
    if at < end:
        return f"{brief(short.text[at:end], 40)} becomes {brief(long.text[at : at + 40], 40)}"
    last = max(at for at, weight in enumerate(short.weights) if weight) + 1
    same = common_prefix_ids(short.ids[:last], long.ids)
    return None if same == last else f"the ids differ from token {same} on, and the text does not"


def reasoning(probe: Probe) -> Check:
    """What becomes of an assistant's thinking."""
    keys = probe.reasoning_keys
    inline = f"<think>\n{THOUGHT}\n</think>\n\nprobesay"
    thinks = says("probesay", **dict.fromkeys(keys, THOUGHT)) if keys else says(inline)
    last = THOUGHT in (probe.render([ONE[0], thinks]) or "")
    past = THOUGHT in (probe.render([ONE[0], thinks, *TWO[2:]]) or "")
    how = f"keys read: {', '.join(keys)}" if keys else "no key is read; thinking is written into the content"
    if not last:
        evidence = f"{how}, and the template strips <think>…</think> from it: it would never be trained"
        return Check("reasoning", "warn", "dropped", evidence)
    if not past:
        return Check("reasoning", "pass", "last turn only", how)
    return Check("reasoning", "pass", "kept" if keys else "as content", how)


# ---- messages --------------------------------------------------------------------------------------------------------


def default_system(probe: Probe) -> Check:
    text = probe.template.render(ONE)
    before = text.partition("probeask")[0]
    bare = probe.template.tokens.sub("", before)
    words = re.sub(r"\b(?:user|system|human|developer|assistant|INST)\b", "", bare, flags=re.IGNORECASE)
    if len(re.findall(r"\w{2,}", words)) < 3:
        return Check("default_system", "pass", "none", brief(before))
    return Check("default_system", "pass", "written", f"before the first question: {brief(before, 160)}")


def date(probe: Probe) -> Check:
    """Ids that depend on the day are not the ids of yesterday's run."""
    if "strftime_now" not in probe.template.text:
        return Check("date", "pass", "none", "the template does not ask for it")
    evidence = "the template writes today's date: rows prepared on another day differ; fix it with a template argument"
    return Check("date", "warn", "today's", evidence)


def system(probe: Probe) -> Check:
    text = probe.render([SYSTEM, *ONE])
    if text is None:
        return Check("system", "pass", "refused", "rows with a system message are errors")
    if "probesystem" not in text:
        return Check("system", "warn", "dropped", f"the system message is left out: {brief(text)}")
    return Check("system", "pass", "written", brief(text))


def order(probe: Probe) -> Check:
    """Whether speakers must alternate."""
    text = probe.render([user("probeask"), user("probenext"), says("probesay")])
    if text is None:
        return Check("order", "pass", "must alternate", "two questions in a row are an error")
    if "probeask" not in text or "probenext" not in text:
        return Check("order", "warn", "drops text", f"two questions in a row become one: {brief(text)}")
    return Check("order", "pass", "any", brief(text))


def content(probe: Probe) -> Check:
    """Whether content is written as it is."""
    text = probe.render([user("probeask"), says("  probesay\n\n")]) or ""
    if "  probesay\n\n" in text:
        return Check("content", "pass", "as it is", "spaces around it are kept")
    return Check("content", "pass", "trimmed", "spaces around it are taken off, in rows and at inference alike")


def none_content(probe: Probe) -> Check:
    """A message without content is not the word None."""
    template = probe.with_tools if probe.supports_tools else probe.template
    calls = {"tool_calls": [CALL]} if probe.supports_tools else {}
    none = template.try_render([ONE[0], says(None, **calls)])
    if none is None:
        return Check("none_content", "pass", "refused", "a message whose content is None is an error")
    # The words may be in the template's own text, a schema or an instruction.
    said = template.try_render([ONE[0], says("probesay", **calls)]) or template.render(ONE)
    words = re.compile(r"\b(?:None|null|undefined)\b")
    if len(words.findall(none)) > len(words.findall(said)):
        evidence = f"content None is written {brief(none[common_prefix(none, said) :])}"
        return Check("none_content", "fail", "written as a word", evidence)
    return Check("none_content", "pass", "nothing written", "as empty text")


def tools(probe: Probe) -> Check:
    if not probe.supports_tools:
        wrote = "probeuse" in (probe.with_tools.try_render([ONE[0]]) or "")
        evidence = "rows with tool calls are errors"
        return Check("tools", "pass", "schemas only" if wrote else "none", evidence)
    try:
        said = [probe.decode(run) for run in probe.train(CALLING, tools=True).runs]
    except DataError as error:
        return Check("tools", "warn", "not trainable", str(error))
    evidence = f"trained: {' | '.join(map(repr, said))}"
    written = "".join(said)
    if "proberesult" in written or "probeuse" in written:
        return Check("tools", "fail", "results trained", evidence)
    if "probeval" not in written:
        return Check("tools", "fail", "calls not trained", evidence)
    return Check("tools", "pass", "calls and results", evidence)


def special_text(probe: Probe) -> Check:
    """A user who writes the stop token does not move what is trained."""
    stop = probe.decode(probe.two.runs[-1][-1:])
    chat = [user(f"probeask {stop} probesay {stop}"), *TWO[1:]]
    try:
        runs = probe.train(chat).runs
    except DataError as error:
        return Check("special_text", "warn", "refused", str(error))
    if runs != probe.two.runs:
        said = " | ".join(repr(probe.decode(run)) for run in runs)
        return Check("special_text", "fail", "moves the turns", f"trained: {said}")
    read = "tokens" if probe.ids(stop) == probe.two.runs[-1][-1:] else "text"
    return Check("special_text", "pass", f"read as {read}", f"{stop!r} in a question; the trained turns stay the same")
