"""`posttrain inspect` of rows that a judge has been over: pairs, labelled responses, labelled steps."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_fixtures import CHATML, byte_tokenizer

from posttrain.cli.main import main
from posttrain.cli.method import choose
from posttrain.errors import ConfigError


def words(seed: int, count: int = 5) -> str:
    """Random words of random letters."""
    letters = np.random.default_rng(seed).integers(97, 123, (count, 6)).astype(np.uint8)
    return " ".join(word.tobytes().decode() for word in letters)


def pair(seed: int, chosen: int = 5, rejected: int = 5) -> dict[str, Any]:
    """Numbers of words in the responses."""
    return {
        "prompt": words(seed) + "?",
        "chosen": " " + words(seed + 1000, chosen),
        "rejected": " " + words(seed + 2000, rejected),
    }


@pytest.fixture
def look(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """Inspect rows: what is printed, on one line, and the page."""
    byte_tokenizer(template=CHATML).save_pretrained(tmp_path / "model")

    def run(rows: list[dict[str, Any]], *flags: str) -> tuple[str, str]:
        data, html = tmp_path / "rows.jsonl", tmp_path / "page.html"
        data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        args = ["--model_name_or_path", str(tmp_path / "model"), "--dataset_name", str(data), "--html", str(html)]
        code = main(["inspect", *args, *flags])
        printed = capsys.readouterr()
        assert code == 0, printed.err
        return " ".join(printed.out.split()), html.read_text(encoding="utf-8")

    return run


# ---- pairs -----------------------------------------------------------------------------------------------------------


def test_a_pair_is_shown_as_dpo_lays_it(look):
    out, page = look([{"prompt": "What is 2+2?", "chosen": " It is 4.", "rejected": " It is 5!"}])
    assert "· dpo GOOD" in out and "1 of 1 kept (preference)" in out
    assert "both: What is 2+2?⟦·It is·⟧ chosen: ⟦4.<|im_end|>⟧ rejected: ⟦5!<|im_end|>⟧" in out
    assert "chosen is longer – no lengths differ; mean 10 tokens against 10" in out
    assert "43 % of tokens saved" in out  # 19 of both, and 3 of each
    shared, sides = page.split('<div class="sides">')
    assert re.findall(r' at (\d+)"', shared[shared.rindex("<details") :]) == [str(at) for at in range(19)]
    assert re.findall(r' at (\d+)"', sides) == ["19", "20", "21"] * 2


def test_pairs_that_are_lost_cut_or_twice_there(look):
    rows = [pair(i) for i in range(40)]
    rows[3]["rejected"] = rows[3]["chosen"]
    rows[6] = rows[5]
    rows[8] = {**rows[9], "chosen": rows[9]["rejected"], "rejected": rows[9]["chosen"]}
    rows[11]["prompt"] = words(11, 40)
    rows[12]["chosen"] = words(12, 40)
    rows[13]["rejected"] = ""
    rows[21] = {**rows[20], "chosen": rows[20]["chosen"] + " ok"}
    out, page = look(rows, "--max_length", "150", "--show", "13")
    for said in (
        "Chosen and rejected are the same 1 of 40 train rows (2.5 %)",
        "dropped: nothing is to be preferred. train rows: 3 Fix",
        "row 6 repeats row 5",
        "row 9 is row 8 turned around",
        "Prompts are cut 2 of 40 train rows (5 %) lose the beginning of the prompt to `max_length`. train rows: 11, 12",
        "Responses are cut 1 of 40 train rows (2.5 %)",
        "Empty answers 1 of 40 train rows (2.5 %) have an answer without text",
        "2 of 40 train rows (5 %) share four fifths",
        "train row 3: dropped: chosen and rejected are the same",
        "39 of 40 kept",
    ):
        assert said in out, said
    assert "Length tells" not in out
    assert "the prompt loses" in page and "dropped: chosen and rejected the same" in page


def test_length_that_tells_is_found(look):
    out, page = look([pair(i, 9 if i % 8 else 2, 4) for i in range(40)])
    assert "chosen is longer 88 % of pairs whose lengths differ; mean 58 tokens against 29, median 64 against 29" in out
    assert "In 88 % of the train pairs whose lengths differ the chosen response is the longer one" in out
    assert "Chosen less rejected, train pairs" in page
    assert "chosen response is the shorter one" in look([pair(i, 2, 4) for i in range(40)])[0]
    # A coin falls like this, and so do few pairs.
    assert "Length tells" not in look([pair(i, 5 + i % 2, 6 - i % 2) for i in range(40)])[0]
    assert "Length tells" not in look([pair(i, 9, 4) for i in range(10)])[0]


def test_a_reward_model_reads_the_end_and_cuts_nothing(look):
    rows = [pair(i) for i in range(8)]
    rows[2]["rejected"] = words(2, 30)
    out, _ = look(rows, "--center_rewards_coefficient", "0.1", "--max_length", "120", "--show", "1")
    assert "· reward " in out and "7 of 8 kept" in out
    assert "Pairs longer than the limit are dropped 1 of 8 train rows (12 %)" in out
    assert out.count("⟦<|im_end|>⟧") == 2 and "tokens where the reward is read between" in out


def test_pairs_that_cannot_be_encoded_are_all_named(look):
    rows: list[dict[str, Any]] = [pair(i) for i in range(6)]
    rows[2]["chosen"] = rows[4]["rejected"] = None
    out, _ = look(rows, "--show", "6")
    assert "Rows that cannot be encoded 2 of 6 train rows (33 %) stop the run." in out
    assert "Row 2 of the train set" in out and "train rows: 2, 4" in out
    assert "4 of 6 kept" in out and "train row 4: cannot be encoded" in out
    rows[0]["chosen"] = None
    assert "· dpo " in (out := look(rows)[0]) and "3 of 6 kept" in out
    out, _ = look(rows, "--method", "kto")
    assert "Row 0 of the train set: column 'completion' holds None" in out and "9 of 12 kept" in out


def test_rows_of_another_method_are_refused_as_training_does(tmp_path, capsys):
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "a"}), encoding="utf-8")
    args = ["--model_name_or_path", str(tmp_path / "model"), "--dataset_name", str(tmp_path / "rows.jsonl")]
    for method, said in (
        ("dpo", "pairs need 'chosen' and"),
        ("kto", "rows need 'prompt'"),
        ("prm", "rows need 'prompt'"),
    ):
        assert main(["inspect", *args, "--method", method]) == 2
        assert said in capsys.readouterr().err


def test_chats_and_token_ids(look):
    asked = [{"role": "user", "content": "Hi"}]
    answers = [[*asked, {"role": "assistant", "content": text}] for text in ("Hello!", "What?")]
    out, _ = look([{"chosen": answers[0], "rejected": answers[1]}])
    assert "(implicit-preference)" in out and "chosen: ⟦Hello!<|im_end|>" in out and "template audit" in out
    out, _ = look([{"prompt_ids": [40, 41], "chosen_ids": [42, 43], "rejected_ids": [44, 43]}])
    assert "· dpo " in out and "1 of 1 kept (tokenized)" in out and "4 trained (" in out


def test_data_cannot_break_the_page(look):
    evil = "</script><img src=x onerror=alert(2)> \x1b[31m \u202e"
    out, page = look([{"prompt": evil, "chosen": evil + "a", "rejected": evil + "b"}])
    assert "<img" not in page and "\x1b" not in page + out and "\u202e" not in page + out


# ---- labelled responses ----------------------------------------------------------------------------------------------


def labelled(seed: int, label: bool, prompt: int | None = None) -> dict[str, Any]:
    prompt = seed if prompt is None else prompt
    return {"prompt": words(prompt) + "?", "completion": " " + words(seed + 1000), "label": label}


def test_labels_of_responses(look):
    rows = [labelled(i, i % 3 > 0, i // 2) for i in range(30)]
    rows[4] = {**rows[5], "label": not rows[5]["label"]}
    rows[8] = rows[7]
    out, page = look(rows, "--show", "2")
    assert "· kto " in out and "30 of 30 kept (unpaired-preference)" in out
    assert "row 5 and row 4" in out and "Labels contradict each other 1 of 30" in out
    assert "Rows that are the same 1 of 30" in out and "row 8 repeats row 7" in out
    yes = sum(row["label"] for row in rows)
    assert f"of rows: {yes}, and {30 - yes} not; mean 36 against 36 tokens" in out
    assert re.search(r"prompts with both \d+ % of prompts: \d+ of 15 have both labels", out)
    assert "train row 0: kept, not desirable" in out and "⟦✗" in out and '<mark title="weight -1" class="no">' in page


def test_one_label_and_a_rare_one(look):
    out, _ = look([labelled(i, True) for i in range(8)])
    assert "FAULT Only one label All 8 labels of the train set are of desirable responses" in out
    out, _ = look([labelled(i, i > 0) for i in range(21)])
    assert "One label is rare 1 of 21 labels" in out and "`undesirable_weight: 20`" in out


def test_pairs_as_labelled_responses(look):
    rows = [pair(i) for i in range(4)]
    rows[3]["rejected"] = words(1, 40)
    out, _ = look(rows, "--method", "kto", "--max_length", "100", "--show", "0")
    assert "8 of 8 kept" in out and "50 % of rows: 4, and 4 not" in out
    assert "Responses are cut 1 of 8 train rows (12 %)" in out and "train rows: 7 Fix" in out


# ---- labelled steps --------------------------------------------------------------------------------------------------


def steps(seed: int, labels: list[bool], **fields: Any) -> dict[str, Any]:
    completions = [words(100 * seed + at, 2) for at in range(len(labels))]
    return {"prompt": words(seed) + "=", "completions": completions, "labels": labels, **fields}


def test_labels_of_steps(look):
    rows = [steps(i, [True, True, i % 2 > 0, True]) for i in range(10)]
    rows[1]["completions"][2] = words(1, 40)
    rows[3]["prompt"] = words(3, 40)
    out, page = look(rows, "--max_length", "150", "--show", "4")
    assert "· prm " in out and "9 of 10 kept (stepwise-supervision)" in out
    assert "Steps beyond the limit 2 of 10 train rows (20 %)" in out
    assert "Rows without a step 1 of 10 train rows (10 %)" in out and "train row 3: dropped: no step is left" in out
    assert "train row 1: cut: 2 of 4 steps end beyond the limit" in out
    assert "steps 3.8 a row; median 4, most 4" in out and "85 % of steps: 29 of 34" in out
    assert "first wrong step step 3 in the median; 5 of 9 rows have one" in out
    assert "⟦✗ ↵" in out and "First wrong step of train rows" in page


def test_rows_that_end_at_the_first_mistake(look):
    out, _ = look([steps(i, [True, False]) for i in range(20)])
    assert "Rows end at their first wrong step In all 20 train rows" in out
    assert "Rows end" not in look([steps(i, [True, False, True]) for i in range(20)])[0]
    out, _ = look([steps(i, [True, True]) for i in range(4)])
    assert "FAULT Only one label All 8 labels of the train set are of correct steps" in out
    assert "first wrong step none" in out


# ---- which method ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "fields", "expected"),
    [
        (pair(0), (), "dpo"),
        (pair(0), ("RewardConfig", "KTOConfig"), "reward"),
        (labelled(0, True), (), "kto"),
        (labelled(0, True), ("SFTConfig", "DPOConfig"), "sft"),
        (steps(0, [True]), (), "prm"),
        ({"prompt": "a", "completion": "b", "label": None}, (), "sft"),
        ({"input_ids": [1], "labels": [1]}, ("PRMConfig", "DPOConfig"), "prm"),
        ({"messages": []}, (), "sft"),
    ],
)
def test_the_method_is_read_from_the_columns(row, fields, expected):
    every = ("SFTConfig", "DPOConfig", "KTOConfig", "RewardConfig", "PRMConfig")
    assert choose({name: {} for name in fields or every}, [row]) == expected


def test_fields_of_one_method_and_rows_of_another():
    with pytest.raises(
        ConfigError, match=r"columns \['text'\] are read by sft, and the fields given are of dpo or kto"
    ):
        choose({"DPOConfig": {}, "KTOConfig": {}}, [{"text": "a"}])


def test_the_file_of_a_run_says_the_method(look, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text("desirable_weight: 1.5\nlearning_rate: 1.0e-6\nbf16: true\n", encoding="utf-8")
    assert "· kto " in look([pair(i) for i in range(4)], "--config", str(file))[0]
    file.write_text("method: reward\n", encoding="utf-8")
    assert "· reward " in look([pair(i) for i in range(4)], "--config", str(file))[0]
    base = ["inspect", "--model_name_or_path", "m", "--dataset_name", "x.jsonl"]
    for flags, said in (
        (["--method", "ppo"], "expected one of sft, dpo, kto, reward, prm"),
        (["--method", "sft", "--beta", "1"], "unknown flag --beta"),
        (["--betaa", "1"], "unknown flag --betaa"),
        (["--beta", "1", "--packing"], "unknown flag"),
    ):
        assert main([*base, *flags]) == 2
        assert said in capsys.readouterr().err
