"""The checks of the template audit. Each renders probes, conversations of words that nothing else writes, and looks at
the text or at the ids that training would see.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from posttrain.data.chat import chat_spans
from posttrain.data.encode import Draft, Encoder
from posttrain.data.spans import REASONING, Span
from posttrain.data.template import Message, Template, common_prefix
from posttrain.errors import DataError

Verdict = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One question asked of a template. e.g. Check("one_bos", "fail", "2", "the text begins '<s><s>[INST]'")"""

    name: str
    verdict: Verdict
    finding: str  # the answer in a word or two; part of the audit's hash
    evidence: str  # what was seen, for a reader


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


SYSTEM, THOUGHT = {"role": "system", "content": "probesystem"}, "probethought"
ONE = [user("probeask"), says("probesay")]
TWO = [*ONE, user("probenext"), says("probeend")]
_TOOL = {
    "type": "function",
    "function": {
        "name": "probetool",
        "description": "probeuse",
        "parameters": {"type": "object", "properties": {"probekey": {"type": "string", "description": "probearg"}}},
    },
}
_CALL = {
    "id": "probe0001",
    "type": "function",
    "function": {"name": "probetool", "arguments": {"probekey": "probeval"}},
}
_RESULT = {"role": "tool", "name": "probetool", "tool_call_id": "probe0001", "content": "proberesult"}
CALLING = [user("probeask"), says("", tool_calls=[_CALL]), _RESULT, says("probeend")]


@dataclass(frozen=True)
class Trained:
    """A conversation as training sees it."""

    text: str
    spans: list[Span]
    ids: list[int]
    weights: list[float]

    @property
    def runs(self) -> list[list[int]]:
        """The trained tokens, a list a turn."""
        found: list[list[int]] = []
        for at, (token, weight) in enumerate(zip(self.ids, self.weights, strict=True)):
            if weight:
                if not (at and self.weights[at - 1]):
                    found.append([])
                found[-1].append(token)
        return found

    @property
    def prompt(self) -> list[int]:
        """What stands before the last turn."""
        last = max(at for at, weight in enumerate(self.weights) if weight)
        first = next((at + 1 for at in range(last, -1, -1) if not self.weights[at]), 0)
        return self.ids[:first]


class Probe:
    """A template, and its renderings of the probes, each made once."""

    def __init__(self, tokenizer: Any, stops: frozenset[int] | None, kwargs: dict[str, Any]) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.template = Template(tokenizer, None, kwargs)
        self.with_tools = Template(tokenizer, [_TOOL], kwargs)
        self.encoder = Encoder(tokenizer)

    def render(self, messages: Sequence[Message], **flags: Any) -> str | None:
        return self.template.try_render(messages, **flags)

    def train(self, messages: list[dict[str, Any]], tools: bool = False) -> Trained:
        """Ids and weights of a chat. Raises `DataError` where its turns cannot be found."""
        text, spans = chat_spans(self.with_tools if tools else self.template, messages)
        return self.encoded(Draft(text, spans, tuple(start for start, _ in spans if start)))

    def encoded(self, draft: Draft) -> Trained:
        [(ids, weights)] = self.encoder.encode([draft])
        return Trained(draft.text, draft.spans, ids.tolist(), weights.tolist())

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)

    @cached_property
    def two(self) -> Trained:
        return self.train(TWO)

    @cached_property
    def supports_tools(self) -> bool:
        text = self.with_tools.try_render(CALLING) or ""
        return all(word in text for word in ("probetool", "probekey", "probeval", "proberesult"))


def run_checks(tokenizer: Any, stops: frozenset[int] | None, kwargs: dict[str, Any]) -> tuple[list[Check], str]:
    """Every check that can be made, and what identifies template and tokens."""
    probe = Probe(tokenizer, stops, kwargs)
    first = [_renders(probe)]
    if first[0].verdict == "pass":
        first.append(_turns(probe))
    checks = first if first[-1].verdict == "fail" else [*first, *(check(probe) for check in CHECKS)]
    tokens = {name: (token, tokenizer.convert_tokens_to_ids(token)) for name, token in _named_tokens(tokenizer)}
    identity = json.dumps([tokenizer.chat_template, tokens, sorted(kwargs.items())], sort_keys=True, default=str)
    return checks, hashlib.sha256(identity.encode()).hexdigest()


