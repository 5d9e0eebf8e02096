"""What the training commands do once their fields are read: check, load, train, save."""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.cli.launch import COMMAND, LAUNCHED
from posttrain.cli.parse import Values, construct
from posttrain.errors import ConfigError

if TYPE_CHECKING:
    from posttrain.data.config import DatasetMixtureConfig, ScriptArguments
    from posttrain.model.config import ModelConfig

_QUANTIZED = ("load_in_4bit", "load_in_8bit")


def build(method: str, values: Values) -> tuple[Any, ScriptArguments, str | None]:
    """Read, load and prepare everything: the trainer, ready to train; and the checkpoint to go on from.

    method: a module of `posttrain.trainer`, which has a config and a trainer of its name.   e.g. "sft"
    """
    config = config_of(method)
    resume = check_run(method, values)

    from posttrain.data.config import DatasetMixtureConfig, ScriptArguments
    from posttrain.model.adapters import get_peft_config, get_quantization_config
    from posttrain.model.config import ModelConfig

    module = importlib.import_module(f"posttrain.trainer.{method}")
    model: ModelConfig = construct(ModelConfig, values["ModelConfig"])
    script: ScriptArguments = construct(ScriptArguments, values["ScriptArguments"])
    mixture: DatasetMixtureConfig = construct(DatasetMixtureConfig, values["DatasetMixtureConfig"])
    args: Any = construct(getattr(module, config), values[config])
    check_given = getattr(args, "check_losses", None)
    if check_given is not None:  # here it is known what was given, also where it is the default
        check_given(values[config])
    suggest_launch(method, visible_gpus())
    args.model_init_kwargs = model_init_kwargs(model, args)
    peft_config = None if goes_on(model, values["ModelConfig"]) else get_peft_config(model)
    quantization_config = get_quantization_config(model)
    train, evaluation = load_data(script, mixture, wants_eval=args.do_eval or args.eval_on_start)
    trainer: Any = getattr(module, f"{_class_of(method)}Trainer")(
        model=model.model_name_or_path,
        args=args,
        train_dataset=train,
        eval_dataset=evaluation,
        peft_config=peft_config,
        quantization_config=quantization_config,
    )
    return trainer, script, resume


def config_of(method: str) -> str:
    """e.g. "dpo" -> "DPOConfig" """
    return f"{_class_of(method)}Config"


def _class_of(method: str) -> str:
    return method.capitalize() if method == "reward" else method.upper()


def train(method: str, values: Values) -> None:
    """`posttrain sft`, `posttrain dpo`, `posttrain kto`, `posttrain prm`, `posttrain reward`."""
    trainer, script, resume = build(method, values)
    record(trainer)
    finish(trainer, script, resume)


def record(trainer: Any) -> None:
    """Tell the trainer what to write beside the checkpoints about the command that made it."""
    from posttrain.cli.record import resolved

    files, command = getattr(trainer, "run_files", None), os.environ.get(COMMAND)
    if files is not None and command is not None:
        files.command = json.loads(command)
        files.resolved = resolved(files.command, {"bf16": bool(trainer.args.bf16), "fp16": bool(trainer.args.fp16)})


def dry_run(method: str, values: Values) -> None:
    """`posttrain sft --dry_run`: everything that can fail before the first step. Writes nothing to `output_dir`."""
    config = values[config_of(method)]
    config["report_to"] = ["none"]  # making a trainer starts its trackers
    config["push_to_hub"] = False  # and the hub's repository
    folder = Path(config.get("output_dir") or "trainer_output").expanduser()
    missing = not folder.exists()
    trainer, _, resume = build(method, values)
    steps = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())[-1]
    trainer.create_optimizer_and_scheduler(steps)
    next(iter(trainer.get_train_dataloader()))
    if missing and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()  # the base class makes it
    begin = f"resuming from {resume}" if resume is not None else "from the start"
    say(f"dry run: the fields, data, model and schedule are good: {steps} steps, {begin}. Nothing was trained.")


def finish(trainer: Any, script: ScriptArguments, resume: str | None) -> None:
    """Train, save, and say where."""
    if script.ignore_bias_buffers:
        ignore_bool_buffers(trainer.model)
    if resume is not None:
        say(f"resuming from {resume}")
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(trainer.args.output_dir)
    say(f"saved to {trainer.args.output_dir}")
    if trainer.args.push_to_hub:
        trainer.push_to_hub(dataset_name=script.dataset_name)
        say(f"pushed to the hub as {trainer.hub_model_id}")


