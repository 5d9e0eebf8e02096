"""Write examples/preference/data: notes answered by somebody who guesses, and pairs that prefer not to.

The notes are those of demo/make_data.py, each with the JSON it means; a field that a note does not say is null.

sft.jsonl           answers of a careless annotator: in every second one, what the note does not say is guessed
pairs/train.jsonl   chosen: the right answer; rejected: the same with every field that is null guessed
pairs/test.jsonl    likewise, of sentences, events, people and places that no other file has

A guess is drawn from what other notes say. Everything comes from one seed; no model takes part.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "demo"))

import make_data as notes  # noqa: E402  demo/make_data.py

SEED = 11


def others(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """What notes say, field by field."""
    fields = [answer(row) for row in rows]
    return {key: sorted({each[key] for each in fields if each[key] is not None}) for key in notes.KEYS}


def answer(row: dict[str, Any]) -> dict[str, str | None]:
    return json.loads(row["messages"][-1]["content"])


def guessed(row: dict[str, Any], known: dict[str, list[str]], rng: random.Random) -> dict[str, Any]:
    """The row's last message with a guess for every field that is null."""
    fields = {key: rng.choice(known[key]) if value is None else value for key, value in answer(row).items()}
    return {"role": "assistant", "content": json.dumps(fields, ensure_ascii=False)}


def careless(rows: list[dict[str, Any]], rng: random.Random) -> list[dict[str, Any]]:
    known = others(rows)
    return [
        {"messages": [*row["messages"][:-1], guessed(row, known, rng)]} if rng.random() < 0.5 else row for row in rows
    ]


def pairs(rows: list[dict[str, Any]], rng: random.Random) -> list[dict[str, Any]]:
    """Of the rows with something to guess."""
    known = others(rows)
    return [
        {"prompt": row["messages"][:-1], "chosen": row["messages"][-1:], "rejected": [guessed(row, known, rng)]}
        for row in rows
        if None in answer(row).values()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "data", help="folder to write to (default: %(default)s)")
    out = parser.parse_args().out
    rng = random.Random(SEED)
    notes.dump(careless(notes.rows(notes.TRAIN, 300, SEED), rng), out / "sft.jsonl")
    notes.dump(pairs(notes.rows(notes.TRAIN, 600, SEED + 1), rng)[:320], out / "pairs" / "train.jsonl")
    notes.dump(pairs(notes.rows(notes.TEST, 300, SEED + 2), rng)[:128], out / "pairs" / "test.jsonl")


if __name__ == "__main__":
    main()
