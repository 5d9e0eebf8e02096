"""What is wrong with the rows, in order of gravity: each with how many, an example and what to do."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.data.audit import TemplateAudit
from posttrain.report.duplicates import Pair, exact_pairs, near_pairs, row_hash
from posttrain.report.finding import ORDER, SHOWN, Facts, Finding, grave, of, percent
from posttrain.report.page import Gravity
from posttrain.report.survey import Packing, Survey, whole_rows
from posttrain.report.texts import TEXT_FAULTS


@dataclass(frozen=True)
class Inspection:
    """All that was found out."""

    sets: tuple[Survey, ...]  # train, then eval where there is one
    facts: tuple[Facts, ...]  # of each set
    findings: tuple[Finding, ...]
    packing: Packing | None
    audit: TemplateAudit | None
    source: str
    model: str
    method: str = "sft"

    @property
    def gravest(self) -> Gravity:
        return self.findings[0].gravity if self.findings else "good"


def find(
    sets: Sequence[Survey],
    facts: Sequence[Facts],
    packing: Packing | None,
    audit: TemplateAudit | None,
    accepted: Collection[str] = (),
) -> tuple[Finding, ...]:
    """Every finding, the gravest first and, among equals, the one of most rows. facts: of each set, what its method
    wants known. accepted: checks of the audit whose failure stops no run."""
    found: list[Finding] = []
    for each, own in zip(sets, facts, strict=True):
        found += [*_encoding(each), *own.findings, *_tokens(each), *_sampled(each)]
    found += [*_alike(sets), *_audited(audit, accepted), *_packed(packing)]
    if not any(f.gravity in ("fault", "warning") for f in found):
        found.append(Finding("good", "good", "Nothing wrong was found", _checked(sets, audit)))
    return tuple(sorted(found, key=lambda f: (ORDER.index(f.gravity), -f.count)))


def _checked(sets: Sequence[Survey], audit: TemplateAudit | None) -> str:
    read = " and ".join(f"{len(each.rows.numbers):,} {each.rows.name} rows" for each in sets)
    return (
        f"{read} were encoded as training does, and looked at for masked, cut, empty, unfinished, repeated, leaked and "
        f"garbled rows{'; the chat template was audited' if audit is not None else ''}."
    )


def _encoding(each: Survey) -> Iterable[Finding]:
    broken = each.rows.broken
    if broken:
        yield Finding(
            "fault",
            "broken",
            "Rows that cannot be encoded",
            f"{of(len(broken), each)} stop the run. The first: {broken[0][1]}",
            "Mend or remove these rows; the message says what to write.",
            len(broken),
            tuple(row for row, _ in broken[:SHOWN]),
            each.rows.name,
        )


def _tokens(each: Survey) -> Iterable[Finding]:
    kept = max(1, each.rows.report.rows_kept)
    for key, title, what, fix in (
        (
            "double_bos",
            "Two beginning-of-text tokens",
            "begin with BOS twice. The model has never seen that.",
            "The text or the template writes BOS and the tokenizer adds one: take the token out of the rows' text (or "
            "the 'input_ids'), or out of the template.",
        ),
        (
            "no_stop",
            "The stop token is never trained",
            "end without a token that stops generation, so the model learns never to stop.",
            "Use a chat template that ends each assistant turn with its stop token (`chat_template_path`), set "
            "`eos_token`, or append the token to 'input_ids'.",
        ),
        (
            "stop_masked",
            "The stop token is masked",
            "have a stop token after the last trained token, with weight 0: the model does not learn to stop.",
            "Give the token that ends a turn the weight of the turn: in the template move it inside "
            "`{% generation %}`; in token rows set its label or mask.",
        ),
        (
            "unknown_ids",
            "Token ids the tokenizer does not have",
            "hold ids outside of the tokenizer's vocabulary: they were made with another tokenizer.",
            "Make 'input_ids' with the tokenizer of `model_name_or_path`.",
        ),
    ):
        rows = each.flagged.get(key, [])
        if rows:
            yield Finding(
                grave(len(rows), kept), key, title, f"{of(len(rows), each)} {what}", fix, len(rows),
                tuple(rows[:SHOWN]), each.rows.name,
            )  # fmt: skip
    for key, title, what, fix in TEXT_FAULTS:
        if rows := each.flagged.get(key, []):
            text, shown = f"{of(len(rows), each)} {what}", tuple(rows[:SHOWN])
            yield Finding("warning", key, title, text, fix, len(rows), shown, each.rows.name)
    empty = sorted({*each.flagged.get("empty", ()), *each.flagged.get("only_stop", ())})
    if empty:
        yield Finding(
            grave(len(empty), kept),
            "empty",
            "Empty answers",
            f"{of(len(empty), each)} have an answer without text: the model learns to say nothing.",
            "Remove these rows, or write the answer.",
            len(empty),
            tuple(empty[:SHOWN]),
            each.rows.name,
        )


def _sampled(each: Survey) -> Iterable[Finding]:
    read, total = len(each.rows.numbers), each.rows.total
    if total is None or read < total:
        which = "the first rows of a stream" if total is None else f"a sample of {total:,}, evenly spread"
        yield Finding(
            "note",
            "sampled",
            "Not every row was read",
            f"{read:,} {each.rows.name} rows were read, {which}. Counts are of these, and a duplicate of a row that "
            "was not read is not seen.",
            "Set `--rows 0` to read all." if total is not None else "Set `--rows` higher to read more.",
            where=each.rows.name,
        )


def _alike(sets: Sequence[Survey]) -> Iterable[Finding]:
    train = sets[0]
    ids, sources = _distinct_ids(train)
    yield from _repeated(train)
    pairs, _ = near_pairs(ids)
    if pairs:
        a, b = train.rows.numbers[sources[pairs[0].later]], train.rows.numbers[sources[pairs[0].earlier]]
        yield Finding(
            "warning" if len(pairs) >= 0.01 * len(train.rows.numbers) else "note",
            "near_duplicates",
            "Rows that are nearly the same",
            f"{of(len(pairs), train)} share four fifths of their runs of tokens or more with an earlier row, for "
            f"example row {a} with row {b} ({percent(pairs[0].similarity)}).",
            "Keep one of each, unless the repetition is meant.",
            len(pairs),
            (a, b),
            train.rows.name,
        )
    if len(sets) > 1:
        yield from _leaked(train, sets[1], ids, sources)


def _distinct_ids(each: Survey) -> tuple[list[np.ndarray], list[int]]:
    """The rows' token ids, equal ones once, and the place of each."""
    seen: set[int] = set()
    ids, sources = [], []
    for row, _, source in whole_rows(each.rows):
        value = row_hash(row)
        if value not in seen:
            seen.add(value)
            ids.append(row)
            sources.append(source)
    return ids, sources


