"""What preference pairs must have known: which are lost, which contradict each other, and what length tells.

Letters: P pairs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from posttrain.report.duplicates import row_hash
from posttrain.report.finding import SHOWN, Chart, Facts, Finding, grave, of, percent
from posttrain.report.survey import Survey, laid_rows

MANY_PAIRS = 20  # fewer say nothing about length
TOLD = 0.75  # share of pairs of one order of length, from which length tells
LONGER = 1.5  # or the mean length of one side over that of the other

DROPPED = (
    (
        "equal",
        "Chosen and rejected are the same",
        "have the same tokens for chosen and rejected, and are dropped: nothing is to be preferred.",
        "Remove these pairs, or look at what made them: answers sampled twice, or a cut that left the same beginning.",
    ),
    (
        "empty_response",
        "A response has no token",
        "have a response without a token, or lose it to `max_length`, and are dropped.",
        "Remove these pairs, or write the answer.",
    ),
    (
        "too_long",
        "Pairs longer than the limit are dropped",
        "have a response that ends beyond `max_length`, and are dropped: a reward is read at the end.",
        "Raise `max_length`, or shorten the prompts.",
    ),
)
"""Key, title, what the pairs do, and the fix."""
CUT = (
    (
        "prompt_cut",
        "Prompts are cut",
        "lose the beginning of the prompt to `max_length`.",
        "Raise `max_length`, or shorten the prompts.",
    ),
    (
        "response_cut",
        "Responses are cut",
        "lose a part of a response to `max_length`: what is compared is not what was judged.",
        "Raise `max_length`, or remove these rows.",
    ),
)


@dataclass(frozen=True)
class Lengths:
    """Tokens of the responses of P pairs."""

    chosen: np.ndarray  # [P]
    rejected: np.ndarray  # [P]

    @property
    def longer(self) -> float:
        """Share of pairs whose chosen response is the longer one, of those whose lengths differ."""
        differ = self.chosen != self.rejected
        return float((self.chosen > self.rejected)[differ].mean()) if differ.any() else 0.5

    @property
    def ratio(self) -> float:
        """Mean length of chosen responses ÷ that of rejected ones."""
        return float(self.chosen.mean() / self.rejected.mean()) if len(self.chosen) else 1.0

    @property
    def tells(self) -> bool:
        """Whether length alone tells well which response is chosen."""
        differ = int((self.chosen != self.rejected).sum())
        share = max(self.longer, 1 - self.longer)
        # … more than three standard deviations from a coin's: few pairs are uneven by chance.
        unlikely = share - 0.5 > 3 * 0.5 / max(1, differ) ** 0.5
        uneven = share >= TOLD or max(self.ratio, 1 / self.ratio) >= LONGER
        return differ >= MANY_PAIRS and unlikely and uneven

    def said(self) -> str:
        """e.g. "mean 120 tokens against 80, median 100 against 75" """
        sides = self.chosen, self.rejected
        (a, b), (c, d) = ([float(f(x)) for x in sides] for f in (np.mean, np.median))
        return f"mean {a:,.0f} tokens against {b:,.0f}, median {c:,.0f} against {d:,.0f}"


def facts(each: Survey) -> Facts:
    """What is to know of a set of pairs."""
    found = (*lost_rows(each, DROPPED), *lost_rows(each, CUT), *_contradicting(each))
    if not len(each.targets):
        return Facts(findings=found)
    responses = each.targets.reshape(-1, 2)
    lengths = Lengths(responses[:, 0], responses[:, 1])
    differ = (lengths.chosen != lengths.rejected).any()
    share, which = (percent(lengths.longer), "of pairs whose lengths differ") if differ else ("–", "no lengths differ")
    lines = (("chosen is longer", share, f"{which}; {lengths.said()}"),)
    name = each.rows.name
    charts = (
        Chart(f"Length of chosen {name} responses", lengths.chosen.tolist()),
        Chart(f"Length of rejected {name} responses", lengths.rejected.tolist()),
        Chart(f"Chosen less rejected, {name} pairs", (lengths.chosen - lengths.rejected).tolist()),
    )
    return Facts(lines, charts, (*found, *_length_bias(each, lengths)))


def lost_rows(each: Survey, kinds: Iterable[tuple[str, str, str, str]]) -> Iterable[Finding]:
    """A finding for each kind that rows are flagged with."""
    for key, title, what, fix in kinds:
        if rows := each.flagged.get(key, []):
            cut = key.endswith("_cut")
            gravity = "warning" if cut else grave(len(rows), len(each.rows.numbers))
            text, shown = f"{of(len(rows), each)} {what}", tuple(rows[:SHOWN])
            yield Finding(gravity, key, title, text, fix, len(rows), shown, each.rows.name)


def _length_bias(each: Survey, lengths: Lengths) -> Iterable[Finding]:
    if not lengths.tells:
        return
    is_longer = lengths.longer > 0.5
    share = lengths.longer if is_longer else 1 - lengths.longer
    kind = "longer" if is_longer else "shorter"
    yield Finding(
        "warning",
        "length_bias",
        "Length tells which response is chosen",
        f"In {percent(share)} of the {each.rows.name} pairs whose lengths differ the chosen response is the {kind} "
        f"one: {lengths.said()}. The model may learn to write {kind} answers instead of better ones.",
        f"Add pairs whose chosen response is {'shorter' if is_longer else 'longer'}, or, in DPO, take a loss that "
        "reckons with length: `loss_type: simpo`, or `ld_alpha`.",
        where=each.rows.name,
    )


def _contradicting(each: Survey) -> Iterable[Finding]:
    """Pairs whose two responses stand elsewhere in the other order, to the same prompt."""
    first: dict[tuple[int, int], int] = {}
    pairs: list[tuple[int, int]] = []
    hashes = [(row_hash(ids), source) for ids, _, source in laid_rows(each.rows.prepared)]
    for (chosen, source), (rejected, _) in zip(hashes[::2], hashes[1::2], strict=True):
        number = each.rows.numbers[source]
        first.setdefault((chosen, rejected), number)
        if (rejected, chosen) in first:
            pairs.append((number, first[rejected, chosen]))
    if pairs:
        a, b = pairs[0]
        yield Finding(
            grave(len(pairs), len(each.rows.numbers)),
            "contradicting",
            "Pairs contradict each other",
            f"{of(len(pairs), each)} prefer what an earlier pair rejects, with the same prompt and responses: for "
            f"example row {a} is row {b} turned around. Together they teach nothing.",
            "Keep the order that more judges gave, or remove both.",
            len(pairs),
            (a, b),
            each.rows.name,
        )