def _named_tokens(tokenizer: Any) -> Iterator[tuple[str, str]]:
    for name in ("bos_token", "eos_token", "pad_token"):
        token = getattr(tokenizer, name)
        if token is not None:
            yield name, token


# ---- can it be used at all -------------------------------------------------------------------------------------------


def _renders(probe: Probe) -> Check:
    try:
        text = probe.template.render(ONE)
    except DataError as error:
        return Check("renders", "fail", "no", f"{error}")
    missing = [word for word in ("probeask", "probesay") if word not in text]
    if missing:
        who = "user" if missing[0] == "probeask" else "assistant"
        return Check("renders", "fail", "drops text", f"what the {who} says is not written: {_shown(text)}")
    return Check("renders", "pass", "yes", _shown(text))


def _turns(probe: Probe) -> Check:
    """Whether each turn of the assistant is found, and nothing else."""
    try:
        trained = probe.two
    except DataError as error:
        return Check("turns", "fail", "not found", str(error))
    said = [probe.decode(run) for run in trained.runs]
    evidence = f"trained: {' | '.join(map(repr, said))}"
    written = "".join(said)
    foreign = [word for word in ("probeask", "probenext") if word in written]
    if foreign:
        return Check("turns", "fail", "other text trained", f"{foreign[0]} is the user's. {evidence}")
    if len(said) != 2 or "probesay" not in said[0] or "probeend" not in said[-1]:
        marked = probe.template.marks_turns and len(said) < 2
        verdict: Verdict = "warn" if marked and "probeend" in written else "fail"
        return Check("turns", verdict, f"{len(said)} of 2 trained", evidence)
    how = "marked" if probe.template.marks_turns else "located"
    return Check("turns", "pass", how, evidence)


# ---- tokens ----------------------------------------------------------------------------------------------------------


def _one_bos(probe: Probe) -> Check:
    bos = probe.tokenizer.bos_token_id
    text = probe.template.render(ONE)
    ids = probe.ids(text)
    if bos is None:
        return Check("one_bos", "pass", "no BOS token", "the tokenizer has none")
    count = ids.count(bos)
    opens_turns = probe.tokenizer.bos_token in probe.template.facts.openers and ids[:1] == [bos]
    leading = next((at for at, token in enumerate(ids) if token != bos), len(ids))
    begins = f"the text begins {_shown(text, 60)}"
    if leading > 1 or (count > 1 and not opens_turns):
        fix = "take `bos_token` out of the template where it is written twice"
        return Check("one_bos", "fail", str(count), f"{begins}; {fix}")
    if count == 0 and probe.encoder.prefix == [bos]:
        evidence = f"plain text gets {probe.tokenizer.bos_token!r} and chats do not; {begins}"
        return Check("one_bos", "warn", "0", evidence)
    return Check("one_bos", "pass", "opens each turn" if opens_turns and count > 1 else str(count), begins)


def _stop_token(probe: Probe) -> Check:
    """The token that ends a turn is trained, once a turn."""
    known = set(probe.tokenizer.added_tokens_decoder) | set(probe.tokenizer.all_special_ids)
    ends = []
    for run in probe.two.runs:
        if run[-1] not in known:
            literal = probe.template.facts.tail.strip()
            if literal and probe.decode(run).endswith(literal):
                evidence = (
                    f"{literal!r} ends a turn and the tokenizer reads it as {len(probe.ids(literal))} tokens; "
                    "add it to the tokenizer, or take a template that fits it (`chat_template_path`)"
                )
                return Check("stop_token", "warn", "not a token", evidence)
            evidence = (
                f"a turn ends {_shown(probe.decode(run), 60)}: no token is trained that would end generation; write "
                "one after the assistant's content"
            )
            return Check("stop_token", "fail", "none", evidence)
        if run.count(run[-1]) > 1:
            evidence = f"a turn reads {probe.decode(run)!r}"
            return Check("stop_token", "fail", f"{run.count(run[-1])} a turn", evidence)
        ends.append(probe.decode(run[-1:]))
    finding = ends[-1] if len(set(ends)) == 1 else f"{ends[-1]}, in history {ends[0]}"
    return Check("stop_token", "pass", finding, "ends each turn once")


