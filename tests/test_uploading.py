"""What goes to the hub from `output_dir`, and what does not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers.trainer as upstream
from huggingface_hub.utils import filter_repo_objects
from laws.runs import sft

PRIVATE = {
    ".lock",
    ".incomplete/replaced-3/model.safetensors",
    "failed-step-3/rank0.pt",
    "environment.json",
    "resolved_config.yaml",
    "resolved_config.until-step-4.yaml",
    "log.jsonl",
    "completions.jsonl",
    "checkpoint-3/optimizer.pt",
}
PUBLIC = {"model.safetensors", "config.json", "tokenizer.json", "README.md", "template_audit.json"}


class _Hub:
    """Notes which files an upload would take."""

    def __init__(self) -> None:
        self.taken: list[set[str]] = []

    def upload_folder(self, *, folder_path: str, ignore_patterns: list[str], **kwargs: Any) -> Any:
        files = [path.relative_to(folder_path).as_posix() for path in Path(folder_path).rglob("*") if path.is_file()]
        self.taken.append(set(filter_repo_objects(files, ignore_patterns=ignore_patterns)))
        return SimpleNamespace(done=lambda: True)


def test_private_files_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hub = _Hub()
    monkeypatch.setattr(upstream, "hf_api", lambda: hub)
    for name in PRIVATE | PUBLIC:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    trainer = sft(output_dir=str(tmp_path), hub_strategy="every_save", overwrite_output_dir=True)
    trainer.hub_model_id, trainer.push_in_progress = "me/model", None
    monkeypatch.setattr(trainer, "create_model_card", lambda *args, **kwargs: None)
    monkeypatch.setattr(trainer, "init_hf_repo", lambda *args, **kwargs: None)
    trainer.args.save_strategy = upstream.SaveStrategy.STEPS
    trainer._push_from_checkpoint(str(tmp_path / "checkpoint-3"))
    trainer.push_to_hub()
    assert len(hub.taken) == 2
    for taken in hub.taken:
        assert taken >= PUBLIC and not taken & PRIVATE
    assert upstream.hf_api() is hub
