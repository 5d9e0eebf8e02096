"""One supervised fine-tuning run of one side, in its own process. Prints one line of JSON, the last on stdout.

python sft_worker.py '{"side": "trl-1.16.0", "model": "...", "rows": "rows.json", "config": {...}, "lora": 16, ...}'

The same calls for every side: `SFTConfig` with its defaults apart from where it runs and what it writes, `SFTTrainer`
on a model path and rows that hold only `input_ids`. Real tokens are counted where a micro-batch is fetched.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measure
import torch


def library(side: str) -> tuple[Any, Any]:
    if side == "ours":
        from posttrain import SFTConfig, SFTTrainer
    else:
        from trl import SFTConfig, SFTTrainer
    return SFTConfig, SFTTrainer


def make_trainer(job: dict, rows: list[list[int]], folder: str) -> Any:
    from datasets import Dataset

    config_class, trainer_class = library(job["side"])
    args = config_class(
        output_dir=folder,
        use_cpu=True,
        num_train_epochs=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **job["config"],
    )
    more = {}
    if job["lora"]:
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(
            r=job["lora"], lora_alpha=2 * job["lora"], target_modules="all-linear", task_type="CAUSAL_LM"
        )
    dataset = Dataset.from_dict({"input_ids": rows})
    return trainer_class(model=job["model"], args=args, train_dataset=dataset, **more)


def sizes(batch: Any) -> tuple[int, int]:
    """(real tokens, positions computed) of one micro-batch, of any side."""
    if "batch" in batch:  # ours: shared tokens count once for each sequence that has them, as they would unshared
        forests = [piece.batch for piece in batch["batch"]]
        return sum(f.unshared_tokens for f in forests), sum(f.num_tokens for f in forests)
    computed = sum(value.numel() for name, value in batch.items() if name.endswith("input_ids"))
    mask = batch.get("attention_mask")
    return (computed if mask is None else int(mask.sum())), computed


class Meter:
    """Seconds, real tokens and computed positions of each optimizer step."""

    def __init__(self, trainer: Any) -> None:
        from transformers import TrainerCallback

        meter = self
        self.steps: list[dict] = []
        self.pending = [0, 0]
        fetch = trainer.get_batch_samples

        def counted(*args: Any, **kwargs: Any) -> Any:
            out = fetch(*args, **kwargs)
            for batch in out[0]:
                real, computed = sizes(batch)
                meter.pending[0] += real
                meter.pending[1] += computed
            return out

        class Clock(TrainerCallback):
            def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
                meter.last, meter.last_cpu = time.perf_counter(), time.process_time()

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                now, cpu = time.perf_counter(), time.process_time()
                took = {"seconds": now - meter.last, "cpu_seconds": cpu - meter.last_cpu}
                real, computed = meter.pending
                meter.steps.append({**took, "tokens": real, "computed": computed})
                meter.pending, meter.last, meter.last_cpu = [0, 0], now, cpu

        trainer.get_batch_samples = counted
        trainer.add_callback(Clock())


def profile(trainer: Any) -> str:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        trainer.train()
    return prof.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60)


def train(job: dict) -> dict:
    rows = json.loads(Path(job["rows"]).read_text())
    with tempfile.TemporaryDirectory() as folder:
        library(job["side"])
        if job["prewarm"]:
            # Imports, thread pools and kernels are first touched here, on a few tokens and by a trainer thrown away.
            make_trainer(job, [row[:16] for row in rows[:2]], folder).train()
        measure.reset_peak()
        baseline = measure.rss_mib()
        trainer = make_trainer(job, rows, folder)
        meter = Meter(trainer)
        out = {}
        if job.get("profile"):
            out["profile"] = profile(trainer)
        else:
            trainer.train()
        out["loss"] = trainer.state.log_history[-1].get("train_loss")
        args = trainer.args
        out["checkpointing"] = bool(args.gradient_checkpointing) or bool(
            getattr(args, "activation_checkpointing", False)
        )
        out["bf16"], out["threads"] = bool(args.bf16), torch.get_num_threads()
        out["parameters"] = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    return {
        **out,
        "steps": meter.steps,
        "peak_mib": measure.peak_mib(),
        "peak_over_baseline_mib": measure.peak_mib() - baseline,
    }


def leak(job: dict) -> dict:
    """How far the logits of a row move when another row of its micro-batch changes. An exact layout gives 0."""
    rows = json.loads(Path(job["rows"]).read_text())
    first, second = rows[0][:48], rows[1][:48]
    other = [(t + 7) % 1000 + 10 for t in first]
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(job, [first, second], folder)
        model = trainer.model.eval()

        def logits(*examples: list[int]) -> torch.Tensor:
            features = [{"input_ids": e, "labels": e, "seq_lengths": [len(e)]} for e in examples]
            batch = trainer.data_collator(features)
            with torch.no_grad():
                out = model(**{k: v for k, v in batch.items() if k not in ("labels", "shift_labels")}, use_cache=False)
            return out.logits.float().reshape(-1, out.logits.shape[-1])[-len(second) :]

        alone = logits(second)
        moved = (logits(first, second) - logits(other, second)).abs().max()
        apart = (logits(first, second) - alone).abs().max()
    return {"moved_by_neighbour": float(moved), "packed_minus_alone": float(apart), "scale": float(alone.abs().max())}


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    result = leak(job) if job.get("leak") else train(job)
    gc.collect()
    print("\n" + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
