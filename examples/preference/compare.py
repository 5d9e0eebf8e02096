"""Which of two models answers held-out notes better? Judged by what the notes say, not by a model.

    python examples/preference/compare.py runs/preference/sft runs/preference/dpo

The notes are demo/data/test.jsonl, answered greedily. An answer is as good as its number of right fields, 0 when it is
not the JSON asked for. A field is invented when the note does not say it and the answer does.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "demo"))

import score


@dataclass(frozen=True)
class Judged:
    """What the answers of one model are worth, note by note."""

    exact: float  # share of notes with all fields right
    invented: float  # share of the fields not said that have a value
    right: list[int]  # right fields of each note


def judge(answers: list[str], rows: list[score.Row]) -> Judged:
    right, unsaid, invented = [], 0, 0
    for answer, row in zip(answers, rows, strict=True):
        found = score.parse(answer, list(row.expected))
        right.append(0 if found is None else sum(found[key] == value for key, value in row.expected.items()))
        for key, value in row.expected.items():
            unsaid += value is None
            invented += value is None and found is not None and found[key] is not None
    exact = sum(n == len(row.expected) for n, row in zip(right, rows, strict=True)) / len(rows)
    return Judged(exact, invented / max(unsaid, 1), right)


def win_rate(before: Judged, after: Judged) -> tuple[float, int]:
    """Share of the notes answered better among those not answered equally well, and how many these are."""
    different = [(a, b) for a, b in zip(before.right, after.right, strict=True) if a != b]
    return sum(b > a for a, b in different) / max(len(different), 1), len(different)


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="folder of the model before")
    parser.add_argument("after", help="folder of the model after")
    args = parser.parse_args()
    rows = score.read_rows()
    found = []
    for name in (args.before, args.after):
        judged = judge(score.measure(name, rows)[1], rows)
        print(f"{name}: all fields right {judged.exact:.1%}, fields invented {judged.invented:.1%}", flush=True)
        found.append(judged)
    share, count = win_rate(*found)
    print(f"{args.after} wins {share:.1%} of the {count} notes of {len(rows)} that are not answered equally well")


if __name__ == "__main__":
    main()
