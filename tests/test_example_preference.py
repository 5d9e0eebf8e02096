"""examples/preference: its data are what its rule makes, its judge counts right, its configurations are read."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from data_fixtures import CHATML, byte_tokenizer
from tiny import tiny_model

from posttrain.cli.main import main

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "preference"


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "demo"))
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_the_data_are_what_the_rule_makes(tmp_path: Path):
    subprocess.run([sys.executable, str(EXAMPLE / "make_data.py"), "--out", str(tmp_path)], check=True)
    shipped = sorted(path.relative_to(EXAMPLE / "data") for path in (EXAMPLE / "data").rglob("*.jsonl"))
    assert [str(path) for path in shipped] == ["pairs/test.jsonl", "pairs/train.jsonl", "sft.jsonl"]
    for path in shipped:
        assert (tmp_path / path).read_bytes() == (EXAMPLE / "data" / path).read_bytes()


def test_the_judge_counts_by_hand(monkeypatch: pytest.MonkeyPatch):
    compare = script("compare", monkeypatch)
    row = compare.score.Row([], {"event": "yoga", "day": None})
    answers = ['{"event": "yoga", "day": null}', '{"event": "yoga", "day": "Monday"}', "yoga"]
    found = compare.judge(answers, [row] * 3)
    assert found.right == [2, 1, 0]
    assert (found.exact, found.invented) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    better = compare.judge([answers[0]] * 3, [row] * 3)
    assert compare.win_rate(found, better) == (1.0, 2)


@pytest.mark.parametrize("method", ["sft", "dpo", "reward"])
def test_the_configurations_are_good(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    tiny_model("qwen3", eos_token_id=257).save_pretrained(tmp_path / "model")
    byte_tokenizer(template=CHATML).save_pretrained(tmp_path / "model")
    monkeypatch.chdir(ROOT)
    line = [method, "--config", str(EXAMPLE / f"{method}.yaml"), "--model_name_or_path", str(tmp_path / "model")]
    line += ["--output_dir", str(tmp_path / "out"), "--use_cpu", "true", "--bf16", "false", "--dry_run"]
    assert main(line) == 0
    assert "the fields, data, model and schedule are good" in capsys.readouterr().out
