"""Where rows come from: the fields a user sets on the command line or in a file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class ScriptArguments:
    """One data set, by name or path."""

    dataset_name: str | None = None
    """Hub name, local file (jsonl, json, csv, tsv, txt, compressed too; parquet, arrow) or folder of such files."""
    dataset_config: str | None = None
    """Configuration of a hub data set."""
    dataset_train_split: str = "train"
    """Split to train on."""
    dataset_test_split: str = "test"
    """Split to evaluate on, when it exists and evaluation is on."""
    dataset_streaming: bool = False
    """Read rows as they are needed; `max_steps` is then required."""
    ignore_bias_buffers: bool = False
    """Do not broadcast boolean buffers under DDP."""


@dataclass
class DatasetConfig:
    """One source of a mixture."""

    path: str
    """Hub name, local file or folder."""
    name: str | None = None
    """Configuration of a hub data set."""
    data_dir: str | None = None
    """Folder inside the data set."""
    data_files: str | list[str] | dict[str, str] | None = None
    """Files to read, or a mapping from split to file."""
    split: str = "train"
    """Split to take, or part of one: `train[:1000]`, `train[10%:]`, `train+validation`."""
    columns: list[str] | None = None
    """Columns to keep, by the names they have in the source. Unset: all."""
    fraction: float | None = None
    """Set on every one of several sources: its share of the mixture. Set on some: share of the source's own rows. In
    (0, 1]. Unset: all rows."""
    rename_columns: dict[str, str] | None = None
    """New names of columns: {old: new}."""
    weight: float | None = None
    """With `mixing: interleave`, how often this source is drawn from, relative to the others. Set on all or none.
    Unset: all alike."""


@dataclass
class DatasetMixtureConfig:
    """Several sources as one data set (`datasets:` in a YAML file)."""

    datasets: list[DatasetConfig] = field(default_factory=list)
    """The sources."""
    streaming: bool = False
    """Read rows as they are needed."""
    test_split_size: float | None = None
    """Share of the rows held out as the test split."""
    mixing: Literal["concatenate", "interleave"] = "concatenate"
    """concatenate: every row once, one source after another. interleave: the source of each row is drawn by weight."""
    stopping_strategy: Literal["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"] = (
        "first_exhausted"
    )
    """When interleaving ends. first_exhausted: when a source runs out; rows of the others are left out.
    all_exhausted: when every source has been used up once; shorter ones start again.
    all_exhausted_without_replacement: every row once."""
    mixing_seed: int = 0
    """Seed of what is drawn when interleaving, and of the rows `test_split_size` holds out."""
    check_formats: bool = True
    """Refuse a source whose rows mix dataset types, and local text files with a row that is not whole. Turn off for
    rows of a form of your own."""


@dataclass
class ConvertArguments:
    """A data set, and the type it is to become."""

    dataset_name: str | None = None
    """Hub name, local file or folder."""
    dataset_config: str | None = None
    """Configuration of a hub data set."""
    dataset_split: str = "train"
    """Split to convert, or part of one."""
    to: str | None = None
    """Dataset type of the result: language_modeling, prompt_only, prompt_completion, preference, implicit_preference,
    unpaired_preference or stepwise_supervision."""
    output: str | None = None
    """File to write: .jsonl, .jsonl.gz, .json or .parquet."""
    overwrite: bool = False
    """Replace `output` when it exists."""
    conversational: bool = False
    """Write prompts and answers that are text as messages of the user and the assistant."""
    step_separator: str = "\n"
    """Text between the steps of a stepwise row that becomes one answer."""
