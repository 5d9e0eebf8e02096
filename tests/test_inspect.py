"""`posttrain inspect`: a newcomer given a broken data set finds the fault with it alone."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_fixtures import CHATML, byte_tokenizer
from datasets import Dataset

from posttrain.cli.main import main
from posttrain.data.rows import SFTRowOptions, prepare_sft
from posttrain.report import pairs, steps

ROOT = Path(__file__).parent.parent
NO_STOP = CHATML.replace(
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}",
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '\n' }}",
)


def sentence(seed: int, words: int = 6) -> str:
    """Random words of random letters: two sentences have nothing in common."""
    letters = np.random.default_rng(seed).integers(97, 123, (words, 7)).astype(np.uint8)
    return " ".join(word.tobytes().decode() for word in letters)


def chat(seed: int, answer: str | None = None) -> dict[str, Any]:
    answer = sentence(seed + 1000) if answer is None else answer
    return {"messages": [{"role": "user", "content": sentence(seed)}, {"role": "assistant", "content": answer}]}


def pair(seed: int, **fields: str) -> dict[str, Any]:
    return {"prompt": sentence(seed) + "?", "completion": " " + sentence(seed + 1000), **fields}


@pytest.fixture
def look(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """Inspect rows: what is printed, and the page."""

    def run(rows: list[dict[str, Any]], *flags: str, held: list[dict[str, Any]] | None = None, **of: Any):
        byte_tokenizer(**{"template": CHATML, **of}).save_pretrained(tmp_path / "model")
        (tmp_path / "data").mkdir(exist_ok=True)
        for name, part in (("train", rows), ("test", held)):
            if part is not None:
                (tmp_path / f"data/{name}.jsonl").write_text("\n".join(map(json.dumps, part)), encoding="utf-8")
        args = ["--model_name_or_path", str(tmp_path / "model"), "--dataset_name", str(tmp_path / "data")]
        code = main(["inspect", *args, "--html", str(tmp_path / "page.html"), *flags])
        printed = capsys.readouterr()
        assert code == 0, printed.err
        return printed.out, (tmp_path / "page.html").read_text(encoding="utf-8")

    return run


class Titles(HTMLParser):
    """Gravity and title of each finding of a page, in order; and every tag and attribute there is."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "h3":
            self._inside = True
            self.found.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "h3"

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.found[-1] += data


def first(out: str) -> str:
    """The first finding as printed: the lines after the header, up to an empty one."""
    return " ".join(out.split("\n\n")[1].split())


def test_all_masked_rows(look):
    ids = list(range(30, 60))
    rows = [{"input_ids": ids, "labels": [-100] * 30}] * 4 + [
        {"input_ids": [i, *ids], "labels": [i, *ids]} for i in (1, 2)
    ]
    out, page = look(rows)
    assert first(out).startswith("FAULT Every token is masked 4 of 6 train rows (67 %) have no token to train")
    assert "train rows: 0, 1, 2, … Fix:" in first(out)
    assert Titles(page).found[0] == "FaultEvery token is masked"


def test_when_nothing_at_all_is_trained_there_is_still_a_page(look):
    out, _ = look([{"messages": [{"role": "user", "content": "Hi"}]}] * 3, "--assistant_only_loss")
    assert first(out).startswith("FAULT Every token is masked 3 of 3")
    assert "look for rows without an assistant turn" in first(out)
    assert "Hi<|im_end|>" in out and "dropped: nothing is trained" in out


def test_a_template_that_drops_the_stop_token(look):
    out, page = look([chat(i) for i in range(8)], "--assistant_only_loss", template=NO_STOP)
    assert first(out).startswith("FAULT The stop token is never trained 8 of 8 train rows (100 %)")
    assert "`chat_template_path`" in first(out)
    assert "Chat template: stop token" in out
    assert Titles(page).found[0] == "FaultThe stop token is never trained"


def test_prompts_longer_than_the_limit(look):
    rows = [pair(i, prompt="x" * 90) for i in range(3)] + [pair(i) for i in range(5)]
    out, _ = look(rows, "--max_length", "80")
    assert first(out).startswith("FAULT The prompt is longer than the limit In 3 of 8 train rows (38 %)")
    sizes = [len(row["prompt"] + row["completion"]) + 1 for row in rows[:3]]
    assert f"The examples have {sizes[0]}, {sizes[1]}, {sizes[2]} tokens." in first(out)
    assert "truncation_mode: keep_end" in first(out)


