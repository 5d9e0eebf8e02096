"""What supervised fine-tuning wants known of its rows: what `max_length` and the masks take away."""

from __future__ import annotations

from collections.abc import Iterable

from posttrain.data.overflow import count_of
from posttrain.report.finding import SHOWN, Facts, Finding, grave, of, percent
from posttrain.report.survey import Survey


def facts(each: Survey) -> Facts:
    """Findings on rows that are dropped, cut or split."""
    return Facts(findings=(*_dropped(each), *_cut(each), *_share(each)))


def _dropped(each: Survey) -> Iterable[Finding]:
    report, limit, name = each.rows.report, each.rows.max_length, each.rows.name
    masked = report.rows_without_targets - report.rows_filled
    total = len(each.rows.numbers)
    if masked:
        yield Finding(
            grave(masked, total),
            "masked",
            "Every token is masked",
            f"{of(masked, each)} have no token to train, and are dropped.",
            "In a chat, look for rows without an assistant turn, or turn `assistant_only_loss` off; in token rows, "
            "look at 'labels', 'completion_mask' and 'assistant_masks': they are all masked.",
            masked,
            tuple(each.flagged.get("masked", ())[:SHOWN]),
            name,
        )
    if report.rows_filled:
        yield Finding(
            grave(report.rows_filled, total),
            "filled",
            "The prompt is longer than the limit",
            f"In {of(report.rows_filled, each)} the prompt alone fills `max_length`={limit}: the answer is cut away, "
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
            f"{of(report.rows_too_long, each)} have more than `max_length`={limit} tokens, and `overflow` is "
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


def _cut(each: Survey) -> Iterable[Finding]:
    report = each.rows.report
    if report.rows_cut:
        share = report.tokens_cut / max(1, report.tokens_cut + report.tokens)
        end = "beginning" if each.rows.keep == "keep_end" else "end"
        yield Finding(
            "warning" if report.rows_cut >= 0.01 * len(each.rows.numbers) else "note",
            "cut",
            "Rows are cut",
            f"{of(report.rows_cut, each)} are longer than `max_length`={each.rows.max_length} and lose their {end}: "
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
            f"{of(report.rows_split, each)} are longer than `max_length`={each.rows.max_length} and go on in another "
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