def say(text: str) -> None:
    """Print once, on the first rank."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def visible_gpus() -> int:
    """GPUs this process sees."""
    import torch

    return torch.cuda.device_count()


def suggest_launch(command: str, gpus: int) -> None:
    """Say how to use all GPUs, where one process sees several."""
    if gpus > 1 and "WORLD_SIZE" not in os.environ and LAUNCHED not in os.environ:
        say(f"{gpus} GPUs are visible and one is used. For all of them: posttrain {command} … --num_processes {gpus}")


# Before anything heavy is imported


def check_run(method: str, values: Values) -> str | None:
    """Refuse what cannot run; return the checkpoint to go on from."""
    config = config_of(method)
    check(values, config)
    return resume_folder(values[config])


def check(values: Values, config: str) -> None:
    """Refuse what cannot run, from the given fields alone."""
    model, script, mixture = values["ModelConfig"], values["ScriptArguments"], values["DatasetMixtureConfig"]
    if not model.get("model_name_or_path"):
        raise ConfigError("`model_name_or_path` is not set; give --model_name_or_path a hub id or a local folder.")
    _check_sources(script, mixture)
    streams = script.get("dataset_streaming") or mixture.get("streaming")
    if streams and values[config].get("max_steps", -1) <= 0:
        raise ConfigError("a streamed data set has no length; set `max_steps`.")
    _check_adapter(model)


def _check_sources(script: dict[str, Any], mixture: dict[str, Any]) -> None:
    name, datasets = script.get("dataset_name"), mixture.get("datasets")
    if name and datasets:
        raise ConfigError(f"`dataset_name` ({name!r}) and `datasets` are both set; keep one.")
    if not name and not datasets:
        raise ConfigError("no data: set `dataset_name`, or `datasets:` in the --config file.")
    if datasets and script.get("dataset_config"):
        raise ConfigError("`dataset_config` belongs to `dataset_name`; in `datasets:` give each source its `name`.")
    size = mixture.get("test_split_size")
    if size is not None and not 0 < size < 1:
        raise ConfigError(f"`test_split_size` is {size}; it must be between 0 and 1.")


def _check_adapter(model: dict[str, Any]) -> None:
    given = _adapter_fields(model)
    if given and "use_peft" not in model:
        raise ConfigError(f"`{given[0]}` is set but `use_peft` is not; set `use_peft` to train an adapter.")
    folder = Path(str(model["model_name_or_path"])).expanduser()
    adapter = (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()
    for name in _QUANTIZED:
        if model.get(name) and not model.get("use_peft") and not adapter:
            raise ConfigError(f"`{name}` is on, and quantized weights cannot be trained; set `use_peft` too.")


def _adapter_fields(model: dict[str, Any]) -> list[str]:
    return [name for name in model if name.startswith("lora_") or name in ("use_rslora", "use_dora")]


def resume_folder(config: dict[str, Any]) -> str | None:
    """The checkpoint the fields ask for, before anything heavy is imported."""
    from posttrain.trainer.checkpoints import find_checkpoint
    from posttrain.trainer.folder import refuse_anothers

    output_dir = config.get("output_dir") or "trainer_output"
    found = find_checkpoint(config.get("resume_from_checkpoint"), output_dir)
    if found is None and config.get("save_strategy") != "no" and not config.get("overwrite_output_dir"):
        refuse_anothers(Path(output_dir).expanduser())
    return found


# After


def goes_on(model: ModelConfig, given: dict[str, Any]) -> bool:
    """Whether the model named is an adapter, and nothing says what a fresh one should be: then that one is trained."""
    from posttrain.model.saved import find_adapter

    return not _adapter_fields(given) and find_adapter(model.model_name_or_path, model.model_revision) is not None


def model_init_kwargs(model: ModelConfig, args: Any) -> dict[str, Any]:
    """Arguments of `from_pretrained`: what `model_init_kwargs` says, then what the model's own fields say."""
    kwargs = dict(args.model_init_kwargs or {})
    from_fields = {
        "revision": model.model_revision,
        "dtype": None if "torch_dtype" in kwargs else model.dtype,
        "attn_implementation": model.attn_implementation,
        "trust_remote_code": args.trust_remote_code or None,
    }
    return {**{name: value for name, value in from_fields.items() if value is not None}, **kwargs}


def load_data(script: ScriptArguments, mixture: DatasetMixtureConfig, wants_eval: bool) -> tuple[Any, Any]:
    """The training set, and the evaluation set when evaluation is on."""
    from posttrain.data.config import DatasetConfig
    from posttrain.data.mixture import get_dataset

    streaming = script.dataset_streaming or mixture.streaming

    def read(sources: list[DatasetConfig], test_split_size: float | None = None) -> Any:
        return get_dataset(replace(mixture, datasets=sources, streaming=streaming, test_split_size=test_split_size))

    def source(split: str) -> list[DatasetConfig]:
        return [DatasetConfig(path=str(script.dataset_name), name=script.dataset_config, split=split)]

    found = read(mixture.datasets or source(script.dataset_train_split), mixture.test_split_size)
    if not wants_eval:
        return found["train"], None
    if mixture.test_split_size is not None:
        return found["train"], found["test"]
    if mixture.datasets:
        raise ConfigError("`eval_strategy` is on and `datasets:` has no test split; set `test_split_size`.")
    return found["train"], read(source(script.dataset_test_split))["train"]


def ignore_bool_buffers(model: Any) -> None:
    """Keep DDP from broadcasting boolean masks, which its backends may not know."""
    import torch

    model._ddp_params_and_buffers_to_ignore = [
        name for name, buffer in model.named_buffers() if buffer.dtype == torch.bool
    ]


# What the table of commands names

sft, dry_sft, check_sft = partial(train, "sft"), partial(dry_run, "sft"), partial(check_run, "sft")
dpo, dry_dpo, check_dpo = partial(train, "dpo"), partial(dry_run, "dpo"), partial(check_run, "dpo")
kto, dry_kto, check_kto = partial(train, "kto"), partial(dry_run, "kto"), partial(check_run, "kto")
prm, dry_prm, check_prm = partial(train, "prm"), partial(dry_run, "prm"), partial(check_run, "prm")
reward, dry_reward, check_reward = partial(train, "reward"), partial(dry_run, "reward"), partial(check_run, "reward")
