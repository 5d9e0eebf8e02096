"""`posttrain merge`: what it saves, what it checks, what it refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from data_fixtures import CHATML, byte_tokenizer
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import posttrain.model.merge as room
from posttrain.cli.main import main
from posttrain.model.merge import difference

IDS = torch.tensor([[5, 9, 11, 200, 7, 33, 250]])
ON: dict[str, Any] = {"r": 3, "lora_alpha": 6, "lora_dropout": 0.0}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_model(tie_word_embeddings=True).bfloat16().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def adapter(base: Path, folder: Path, tokenizer: Any = None, **fields: Any) -> Path:
    """A trained adapter: every weight of it moved."""
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**ON | fields))
        with torch.no_grad():
            for p in (p for p in model.parameters() if p.requires_grad):
                p += 0.2 * torch.randn(p.shape).to(p.dtype)
        model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def on_the_head(base: Path, tmp_path: Path) -> Path:
    return adapter(base, tmp_path / "adapter", target_modules=["q_proj", "lm_head"])


def merge(source: Path | str, out: Path, *more: str) -> int:
    return main(["merge", "--model_name_or_path", str(source), "--output_dir", str(out), *more])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.float()


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [33, 250]},
    ],
    ids=["head", "dora", "saved head", "tokens"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", None])
def test_what_is_saved_has_the_adapters_logits(
    fields: dict[str, Any], dtype: str | None, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source = adapter(base, tmp_path / "adapter", byte_tokenizer(template=CHATML), **fields)
    assert merge(source, tmp_path / "out", *(("--dtype", dtype) if dtype else ())) == 0
    said = capsys.readouterr().out
    assert "probe tokens" in said and "saved to" in said
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert {p.dtype for p in merged.parameters()} == {getattr(torch, dtype or "bfloat16")}
    whole = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), source)
    want = logits(whole)
    tolerance = 1e-5 if dtype == "float32" else 0.03
    assert difference(logits(merged), want) < tolerance
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == CHATML
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "out"]
    if "trainable_token_indices" in fields:
        assert merged.lm_head.weight is merged.model.embed_tokens.weight
        rows: Any = whole.get_base_model().model.embed_tokens.token_adapter.trainable_tokens_delta.default
        assert torch.equal(merged.model.embed_tokens.weight[[33, 250]], rows.to(merged.dtype))


def test_the_newest_whole_checkpoint_of_a_run(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for step in (1, 2, 10):
        folder = adapter(base, tmp_path / "run" / f"checkpoint-{step}", target_modules=["q_proj"])
        (folder / "trainer_state.json").write_text("{}" if step < 10 else "")  # the last is half-written
    assert merge(tmp_path / "run", tmp_path / "out") == 0
    assert "checkpoint-2" in capsys.readouterr().out


def test_an_empty_folder_may_be_there(on_the_head: Path, tmp_path: Path):
    (tmp_path / "out").mkdir()
    assert merge(on_the_head, tmp_path / "out") == 0
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize("fault", ["peft's own merge", "weights lost on the way"])
def test_a_model_with_other_logits_is_not_saved(
    fault: str, on_the_head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    if fault == "peft's own merge":  # the embedding tied to the head is moved as well
        monkeypatch.setattr(room, "merge_adapter", lambda model: model.merge_and_unload())
    else:
        own = AutoModelForCausalLM.from_pretrained

        def forgetful(name: Any, **kwargs: Any) -> Any:
            model = own(name, **kwargs)
            if str(name).rpartition("/")[2].startswith(".out"):
                model.model.norm.weight.data.mul_(1.5)
            return model

        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", forgetful)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert merge(on_the_head, tmp_path / "out") == 2
    assert "nothing was saved" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]


def named_base(folder: Path, name: str | None) -> Path:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": name}))
    return folder


def test_refused(base: Path, on_the_head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    full = tmp_path / "full"
    full.mkdir()
    (full / "kept").write_text("")
    for name in ("moved", "nameless", "quantized"):
        shutil.copytree(on_the_head, tmp_path / name)
    shutil.copytree(base, tmp_path / "base4")
    config = json.loads((tmp_path / "base4" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "base4" / "config.json").write_text(json.dumps(config))
    for args, message in (
        ((base, tmp_path / "out"), "is a whole model, not an adapter"),
        ((full, tmp_path / "out"), "is not an adapter"),
        ((tmp_path / "none", tmp_path / "out"), "is not an adapter"),
        ((on_the_head, full), f"`output_dir` is '{full}', which is not empty"),
        ((on_the_head, full / "kept"), "which is not empty"),
        ((on_the_head, tmp_path / "out", "--dtype", "int8"), "`dtype` is 'int8'; expected float32, bfloat16"),
        ((named_base(tmp_path / "moved", str(tmp_path / "gone")), tmp_path / "out"), "gone', which cannot be read"),
        ((named_base(tmp_path / "nameless", None), tmp_path / "out"), "does not name its base"),
        ((named_base(tmp_path / "quantized", str(tmp_path / "base4")), tmp_path / "out"), "is stored quantized"),
    ):
        assert merge(*args) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    assert main(["merge", "--output_dir", "x"]) == 2 and "`model_name_or_path` is not set" in capsys.readouterr().err
    assert main(["merge", "--model_name_or_path", "x"]) == 2 and "`output_dir` is not set" in capsys.readouterr().err


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from posttrain.cli.main import main; main(['merge', '--help'])\n"
        "print([m for m in ('torch', 'transformers', 'peft') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--output_dir" in done.stdout and done.stdout.strip().endswith("[]")


def test_differences_are_shares_of_the_largest_logit():
    want = torch.tensor([[2.0, -4.0]])
    assert difference(torch.tensor([[2.0, -3.0]]), want) == 0.25
    assert difference(torch.zeros(1, 3), want) == float("inf")
    assert not difference(torch.tensor([[float("nan"), 0.0]]), want) <= 1.0
