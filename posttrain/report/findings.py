"""What is wrong with the rows, in order of gravity: each with how many, an example and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.data.audit import TemplateAudit
from posttrain.data.overflow import count_of
from posttrain.report.duplicates import Pair, exact_pairs, near_pairs, row_hash
from posttrain.report.page import Gravity
from posttrain.report.survey import Packing, Survey, laid_rows

ORDER: tuple[Gravity, ...] = ("fault", "warning", "good", "note")
FEW = 0.05  # below this share of rows, a fault of rows is a warning
SHOWN = 3


@dataclass(frozen=True)
class Finding:
    """Something to know. `rows` are numbers in the source of the set `where`, the first to be shown."""

    gravity: Gravity
    key: str
    title: str
    text: str
    fix: str = ""
    count: int = 0
    rows: tuple[int, ...] = ()
    where: str = "train"


@dataclass(frozen=True)
class Inspection:
    """All that was found out."""

    sets: tuple[Survey, ...]  # train, then eval where there is one
    findings: tuple[Finding, ...]
    packing: Packing | None
    audit: TemplateAudit | None
    source: str
    model: str

    @property
    def gravest(self) -> Gravity:
        return self.findings[0].gravity if self.findings else "good"


def find(sets: Sequence[Survey], packing: Packing | None, audit: TemplateAudit | None) -> tuple[Finding, ...]:
    """Every finding, the gravest first and, among equals, the one of most rows."""
    found: list[Finding] = []
    for each in sets:
        found += [*_encoding(each), *_dropped(each), *_tokens(each), *_cut(each), *_share(each), *_sampled(each)]
    found += [*_alike(sets), *_audited(audit), *_packed(packing)]
    if not any(f.gravity in ("fault", "warning") for f in found):
        found.append(Finding("good", "good", "Nothing wrong was found", _checked(sets, audit)))
    return tuple(sorted(found, key=lambda f: (ORDER.index(f.gravity), -f.count)))


def _checked(sets: Sequence[Survey], audit: TemplateAudit | None) -> str:
    read = " and ".join(f"{len(each.rows.numbers):,} {each.rows.name} rows" for each in sets)
    return (
        f"{read} were encoded as training does, and looked at for masked, cut, empty, unfinished, repeated and leaked "
        f"rows{'; the chat template was audited' if audit is not None else ''}."
    )


def _grave(count: int, of: int) -> Gravity:
    return "fault" if count >= FEW * max(1, of) else "warning"


def _of(count: int, each: Survey) -> str:
    """e.g. "12 of 100 train rows (12 %)" """
    total = max(1, len(each.rows.numbers))
    return f"{count:,} of {total:,} {each.rows.name} rows ({percent(count / total)})"


def percent(share: float) -> str:
    """e.g. 0.1234 -> "12 %", 0.0123 -> "1.2 %" """
    value = 100 * share
    if 0 < value < 0.1:
        return "under 0.1 %"
    return f"{value:.1f} %" if value < 10 and value != round(value) else f"{value:.0f} %"


def _encoding(each: Survey) -> Iterable[Finding]:
    broken = each.rows.broken
    if broken:
        yield Finding(
            "fault",
            "broken",
            "Rows that cannot be encoded",
            f"{_of(len(broken), each)} stop the run. The first: {broken[0][1]}",
            "Mend or remove these rows; the message says what to write.",
            len(broken),
            tuple(row for row, _ in broken[:SHOWN]),
            each.rows.name,
        )


def _dropped(each: Survey) -> Iterable[Finding]:
    report, limit, name = each.rows.report, each.rows.max_length, each.rows.name
    masked = report.rows_without_targets - report.rows_filled
    total = len(each.rows.numbers)
    if masked:
        yield Finding(
            _grave(masked, total),
            "masked",
            "Every token is masked",
            f"{_of(masked, each)} have no token to train, and are dropped.",
            "In a chat, look for rows without an assistant turn, or turn `assistant_only_loss` off; in token rows, "
            "look at 'labels', 'completion_mask' and 'assistant_masks': they are all masked.",
            masked,
            tuple(each.flagged.get("masked", ())[:SHOWN]),
            name,
        )
    if report.rows_filled:
        yield Finding(
            _grave(report.rows_filled, total),
            "filled",
            "The prompt is longer than the limit",
            f"In {_of(report.rows_filled, each)} the prompt alone fills `max_length`={limit}: the answer is cut away, "
            "nothing is left to train, and the row is dropped.",
            f"Raise `max_length`, shorten the prompts, or keep the end: `truncation_mode: keep_end`. {_needed(each)}",
            report.rows_filled,
            tuple(each.flagged.get("filled", ())[:SHOWN]),
            name,
        )
    if report.rows_too_long:
        stops = each.rows.overflow == "error"
        yield Finding(
            "fault" if stops else "warning",
            "too_long",
            f"Rows longer than the limit {'stop the run' if stops else 'are dropped'}",
            f"{_of(report.rows_too_long, each)} have more than `max_length`={limit} tokens, and `overflow` is "
            f"{each.rows.overflow}.",
            "Raise `max_length`, or set `overflow` to truncate or split.",
            report.rows_too_long,
            tuple(each.flagged.get("too_long", ())[:SHOWN]),
            name,
        )


def _needed(each: Survey) -> str:
    rows = each.flagged.get("filled", [])
    places = [at for at, number in enumerate(each.rows.numbers) if number in set(rows[:SHOWN])]
    sizes = [len(s.ids) for view in each.rows.view(places) for s in view.sequences] if places else []
    who = "The example has" if len(sizes) == 1 else "The examples have"
    return f"{who} {', '.join(map(str, sizes))} tokens." if sizes else ""


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
                _grave(len(rows), kept), key, title, f"{_of(len(rows), each)} {what}", fix, len(rows),
                tuple(rows[:SHOWN]), each.rows.name,
            )  # fmt: skip
    empty = sorted({*each.flagged.get("empty", ()), *each.flagged.get("only_stop", ())})
    if empty:
        yield Finding(
            _grave(len(empty), kept),
            "empty",
            "Empty answers",
            f"{_of(len(empty), each)} have a completion or an assistant turn without text: the model learns to say "
            "nothing.",
            "Remove these rows, or write the answer.",
            len(empty),
            tuple(empty[:SHOWN]),
            each.rows.name,
        )


def _cut(each: Survey) -> Iterable[Finding]:
    report = each.rows.report
    if report.rows_cut:
        share = report.tokens_cut / max(1, report.tokens_cut + report.tokens)
        end = "beginning" if each.rows.keep == "keep_end" else "end"
        yield Finding(
            "warning" if report.rows_cut >= 0.01 * len(each.rows.numbers) else "note",
            "cut",
            "Rows are cut",
            f"{_of(report.rows_cut, each)} are longer than `max_length`={each.rows.max_length} and lose their {end}: "
            f"{count_of(report.tokens_cut, 'token')}, {percent(share)} of all.",
            "Raise `max_length`, or set `overflow` to split, which trains every target.",
            report.rows_cut,
            tuple(each.flagged.get("cut", ())[:SHOWN]),
            each.rows.name,
        )
    if report.rows_split:
        yield Finding(
            "note",
            "split",
            "Rows are split",
            f"{_of(report.rows_split, each)} are longer than `max_length`={each.rows.max_length} and go on in another "
            f"row: {count_of(report.pieces, 'piece')}. A later piece sees one token of what came before.",
            "",
            report.rows_split,
            tuple(each.flagged.get("split", ())[:SHOWN]),
            each.rows.name,
        )


def _share(each: Survey) -> Iterable[Finding]:
    targets, tokens = int(each.targets.sum()), each.tokens
    if targets and targets < 0.02 * tokens:
        yield Finding(
            "note",
            "few_targets",
            "Few tokens are trained",
            f"{targets:,} of {tokens:,} tokens of the {each.rows.name} set ({percent(targets / tokens)}) are targets.",
            "That is right for long prompts with short answers; else look at the masks in the rows below.",
            where=each.rows.name,
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
            f"{_of(len(pairs), train)} share four fifths of their runs of tokens or more with an earlier row, for "
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
    for row, _, source in laid_rows(each.rows.prepared):
        value = row_hash(row)
        if value not in seen:
            seen.add(value)
            ids.append(row)
            sources.append(source)
    return ids, sources


def _repeated(each: Survey) -> Iterable[Finding]:
    laid = [(row_hash(ids, weights), source) for ids, weights, source in laid_rows(each.rows.prepared)]
    pairs = exact_pairs([value for value, _ in laid])
    if pairs:
        a, b = (each.rows.numbers[laid[at][1]] for at in (pairs[0].later, pairs[0].earlier))
        yield Finding(
            "warning",
            "duplicates",
            "Rows that are the same",
            f"{_of(len(pairs), each)} repeat an earlier row token for token, for example row {a} repeats row {b}.",
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
                f"{_of(len(pairs), evaluation)} {verb} training set, for example {evaluation.rows.name} row {a} and "
                f"train row {b}: the evaluation measures memory.",
                "Remove these rows from one of the two sets.",
                len(pairs),
                (a,),
                evaluation.rows.name,
            )


def _audited(audit: TemplateAudit | None) -> Iterable[Finding]:
    for check in audit.checks if audit is not None else ():
        if check.verdict != "pass":
            yield Finding(
                "fault" if check.verdict == "fail" else "note",
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
