"""The benchmarks run: here at sizes whose numbers mean nothing."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from data_fixtures import byte_tokenizer
from tiny import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).parent.parent
TINY = ["--tiny", "--device", "cpu", "--threads", "1"]


def shapes() -> Any:
    spec = importlib.util.spec_from_file_location("shapes", ROOT / "benchmarks/cuda/shapes.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bench(script: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def rows_of(table: str) -> list[list[str]]:
    """The cells of a printed table, without its header."""
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return [line for line in lines if not line[0].startswith("---")][1:]


# Billions of weights, from the models' own pages: 270M; 0.6B; 8.2B; 30.5B; 35B.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gemma-3-270m", 0.268),
        ("Qwen3-0.6B", 0.596),
        ("Qwen3-8B", 8.19),
        ("Qwen3-30B-A3B", 30.5),
        ("Qwen3.6-35B-A3B", 34.7),
    ],
)
def test_shapes_are_the_models(name: str, billions: float):
    made = dict(shapes().shape(name))
    config = AutoConfig.for_model(made.pop("model_type"), **made)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=5e-3)


def test_varlen_script_runs_and_sdpa_is_exact():
    found = rows_of(bench("cuda/varlen.py", *TINY, "--rounds", "1"))
    assert len(found) == 9  # three forests, three kinds of heads; without CUDA only sdpa
    for line in found:
        assert all(float(error) < 1e-5 for error in line[2:6])


@pytest.mark.slow
def test_head_script_runs_and_its_sides_agree():
    found = rows_of(bench("cuda/head.py", *TINY, "--sides", "ours", "full", "--cases", "chunk", "--rounds", "1"))
    (ours, *_, loss), (full, *_, wanted) = found
    assert (ours, full) == ("posttrain", "all logits at once")
    assert float(loss) == pytest.approx(float(wanted), abs=2e-5)


@pytest.mark.slow
def test_sft_script_runs_every_setting_to_the_same_loss():
    only = ("--only", "Qwen3-0.6B", "--kinds", "full", "--sides", "ours", "--steps", "2", "--warmup", "1")
    found = rows_of(bench("cuda/sft.py", *TINY, *only))
    assert len(found) == 4
    assert len({line[5].rstrip(" |") for line in found}) == 1, found


@pytest.mark.slow
def test_memory_script_runs_its_settings_to_the_same_loss(tmp_path: Path):
    tiny_model("llama", vocab_size=50000).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    options = ("--threads", "1", "--batch", "2", "--steps", "2", "--median", "20", "--dtype", "fp32", "--save", "")
    options += ("--settings", "full", "products kept", "layers kept in 512 MiB")
    found = rows_of(bench("memory.py", "--model", str(tmp_path), *options))
    assert len(found) == 3
    assert len({line[4].rstrip(" |") for line in found}) == 1, found


@pytest.mark.slow
def test_pack_script_fills_bins():
    options = ("--rows", "5000", "--capacities", "1024", "--sigmas", "0.8", "--rounds", "1", "--save", "")
    [line] = rows_of(bench("pack.py", *options))
    assert line[:2] == ["1,024", "0.8"] and float(line[4].rstrip(" |")) >= 99.5


def test_without_a_gpu_the_scripts_say_so():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    command = [sys.executable, str(ROOT / "benchmarks/cuda/varlen.py")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 1 and "--tiny --device cpu" in done.stderr