def test_duplicate_and_leaking_rows(look):
    long = [{"text": sentence(i, 40)} for i in range(12)]
    nearly = {"text": long[3]["text"] + " and one more"}
    train = [*long, long[2], long[2], {"text": long[5]["text"] + " again"}]
    out, page = look(train, held=[long[7], nearly, {"text": sentence(99, 40)}])
    assert first(out).startswith("FAULT Evaluation rows are in the training set 1 of 3 eval rows (33 %)")
    assert "eval row 0 and train row 7" in first(out)
    titles = [re.sub("Fault|Warning|Note", "", title) for title in Titles(page).found]
    assert titles[:4] == [
        "Evaluation rows are in the training set",
        "Rows that are the same",
        "Rows that are nearly the same",
        "Evaluation rows are nearly in the training set",
    ]
    said = " ".join(out.split())
    assert "2 of 15 train rows (13 %) repeat an earlier row token for token, for example row 12 repeats row 2" in said
    assert "eval row 1 and train row 3" in said


def test_double_bos(look):
    rows = [{"text": f"<s>{sentence(i)}"} for i in range(6)]
    for row in rows[:4]:
        row["text"] = "<s>" + row["text"]
    out, _ = look(rows, bos="<s>", add_bos=True)
    assert first(out).startswith("FAULT Two beginning-of-text tokens 4 of 6 train rows (67 %) begin with BOS twice")


def test_empty_completions(look):
    rows = [pair(i, completion="") for i in range(3)] + [pair(i) for i in range(7)]
    out, _ = look(rows)
    assert first(out).startswith("FAULT Empty answers 3 of 10 train rows (30 %)")
    out, _ = look([chat(i, "" if i < 2 else None) for i in range(10)])
    assert first(out).startswith("FAULT Empty answers 2 of 10 train rows (20 %)")


def test_words_that_tell_of_a_fault(look):
    rows = [chat(i) for i in range(9)]
    rows[2]["messages"][0]["content"] = "<|im_start|>user\nhi<|im_end|>"
    rows[4]["messages"].reverse()
    rows[5]["messages"].insert(0, {"role": "user", "content": "Hello?"})
    rows[7]["messages"][1]["content"] = "Un café, bien sûr".encode().decode("latin-1")
    out, page = look(rows)
    said = " ".join(out.split())
    assert "Special tokens inside messages 1 of 9 train rows (11 %)" in said and "train rows: 2 Fix" in said
    assert "Turns in an unusual order 2 of 9 train rows (22 %)" in said and "train rows: 4, 5" in said
    assert "Broken characters 1 of 9 train rows (11 %)" in said and "train rows: 7 Fix" in said
    assert {"WarningBroken characters", "WarningTurns in an unusual order"} <= set(Titles(page).found)


def test_a_good_set_is_called_good(look):
    out, page = look([chat(i) for i in range(20)], "--assistant_only_loss", "--packing", "--max_length", "256")
    assert first(out).startswith("GOOD Nothing wrong was found 20 train rows")
    assert Titles(page).found == ["GoodNothing wrong was found", "NoteBins are not full"]


def test_rows_that_cannot_be_encoded_are_all_named(look):
    rows: list[dict[str, Any]] = [chat(i) for i in range(6)]
    rows[3]["messages"][1]["content"] = None
    rows[5]["messages"] = []
    out, _ = look(rows)
    assert first(out).startswith("FAULT Rows that cannot be encoded 2 of 6 train rows (33 %) stop the run.")
    assert "Row 3 of the train set" in first(out) and "train rows: 3, 5" in first(out)
    assert "4 of 6 kept" in out


def test_the_rows_shown_are_the_rows_trained(look):
    rows = [pair(i) for i in range(3)]
    out, page = look(rows, "--completion_only_loss", "--show", "2")
    prepared, _ = prepare_sft(Dataset.from_list(rows), byte_tokenizer(template=CHATML), SFTRowOptions())
    for row in list(prepared)[:2]:
        trained = [
            f'id {i} at {at}"' for at, (i, w) in enumerate(zip(row["input_ids"], row["weights"], strict=True)) if w
        ]
        marks = [re.findall(r'id \d+ at \d+"', part) for part in re.findall("<mark title.*?</mark>", page)]
        assert trained in marks
    assert f"⟦·{rows[0]['completion'].strip()}<|im_end|>⟧".replace(" ", "") in "".join(out.split())


