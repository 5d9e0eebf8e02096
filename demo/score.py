"""How often does a model turn a held-out note into exactly the right JSON?

    python demo/score.py runs/demo

Answers are generated greedily and parsed strictly: the whole answer must be one JSON object with exactly the five keys.
Values must equal the expected ones; only white space around a value is ignored.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TEST_FILE = HERE / "data" / "test.jsonl"
# The longest right answer has 42 tokens. More room does not help the untrained model: it scores 0 with 128 as well.
MAX_NEW_TOKENS = 48


@dataclass(frozen=True)
class Row:
    """One held-out note: the prompt as messages, and the fields of the right answer."""

    prompt: list[dict[str, str]]
    expected: dict[str, Any]

    @property
    def note(self) -> str:
        return self.prompt[-1]["content"]


@dataclass(frozen=True)
class Score:
    """Shares of the held-out rows, in [0, 1]."""

    exact: float
    valid: float
    fields: dict[str, float]

    def __str__(self) -> str:
        fields = "  ".join(f"{name} {share:.0%}" for name, share in self.fields.items())
        return f"all fields right {self.exact:.1%}   valid JSON {self.valid:.1%}   per field: {fields}"


def read_rows(path: Path = TEST_FILE) -> list[Row]:
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        *prompt, answer = json.loads(line)["messages"]
        rows.append(Row(prompt, json.loads(answer["content"])))
    return rows


def parse(answer: str, keys: list[str]) -> dict[str, Any] | None:
    """The fields of an answer, or None when it is not a JSON object with exactly these keys."""
    try:
        value = json.loads(answer)
    except json.JSONDecodeError:
        return None
    if not isinstance(value, dict) or sorted(value) != sorted(keys):
        return None
    return {key: field.strip() if isinstance(field, str) else field for key, field in value.items()}


def score(answers: list[str], rows: list[Row]) -> Score:
    keys = list(rows[0].expected)
    parsed = [parse(answer, keys) for answer in answers]
    pairs = list(zip(parsed, (row.expected for row in rows), strict=True))
    right = {key: sum(got is not None and got[key] == want[key] for got, want in pairs) for key in keys}
    return Score(
        exact=sum(got == want for got, want in pairs) / len(rows),
        valid=sum(got is not None for got in parsed) / len(rows),
        fields={key: count / len(rows) for key, count in right.items()},
    )


def answer_all(
    model_path: str | Path, rows: list[Row], batch_size: int, progress: Callable[[int, int], None]
) -> list[str]:
    """Greedy answers, in the order of `rows`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from posttrain.parallel.device import native_bf16

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    # bfloat16 without hardware for it is several times slower than float32.
    dtype = torch.bfloat16 if native_bf16() else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype).to(device).eval()
    texts = [tokenizer.apply_chat_template(row.prompt, tokenize=False, add_generation_prompt=True) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: len(texts[i]))
    answers = [""] * len(rows)
    for first in range(0, len(order), batch_size):
        batch = order[first : first + batch_size]
        inputs = tokenizer([texts[i] for i in batch], return_tensors="pt", padding=True, add_special_tokens=False)
        inputs = {name: inputs[name].to(device) for name in ("input_ids", "attention_mask")}
        with torch.inference_mode():
            out = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        new = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for i, text in zip(batch, new, strict=True):
            answers[i] = text.strip()
        progress(min(first + batch_size, len(rows)), len(rows))
    return answers


def measure(model_path: str | Path, rows: list[Row], batch_size: int = 16) -> tuple[Score, list[str]]:
    """Generate and score, with a line that counts the notes done."""
    started = time.monotonic()

    def progress(done: int, total: int) -> None:
        if sys.stdout.isatty():
            end = "\n" if done == total else "\r"
            print(f"  {done}/{total} notes  {time.monotonic() - started:.0f} s", end=end, flush=True)

    progress(0, len(rows))
    answers = answer_all(model_path, rows, batch_size, progress)
    return score(answers, rows), answers


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--data", type=Path, default=TEST_FILE, help="held-out rows (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--show", type=int, default=0, help="print so many answers")
    args = parser.parse_args()
    rows = read_rows(args.data)
    result, answers = measure(args.model, rows, args.batch_size)
    for row, answer in list(zip(rows, answers, strict=True))[: args.show]:
        print(f"note     {row.note}\nanswer   {answer}\nexpected {json.dumps(row.expected)}\n")
    print(result)


if __name__ == "__main__":
    main()
