"""Rewards of rows or of their steps, by a trained reward model, over exactly the ids that training builds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from posttrain.data.forest import build_forest
from posttrain.data.pairs import PairOptions, prepare_pairs
from posttrain.data.rows import in_memory
from posttrain.data.stepwise import StepOptions, prepare_steps
from posttrain.data.unpaired import prepare_unpaired
from posttrain.errors import ConfigError, ModelError
from posttrain.model.load import LoadOptions, Prepared, hub_kwargs, prepare_model
from posttrain.model.saved import find_adapter
from posttrain.parallel.ranks import say
from posttrain.types import Row, ScoreRequest

TOKENS = 8192
"""Tokens of a forward, unless one pair has more."""


_JUDGES = {
    "SEQ_CLS": "reward model: give the folder that `posttrain reward` wrote, or a sequence classification model with "
    "one label.",
    "TOKEN_CLS": "process reward model, which rows with steps need: give the folder that `posttrain prm` wrote, or a "
    "token classification model with two labels.",
}


def load_judge(source: Any, options: LoadOptions) -> Prepared:
    """A trained reward model, or an adapter that is one, ready to score.

    Raises `ModelError` for a name whose head was never trained: its rewards would be drawn at random.
    """
    if isinstance(source, str) and not _is_judge(source, options):
        raise ModelError(f"`model_name_or_path` is {source!r}, which is no {_JUDGES[options.task]}")
    prepared = prepare_model(source, options)
    prepared.model.eval()
    return prepared


def _is_judge(source: str, options: LoadOptions) -> bool:
    from transformers import AutoConfig

    adapter = find_adapter(source, hub_kwargs(options).get("revision"))
    if adapter is not None:
        return getattr(adapter.config.task_type, "value", adapter.config.task_type) == options.task
    if Path(source).expanduser().is_dir() and not (Path(source).expanduser() / "config.json").is_file():
        raise ModelError(f"`model_name_or_path` is the folder {source!r}, which holds no config.json.")
    try:
        config = AutoConfig.from_pretrained(source, **hub_kwargs(options))
    except Exception as error:  # network, permission and format errors have no common base
        raise ModelError(f"`model_name_or_path` is {source!r}, which cannot be read: {error}") from error
    kind = {"SEQ_CLS": "ForSequenceClassification", "TOKEN_CLS": "ForTokenClassification"}[options.task]
    return any(name.endswith(kind) for name in config.architectures or ())


def score_rows(
    judge: Prepared, tokenizer: Any, dataset: Any, max_length: int | None = None, max_tokens: int = TOKENS
) -> Iterator[dict[str, Any]]:
    """The reward of every row, in the order of the rows.

    Pairs give {"row", "chosen_reward", "rejected_reward", "margin"}, rows of `prompt` and `completion` (or `prompt_ids`
    and `completion_ids`) {"row", "reward"}. The ids are those `RewardTrainer` trains on, the end token too; what it
    would drop has None and is counted in the line that is said. Raises `DataError` naming row and column.
    """
    if max_tokens < 1:
        raise ConfigError(f"`max_tokens_per_forward` is {max_tokens}; it must be at least 1.")
    dataset = in_memory(dataset, "scored") if isinstance(dataset, list) else dataset
    columns = {*(dataset.column_names or ())}
    paired = {"chosen", "rejected"} <= columns or {"chosen_ids", "rejected_ids"} <= columns
    rows, sources = _pairs(dataset, tokenizer, max_length) if paired else _singles(dataset, tokenizer, max_length)
    found: dict[int, list[float]] = {}
    for source, (reward,) in _read(judge, rows, sources, max_tokens):
        found.setdefault(source, []).append(reward)
    for at in range(len(dataset)):
        rewards = found.get(at)
        if paired:
            chosen, rejected = rewards or (None, None)
            margin = None if chosen is None or rejected is None else chosen - rejected
            yield {"row": at, "chosen_reward": chosen, "rejected_reward": rejected, "margin": margin}
        else:
            yield {"row": at, "reward": rewards[0] if rewards else None}


def score_steps(
    judge: Prepared, tokenizer: Any, dataset: Any, options: StepOptions, max_tokens: int = TOKENS
) -> Iterator[dict[str, Any]]:
    """Of every row, {"row", "step_rewards"}: for each of its steps the probability that it is correct, None for one
    that ends beyond the limit. The ids are those `PRMTrainer` trains on. Rows are `prompt` and `completions`; labels
    are not read. Raises `DataError` naming row and column."""
    if max_tokens < 1:
        raise ConfigError(f"`max_tokens_per_forward` is {max_tokens}; it must be at least 1.")
    dataset = in_memory(dataset, "scored") if isinstance(dataset, list) else dataset
    steps = [len(row) if isinstance(row, list) else 0 for row in dataset["completions"]]
    kept = [name for name in dataset.column_names if name not in ("labels", "sample_weight")]
    labelled = dataset.select_columns(kept).add_column("labels", [[True] * n for n in steps])
    prepared, report = prepare_steps(labelled, tokenizer, options, name="scored")
    say(
        f"scored: {report.steps} steps of {report.rows_kept} rows of {report.rows_in}; {report.steps_cut} steps beyond "
        "`max_length` have none"
    )
    rows = [Row(row["input_ids"], row["weights"]) for row in prepared]
    found = dict(_read(judge, rows, list(prepared["source"]), max_tokens))
    for at, n in enumerate(steps):
        rewards = found.get(at, [])
        yield {"row": at, "step_rewards": [*rewards, *[None] * (n - len(rewards))]}


def _pairs(dataset: Any, tokenizer: Any, max_length: int | None) -> tuple[list[Row], list[int]]:
    ignored = [name for name in ("ref_chosen_logps", "ref_rejected_logps") if name in dataset.column_names]
    options = PairOptions(max_length, drop_long=True, at_end=True)
    prepared, report = prepare_pairs(dataset.remove_columns(ignored), tokenizer, options, name="scored")
    say(report.summary())
    return [Row(row["input_ids"], row["weights"]) for row in prepared], list(prepared["source"])


def _singles(dataset: Any, tokenizer: Any, max_length: int | None) -> tuple[list[Row], list[int]]:
    """Labels are not read, and a row need have none."""
    kept = [name for name in dataset.column_names if name not in ("label", "ref_logps")]
    labelled = dataset.select_columns(kept).add_column("label", [True] * len(dataset))
    prepared, report = prepare_unpaired(labelled, tokenizer, PairOptions(None), name="scored")
    rows, sources = [], []
    for row in prepared:
        ids = row["input_ids"]
        if max_length is None or len(ids) <= max_length:
            rows.append(Row(ids, [0.0] * (len(ids) - 1) + [1.0]))
            sources.append(int(row["source"]))
    long = report.rows_kept - len(rows)
    say(
        f"scored: {len(rows)} of {report.rows_in} rows; {report.rows_empty} with an empty response and {long} longer "
        "than `max_length` have none"
    )
    return rows, sources


def _groups(rows: list[Row], sources: list[int], max_tokens: int) -> Iterator[list[int]]:
    """Rows of a forward: of one source together, up to the budget as if nothing were shared."""
    group: list[int] = []
    tokens = 0
    for i, row in enumerate(rows):
        new = not group or sources[i] != sources[group[-1]]
        twin = len(rows[i + 1].input_ids) if new and i + 1 < len(rows) and sources[i + 1] == sources[i] else 0
        if group and new and tokens + len(row.input_ids) + twin > max_tokens:
            yield group
            group, tokens = [], 0
        group.append(i)
        tokens += len(row.input_ids)
    if group:
        yield group


@torch.no_grad()
def _read(judge: Prepared, rows: list[Row], sources: list[int], max_tokens: int) -> Iterator[tuple[int, list[float]]]:
    """Of every row its source, and what the head gives at each of its read-outs: a reward, or the probability of the
    second of two labels."""
    device = next(judge.model.parameters()).device
    for group in _groups(rows, sources, max_tokens):
        batch = build_forest([rows[i] for i in group], share=judge.layout == "packed", own=True).to(device)
        scores = judge.model(token_batch=batch, score_request=ScoreRequest())
        values = scores.values
        given = scores.logps if values.shape[1] == 1 else torch.sigmoid(values[:, 1] - values[:, 0])
        counts = torch.bincount(batch.sequence, minlength=len(group))
        for i, part in zip(group, given.cpu().split(counts.tolist()), strict=True):
            yield sources[i], part.tolist()
