"""`posttrain score`: a reward model, or one of steps, and rows → a file of rewards."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.cli.parse import Values, construct
from posttrain.cli.run import load_data
from posttrain.errors import ConfigError
from posttrain.files import whole_file


@dataclass
class ScoreArguments:
    """What to score, and where to write it."""

    output_file: str | None = None
    """File to write the rewards to, a JSON object a line, in the order of the rows."""
    max_length: int | None = None
    """Longest prompt with its response, in tokens; a longer one has no reward. Unset: no limit."""
    max_tokens_per_forward: int = 8192
    """Tokens that go through the model at once."""
    use_cpu: bool = False
    """Stay on the CPU."""
    eos_token: str | None = None
    """Token that ends a response, as in training. Unset: the tokenizer's."""
    step_separator: str = "\n"
    """Text that ends a step, of a process reward model: what it was trained with."""
    trust_remote_code: bool = False
    """Allow code that comes with a model or a data set to run."""


def check_score(values: Values) -> None:
    """Refuse what cannot be scored, before anything heavy is imported."""
    given, model = values["ScoreArguments"], values["ModelConfig"]
    if not model.get("model_name_or_path"):
        raise ConfigError("`model_name_or_path` is not set; give --model_name_or_path the folder of a reward model.")
    if not given.get("output_file"):
        raise ConfigError("`output_file` is not set; give --output_file rewards.jsonl.")
    if not Path(given["output_file"]).expanduser().absolute().parent.is_dir():
        raise ConfigError(f"`output_file` is {given['output_file']!r}, and its folder does not exist; make it first.")
    if not values["ScriptArguments"].get("dataset_name") and not values["DatasetMixtureConfig"].get("datasets"):
        raise ConfigError("`dataset_name` is not set; give --dataset_name a file, a folder or a hub name.")
    for name in ("max_length", "max_tokens_per_forward"):
        if given.get(name) is not None and given[name] < 1:
            raise ConfigError(f"`{name}` is {given[name]}; it must be at least 1.")


def score(values: Values) -> None:
    """`posttrain score`."""
    check_score(values)

    import torch

    from posttrain.data.config import DatasetMixtureConfig, ScriptArguments
    from posttrain.data.joining import is_stream
    from posttrain.data.stepwise import StepOptions
    from posttrain.data.tokenizer import set_up_tokenizer
    from posttrain.model.config import ModelConfig
    from posttrain.model.load import LoadOptions, load_tokenizer
    from posttrain.trainer.rewards import load_judge, score_rows, score_steps

    asked: ScoreArguments = construct(ScoreArguments, values["ScoreArguments"])
    model: ModelConfig = construct(ModelConfig, values["ModelConfig"])
    script: ScriptArguments = construct(ScriptArguments, values["ScriptArguments"])
    mixture: DatasetMixtureConfig = construct(DatasetMixtureConfig, values["DatasetMixtureConfig"])
    fields = {"revision": model.model_revision, "dtype": model.dtype, "attn_implementation": model.attn_implementation}
    rows, _ = load_data(script, mixture, wants_eval=False)
    if is_stream(rows):
        raise ConfigError("`dataset_streaming` is on, and rewards are of a whole set; turn it off.")
    stepwise = "completions" in rows.column_names
    options = LoadOptions(
        {name: value for name, value in fields.items() if value is not None},
        trust_remote_code=asked.trust_remote_code,
        disable_dropout=True,
        task="TOKEN_CLS" if stepwise else "SEQ_CLS",
    )
    source: Any = model.model_name_or_path
    judge = load_judge(source, options)
    if torch.cuda.is_available() and not asked.use_cpu:
        judge.model.to("cuda")
    tokenizer = set_up_tokenizer(load_tokenizer(source, options), asked.eos_token, None, None)
    if stepwise:
        steps = StepOptions(asked.max_length, separator=asked.step_separator)
        found = list(score_steps(judge, tokenizer, rows, steps, asked.max_tokens_per_forward))
    else:
        found = list(score_rows(judge, tokenizer, rows, asked.max_length, asked.max_tokens_per_forward))
    with whole_file(Path(str(asked.output_file)).expanduser()) as partial:
        partial.write_text("".join(json.dumps(line) + "\n" for line in found), encoding="utf-8")
    margins = [line["margin"] for line in found if line.get("margin") is not None]
    right = f": {sum(m > 0 for m in margins)} of {len(margins)} chosen responses have the higher" if margins else ""
    print(f"wrote {len(found)} rows of rewards to {asked.output_file}{right}", flush=True)