def _eos(probe: Probe) -> Check:
    """Generation stops where a turn ends."""
    stop = probe.two.runs[-1][-1]
    eos, known = probe.tokenizer.eos_token_id, probe.stops
    token = probe.decode([stop])
    if stop == eos and (known is None or stop in known):
        return Check("eos", "pass", "agrees", f"{token!r} ends a turn, and is `eos_token`")
    if known is not None and stop in known:
        return Check("eos", "pass", "generation config", f"{token!r} is among the model's `eos_token_id`")
    where = f"`eos_token` is {probe.tokenizer.eos_token!r}"
    if known is not None:
        where += f" and the model's `eos_token_id` {sorted(known)}"
    evidence = f"a turn ends with {token!r} and {where}: generation would not stop there; set `eos_token`"
    return Check("eos", "warn", "differs", evidence)


def _prompt_ids(probe: Probe) -> Check:
    """The ids before a turn are the ids a server gives the model."""
    worst = Check("prompt_ids", "pass", "equal", "one turn and two")
    for chat in (ONE, TWO):
        trained = (probe.two if chat is TWO else probe.train(chat)).prompt
        served = _served(probe, chat[:-1])
        if served is None:
            evidence = "the template takes no conversation that ends with the user"
            return Check("prompt_ids", "warn", "no generation prompt", evidence)
        if trained == served:
            continue
        at = common_prefix_ids(trained, served)
        ours, theirs = probe.decode(trained[at:]), probe.decode(served[at:])
        if at == len(trained):
            evidence = f"at inference the prompt goes on with {theirs!r}, which rows lack"
            worst = Check("prompt_ids", "warn", "opens more", evidence)
        elif at == len(served):
            evidence = f"rows write {ours!r} before a turn, which the prompt at inference lacks"
            worst = Check("prompt_ids", "warn", "opens less", evidence)
        else:
            evidence = f"token {at}: rows go on {_shown(ours, 60)}, inference {_shown(theirs, 60)}"
            return Check("prompt_ids", "fail", "differ", evidence)
    return worst


def _served(probe: Probe, messages: list[dict[str, Any]]) -> list[int] | None:
    """As a server does: one call of the tokenizer, from messages to ids."""
    try:
        out = probe.tokenizer.apply_chat_template(
            probe.template.normalize(messages),
            **{**probe.template.kwargs, "add_generation_prompt": True, "tokenize": True, "return_dict": True},
        )
    except Exception:  # a template may raise anything
        return None
    return list(out["input_ids"])


