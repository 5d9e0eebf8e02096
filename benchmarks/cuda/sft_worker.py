"""One run of `sft.py`, in the environment of its side. Prints one line of JSON, the last on stdout."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

WORKERS = Path(__file__).resolve().parent.parent / "workers"
sys.path.insert(0, str(WORKERS))

import measure  # noqa: E402
import torch  # noqa: E402


def processor_worker() -> Any:
    """The worker of the benchmark on a CPU, which counts tokens and steps alike; it has this file's name."""
    spec = importlib.util.spec_from_file_location("processor_sft_worker", WORKERS / "sft_worker.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tokenizer() -> Any:
    """Rows are token ids already; a trainer still wants one."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def model(job: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = dict(job["shape"])
    config = AutoConfig.for_model(shape.pop("model_type"), pad_token_id=0, bos_token_id=1, eos_token_id=1, **shape)
    torch.manual_seed(0)
    with torch.device(job["device"]):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, job["dtype"]))


def train(job: dict[str, Any]) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import TrainerCallback

    worker = processor_worker()
    config_class, trainer_class = worker.library(job["side"])
    device = measure.Device(job["device"])
    more = {}
    if job["lora"]:
        from peft import LoraConfig

        lora = {"r": job["lora"], "lora_alpha": 2 * job["lora"], "target_modules": job["targets"]}
        more["peft_config"] = LoraConfig(task_type="CAUSAL_LM", **lora)

    class Wait(TrainerCallback):
        """The clock that is added after it stops when the device is done."""

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            device.wait()

    rows = json.loads(Path(job["rows"]).read_text())
    with tempfile.TemporaryDirectory() as folder:
        args = config_class(
            output_dir=folder,
            use_cpu=job["device"] == "cpu",
            num_train_epochs=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **job["config"],
        )
        device.reset_peak()
        trainer = trainer_class(
            model=model(job),
            args=args,
            train_dataset=Dataset.from_dict({"input_ids": rows}),
            processing_class=tokenizer(),
            callbacks=[Wait()],
            **more,
        )
        meter = worker.Meter(trainer)
        trainer.train()
        losses = [line["train_loss"] for line in trainer.state.log_history if "train_loss" in line]
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    return {"loss": losses[-1], "steps": meter.steps, "peak_mib": device.peak_mib(), "trained": trained}


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    print("\n" + json.dumps(train(job)), flush=True)


if __name__ == "__main__":
    main()