def _repeated(each: Survey) -> Iterable[Finding]:
    laid = [(row_hash(ids, weights), source) for ids, weights, source in whole_rows(each.rows)]
    pairs = exact_pairs([value for value, _ in laid])
    if pairs:
        a, b = (each.rows.numbers[laid[at][1]] for at in (pairs[0].later, pairs[0].earlier))
        yield Finding(
            "warning",
            "duplicates",
            "Rows that are the same",
            f"{of(len(pairs), each)} repeat an earlier row token for token, for example row {a} repeats row {b}.",
            "Keep one of each: repeated rows are learnt by heart.",
            len(pairs),
            (a, b),
            each.rows.name,
        )


def _leaked(train: Survey, evaluation: Survey, ids: list[np.ndarray], sources: list[int]) -> Iterable[Finding]:
    held, held_sources = _distinct_ids(evaluation)
    place = {row_hash(row): at for at, row in enumerate(ids)}
    same = [Pair(at, place[value], 1.0) for at, row in enumerate(held) if (value := row_hash(row)) in place]
    near, _ = near_pairs([*ids, *held], reference=len(ids)) if ids else ([], 0)
    exact = {pair.later for pair in same}
    close = [p._replace(later=p.later - len(ids)) for p in near if p.later - len(ids) not in exact]
    kinds: tuple[tuple[list[Pair], Gravity, str, str, str], ...] = (
        (same, "fault", "leak", "in the training set", "also stand, token for token, in the"),
        (close, "warning", "near_leak", "nearly in the training set", "are nearly the same as one of the"),
    )
    for pairs, gravity, key, title, verb in kinds:
        if pairs:
            a = evaluation.rows.numbers[held_sources[pairs[0].later]]
            b = train.rows.numbers[sources[pairs[0].earlier]]
            yield Finding(
                gravity,
                key,
                f"Evaluation rows are {title}",
                f"{of(len(pairs), evaluation)} {verb} training set, for example {evaluation.rows.name} row {a} and "
                f"train row {b}: the evaluation measures memory.",
                "Remove these rows from one of the two sets.",
                len(pairs),
                (a,),
                evaluation.rows.name,
            )


def _audited(audit: TemplateAudit | None, accepted: Collection[str]) -> Iterable[Finding]:
    for check in audit.checks if audit is not None else ():
        if check.verdict != "pass":
            yield Finding(
                "note" if check.verdict != "fail" else "warning" if check.name in accepted else "fault",
                f"template_{check.name}",
                f"Chat template: {check.name.replace('_', ' ')} ({check.finding})",
                check.evidence,
                "See docs/templates.md, which explains every check; another template is set with `chat_template_path`."
                if check.verdict == "fail"
                else "",
            )


def _packed(packing: Packing | None) -> Iterable[Finding]:
    if packing is not None and packing.is_on and packing.bins > 1 and packing.fill < 0.9:
        yield Finding(
            "note",
            "fill",
            "Bins are not full",
            f"{packing.bins:,} bins of {packing.capacity:,} tokens are {percent(packing.fill)} full; the fewest that "
            f"could hold the tokens are {percent(packing.of_bound)} of that.",
            "Few rows, or rows a little longer than half a bin, leave gaps: `packing_strategy: wrapped` fills them.",
        )
