"""Checks of the template audit about tokens: whether turns are found, and what begins and ends them."""

from __future__ import annotations

import re
from typing import Any

from posttrain.data.audit_probe import ONE, THOUGHT, TWO, Check, Probe, Verdict, brief, common_prefix_ids, says
from posttrain.errors import DataError

# ---- can it be used at all -------------------------------------------------------------------------------------------


def renders(probe: Probe) -> Check:
    try:
        text = probe.template.render(ONE)
    except DataError as error:
        return Check("renders", "fail", "no", f"{error}")
    missing = [word for word in ("probeask", "probesay") if word not in text]
    if missing:
        who = "user" if missing[0] == "probeask" else "assistant"
        return Check("renders", "fail", "drops text", f"what the {who} says is not written: {brief(text)}")
    return Check("renders", "pass", "yes", brief(text))


def turns(probe: Probe) -> Check:
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


def one_bos(probe: Probe) -> Check:
    bos = probe.tokenizer.bos_token_id
    text = probe.template.render(ONE)
    ids = probe.ids(text)
    if bos is None:
        return Check("one_bos", "pass", "no BOS token", "the tokenizer has none")
    count = ids.count(bos)
    opens_turns = probe.tokenizer.bos_token in probe.template.facts.openers and ids[:1] == [bos]
    leading = next((at for at, token in enumerate(ids) if token != bos), len(ids))
    begins = f"the text begins {brief(text, 60)}"
    if leading > 1 or (count > 1 and not opens_turns):
        fix = "take `bos_token` out of the template where it is written twice"
        return Check("one_bos", "fail", str(count), f"{begins}; {fix}")
    if count == 0 and probe.encoder.prefix == [bos]:
        evidence = f"plain text gets {probe.tokenizer.bos_token!r} and chats do not; {begins}"
        return Check("one_bos", "warn", "0", evidence)
    return Check("one_bos", "pass", "opens each turn" if opens_turns and count > 1 else str(count), begins)


def stop_token(probe: Probe) -> Check:
    """The token that ends a turn is trained, once a turn."""
    ends = []
    for run in probe.two.runs:
        if run[-1] not in probe.known_tokens:
            literal = probe.template.facts.tail.strip()
            if literal and probe.decode(run).endswith(literal):
                evidence = (
                    f"{literal!r} ends a turn and the tokenizer reads it as {len(probe.ids(literal))} tokens; "
                    "add it to the tokenizer, or take a template that fits it (`chat_template_path`)"
                )
                return Check("stop_token", "warn", "not a token", evidence)
            evidence = (
                f"a turn ends {brief(probe.decode(run), 60)}: no token is trained that would end generation; write "
                "one after the assistant's content"
            )
            return Check("stop_token", "fail", "none", evidence)
        if run.count(run[-1]) > 1:
            evidence = f"a turn reads {probe.decode(run)!r}"
            return Check("stop_token", "fail", f"{run.count(run[-1])} a turn", evidence)
        ends.append(probe.decode(run[-1:]))
    finding = ends[-1] if len(set(ends)) == 1 else f"{ends[-1]}, in history {ends[0]}"
    return Check("stop_token", "pass", finding, "ends each turn once")


def eos(probe: Probe) -> Check:
    """Generation stops where a turn ends."""
    stop = probe.two.runs[-1][-1]
    if stop not in probe.known_tokens:
        return Check("eos", "warn", "no stop token", "see stop_token")
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


def prompt_ids(probe: Probe) -> Check:
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
        if chat is TWO and probe.decode(trained) == probe.decode(served):
            # Tokens of a header depend on the word after it: a turn has those its own prompt had.
            evidence = f"token {at}: a server that reads the history again from its text finds other tokens there"
            worst = Check("prompt_ids", "warn", "history read anew", evidence)
            continue
        ours, theirs = probe.decode(trained[at:]), probe.decode(served[at:])
        if at == len(trained) and re.search("think|thought|reason|analysis", theirs, re.IGNORECASE):
            evidence = f"at inference the prompt goes on with {theirs!r}, which rows lack"
            if _equal_when_thinking(probe):
                evidence += " unless they bring reasoning; for rows without it turn thinking off in the template"
            worst = Check("prompt_ids", "warn", "opens more", evidence)
        elif at == len(served):
            evidence = f"rows write {ours!r} before a turn, which the prompt at inference lacks"
            worst = Check("prompt_ids", "warn", "opens less", evidence)
        else:
            evidence = f"token {at}: rows go on {brief(ours, 60)}, inference {brief(theirs, 60)}"
            return Check("prompt_ids", "fail", "differ", evidence)
    return worst


def _equal_when_thinking(probe: Probe) -> bool:
    """Whether rows that think start where a server lets the model start."""
    if not probe.reasoning_keys:
        return False
    chat = [ONE[0], says("probesay", **{probe.reasoning_keys[0]: THOUGHT})]
    return probe.train(chat).prompt == _served(probe, chat[:-1])


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