def test_the_page_stands_alone_and_data_cannot_break_it(look):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \x1b[31m \u202e \x07 &lt; ⟦"
    out, page = look([pair(i, completion=evil + str(i)) for i in range(3)])
    parsed = Titles(page)
    assert {tag for tag, _ in parsed.tags} & {"script", "img", "link", "iframe", "object"} == set()
    assert not [a for _, a in parsed.tags for k, v in a.items() if k.startswith("on") or k in ("src", "srcset")]
    assert all(v.startswith("#") for _, a in parsed.tags for k, v in a.items() if k == "href" and v)
    policy = next(a["content"] or "" for _, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';") and "url(" not in page and "@import" not in page
    for text in (out, page):
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)
        assert "␛" in text and "⟨U+202E⟩" in text


def test_a_stream_and_a_large_set_say_what_was_read(look):
    rows = [pair(i) for i in range(30)]
    out, page = look(rows, "--rows", "10", "--dataset_streaming")
    assert "10 train rows were read, the first rows of a stream" in " ".join(out.split())
    assert "The first 10 rows of a stream were read" in page
    out, page = look(rows, "--rows", "10")
    assert "10 train rows were read, a sample of 30, evenly spread" in " ".join(out.split())
    assert "train row 29" not in out and "train row 3:" in out
    assert "10 of 30 rows were read" in page
    assert "were read" not in look(rows, "--rows", "0")[0]


def test_the_file_of_a_run_is_inspected_as_it_is(look, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("packing: true\nmax_length: 64\nnum_processes: 4\nlearning_rate: 1.0e-4\nbf16: true\n", "utf-8")
    out, page = look([pair(i, prompt="The same beginning of all: ", completion=sentence(i, 4)) for i in range(40)],
                     "--config", str(config), "--per_device_train_batch_size", "4")  # fmt: skip
    assert "bins of 64" in out and "packing is off" not in out
    assert int(re.findall(r"(\d+) % of tokens saved", out)[0]) > 10
    assert "Saved by sharing prefixes" in page


def test_long_rows_under_each_policy(look):
    rows = [{"input_ids": [i, *range(20, 49)]} for i in range(10)] + [{"input_ids": [i] * 10} for i in range(3)]
    for overflow, said, kept in (
        ("truncate", "10 of 13 train rows (77 %) are longer than `max_length`=16 and lose their end: 140 tokens", 13),
        ("split", "10 of 13 train rows (77 %) are longer than `max_length`=16 and go on in another row: 20 pieces", 13),
        ("drop", "10 of 13 train rows (77 %) have more than `max_length`=16 tokens, and `overflow` is drop", 3),
        ("error", "10 of 13 train rows (77 %) have more than `max_length`=16 tokens, and `overflow` is error", 3),
    ):
        out = " ".join(look(rows, "--max_length", "16", "--overflow", overflow)[0].split())
        assert said in out and f"{kept} of 13 kept" in out


def test_the_example_of_the_docs(tmp_path, capsys, monkeypatch):
    """docs/inspect.md shows what is printed. POSTTRAIN_UPDATE_DOCS=1 writes it."""
    page = ROOT / "docs/inspect.md"
    parts = dict(re.findall(r"<!-- inspect: (\w+) -->\n```\w*\n(.*?)```", page.read_text("utf-8"), re.S))
    monkeypatch.chdir(tmp_path)
    byte_tokenizer(template=CHATML).save_pretrained("model")
    Path("sums.jsonl").write_text(parts["rows"], encoding="utf-8")
    assert main(parts["flags"].split()[1:]) == 0
    printed = capsys.readouterr().out
    if os.environ.get("POSTTRAIN_UPDATE_DOCS", "0") not in ("", "0"):
        page.write_text(page.read_text("utf-8").replace(parts["output"], printed), encoding="utf-8")
    else:
        assert printed == parts["output"]


def test_the_docs_name_every_finding():
    text = (ROOT / "docs/inspect.md").read_text("utf-8")
    trees = [ast.parse(file.read_text("utf-8")) for file in sorted((ROOT / "posttrain/report").glob("*.py"))]
    calls = [
        n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "Finding"
    ]
    titles = [a.value for n in calls for a in n.args[2:3] if isinstance(a, ast.Constant)]
    titles += [title for _, title, *_ in (*pairs.DROPPED, *pairs.CUT, *steps.LOST)]
    assert len(titles) > 20
    assert [title for title in titles if title not in text and title != "Nothing wrong was found"] == []


def test_what_cannot_be_inspected_is_refused(tmp_path, capsys):
    assert main(["inspect", "--dataset_name", "x.jsonl"]) == 2
    assert "`model_name_or_path` is not set" in capsys.readouterr().err
    assert main(["inspect", "--dataset_name", "x.jsonl", "--model_name_or_path", "m", "--rows", "-1"]) == 2
    assert "`rows` is -1" in capsys.readouterr().err


def test_the_template_is_audited_as_training_does(look):
    """With the arguments of the first row, and without a fault where training accepts the check."""
    from posttrain.data.audit import audit_template

    rows = [{**chat(i), "chat_template_kwargs": {"enable_thinking": False}} for i in range(8)]
    out, page = look(rows, "--template_audit", "stop_token", template=NO_STOP)
    tokenizer = byte_tokenizer(template=NO_STOP)
    assert audit_template(tokenizer, template_kwargs={"enable_thinking": False}).hash in out
    assert any(title.startswith("WarningChat template: stop token") for title in Titles(page).found)
    assert "is unknown, because" in page
