"""Where rows come from: the fields a user sets on the command line or in a file."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ScriptArguments:
    """One data set, by name or path."""

    dataset_name: str | None = None
    """Hub name, local file (jsonl, json, csv, parquet, txt) or folder of such files."""
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
    """Split to take."""
    columns: list[str] | None = None
    """Columns to keep. Unset: all."""
    fraction: float | None = None
    """Set on every one of several sources: its share of the mixture. Set on some: share of the source's own rows. In
    (0, 1]. Unset: all rows."""


@dataclass
class DatasetMixtureConfig:
    """Several sources, concatenated in order (`datasets:` in a YAML file)."""

    datasets: list[DatasetConfig] = field(default_factory=list)
    """The sources."""
    streaming: bool = False
    """Read rows as they are needed."""
    test_split_size: float | None = None
    """Share of the rows held out as the test split."""
