"""One run of one side of one method, in its own process. Prints one line of JSON, the last on stdout.

python method_worker.py '{"method": "dpo", "side": "trl-1.16.0", "model": "...", "rows": "rows.json", "config": {...}}'

The same calls for every side: the config with its defaults apart from where it runs and what it writes, the trainer on
a model path and rows of text. Rows come as token ids that each are a word of their own, so every side sees as many
tokens; the first batch of ours is compared with what was asked.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import measure
import torch
from sft_worker import Meter

NAMES = {"dpo": "DPO", "kto": "KTO", "reward": "Reward"}


def library(method: str, side: str) -> tuple[Any, Any]:
    name = NAMES[method]
    for module in ("posttrain",) if side == "ours" else ("trl", f"trl.experimental.{method}"):
        found = importlib.import_module(module)
        if hasattr(found, f"{name}Trainer"):
            return getattr(found, f"{name}Config"), getattr(found, f"{name}Trainer")
    raise ImportError(f"{side} has no {name}Trainer")


def words(tokenizer: Any) -> list[str]:
    """Texts that are one token each, also after one another."""
    found = []
    for i in range(len(tokenizer)):
        text = tokenizer.decode([i])
        if text.startswith(" ") and text[1:].isascii() and text[1:].isalpha() and text[1:].islower():
            found.append(text)
    return [text for text, ids in zip(found, tokenizer(found)["input_ids"], strict=True) if len(ids) == 1]


def texts(rows: list[dict[str, Any]], tokenizer: Any) -> list[dict[str, Any]]:
    """Columns of numbers → text of as many tokens; other columns as they are."""
    known = words(tokenizer)
    return [
        {
            name: "".join(known[i % len(known)] for i in value) if isinstance(value, list) else value
            for name, value in row.items()
        }
        for row in rows
    ]


def make_trainer(job: dict, rows: list[dict[str, Any]], folder: str) -> Any:
    from datasets import Dataset

    config_class, trainer_class = library(job["method"], job["side"])
    args = config_class(
        output_dir=folder,
        use_cpu=True,
        num_train_epochs=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **job["config"],
    )
    return trainer_class(model=job["model"], args=args, train_dataset=Dataset.from_list(rows))


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    from transformers import AutoTokenizer

    rows = texts(json.loads(Path(job["rows"]).read_text()), AutoTokenizer.from_pretrained(job["model"]))
    with tempfile.TemporaryDirectory() as folder:
        # Imports, thread pools and kernels are first touched here, on short rows and by a trainer thrown away.
        short = [
            {name: value[:40] if isinstance(value, str) else value for name, value in row.items()} for row in rows[:8]
        ]
        make_trainer(job, short, folder).train()
        measure.reset_peak()
        baseline = measure.rss_mib()
        trainer = make_trainer(job, rows, folder)
        meter = Meter(trainer)
        trainer.train()
        args = trainer.args
        result = {
            "loss": trainer.state.log_history[-1].get("train_loss"),
            "bf16": bool(args.bf16),
            "checkpointing": bool(args.gradient_checkpointing)
            or bool(getattr(args, "activation_checkpointing", False)),
            "parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
            "steps": meter.steps,
            "peak_mib": measure.peak_mib(),
            "peak_over_baseline_mib": measure.peak_mib() - baseline,
        }
    gc.collect()
    print("\n" + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