def common_prefix_ids(a: Sequence[int], b: Sequence[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# ---- history ---------------------------------------------------------------------------------------------------------


def _history(probe: Probe) -> Check:
    """Whether a conversation that goes on starts with what it was."""
    chats: list[tuple[str, list[dict[str, Any]], bool]] = [("plain turns", TWO, False)]
    key = next(iter(_reasoning_keys(probe)), None)
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
    if not short.spans:
        return None
    end = short.spans[-1][1]
    at = common_prefix(short.text, long.text)
    if at < end:
        return f"{_shown(short.text[at:end], 40)} becomes {_shown(long.text[at : at + 40], 40)}"
    last = max(at for at, weight in enumerate(short.weights) if weight) + 1
    same = common_prefix_ids(short.ids[:last], long.ids)
    return None if same == last else f"the ids differ from token {same} on, and the text does not"


def _reasoning_keys(probe: Probe) -> list[str]:
    """The keys of a message whose text the template writes in the last turn."""
    return [key for key in REASONING if THOUGHT in (probe.render([ONE[0], says("probesay", **{key: THOUGHT})]) or "")]


def _reasoning(probe: Probe) -> Check:
    """What becomes of an assistant's thinking."""
    keys = _reasoning_keys(probe)
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


def _default_system(probe: Probe) -> Check:
    text = probe.template.render(ONE)
    before = text.partition("probeask")[0]
    bare = probe.template.tokens.sub("", before)
    words = re.sub(r"\b(?:user|system|human|developer|assistant|INST)\b", "", bare, flags=re.IGNORECASE)
    if len(re.findall(r"\w{2,}", words)) < 3:
        return Check("default_system", "pass", "none", _shown(before))
    return Check("default_system", "pass", "written", f"before the first question: {_shown(before, 160)}")


def _date(probe: Probe) -> Check:
    """Ids that depend on the day are not the ids of yesterday's run."""
    if "strftime_now" not in probe.template.text:
        return Check("date", "pass", "none", "the template does not ask for it")
    evidence = "the template writes today's date: rows prepared on another day differ; fix it with a template argument"
    return Check("date", "warn", "today's", evidence)


def _system(probe: Probe) -> Check:
    text = probe.render([SYSTEM, *ONE])
    if text is None:
        return Check("system", "pass", "refused", "rows with a system message are errors")
    if "probesystem" not in text:
        return Check("system", "warn", "dropped", f"the system message is left out: {_shown(text)}")
    return Check("system", "pass", "written", _shown(text))


def _order(probe: Probe) -> Check:
    """Whether speakers must alternate."""
    text = probe.render([user("probeask"), user("probenext"), says("probesay")])
    if text is None:
        return Check("order", "pass", "must alternate", "two questions in a row are an error")
    if "probeask" not in text or "probenext" not in text:
        return Check("order", "warn", "drops text", f"two questions in a row become one: {_shown(text)}")
    return Check("order", "pass", "any", _shown(text))


def _content(probe: Probe) -> Check:
    """Whether content is written as it is."""
    text = probe.render([user("probeask"), says("  probesay\n\n")]) or ""
    if "  probesay\n\n" in text:
        return Check("content", "pass", "as it is", "spaces around it are kept")
    return Check("content", "pass", "trimmed", "spaces around it are taken off, in rows and at inference alike")


def _none_content(probe: Probe) -> Check:
    """A message without content is not the word None."""
    template = probe.with_tools if probe.supports_tools else probe.template
    calls = {"tool_calls": [_CALL]} if probe.supports_tools else {}
    empty, none = (template.try_render([ONE[0], says(text, **calls)]) for text in ("", None))
    if none is None:
        return Check("none_content", "pass", "refused", "a message whose content is None is an error")
    added = none.replace(empty or "", "") if empty else none
    if re.search(r"\b(?:None|null)\b", none) and not re.search(r"\b(?:None|null)\b", empty or ""):
        return Check("none_content", "fail", "written as None", _shown(added, 120))
    return Check("none_content", "pass", "nothing written", "as empty text")


def _tools(probe: Probe) -> Check:
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


def _special_text(probe: Probe) -> Check:
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


CHECKS: tuple[Callable[[Probe], Check], ...] = (
    _one_bos,
    _stop_token,
    _eos,
    _prompt_ids,
    _history,
    _reasoning,
    _system,
    _default_system,
    _date,
    _order,
    _content,
    _none_content,
    _tools,
    _special_text,
)


def _shown(text: str, limit: int = 100) -> str:
    """Text for a report, cut in the middle. e.g. 'Hi\\n'"""
    if len(text) > limit:
        text = f"{text[: limit // 2]} … {text[-limit // 2 :]}"
    return repr(text)
