"""Callbacks that log what the model writes."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from posttrain.errors import ConfigError, MissingExtraError
from posttrain.parallel.ranks import say
from posttrain.trainer.completions import complete, eval_prompts

COLUMNS = ["step", "prompt", "completion"]
Rows = list[tuple[int, str, str]]
SHOWN = 10  # rows of the table on the console


class LogCompletionsCallback(TrainerCallback):
    """Complete the prompts of the evaluation set every `freq` steps (unset: `eval_steps`), and log them as a table.

    The table goes to `output_dir/completions.jsonl`, to the console, and to the trackers of `report_to` that take
    tables: wandb, trackio, comet_ml, mlflow, and tensorboard as text.

    e.g. trainer.add_callback(LogCompletionsCallback(trainer, num_prompts=8, freq=100))
    """

    def __init__(
        self,
        trainer: Any,
        generation_config: GenerationConfig | None = None,
        num_prompts: int | None = None,
        freq: int | None = None,
    ) -> None:
        if freq is not None and freq < 1:
            raise ConfigError(f"`freq` is {freq}; it must be at least 1.")
        self.trainer, self.generation_config, self.freq = trainer, generation_config, freq
        self.prompts = eval_prompts(trainer, "LogCompletionsCallback", num_prompts)
        self.table: Rows = []
        self._logged = -1

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        freq = self.freq or state.eval_steps or state.logging_steps
        if state.global_step == self._logged or state.global_step % max(int(freq), 1):
            return
        self._logged = state.global_step
        found = complete(self.trainer, kwargs["model"], self.prompts, self.generation_config)
        if not state.is_world_process_zero:
            return
        rows: Rows = [(state.global_step, prompt, completion) for prompt, completion in found]
        self.table += rows
        write_rows(Path(args.output_dir or "."), rows)
        show_rows(rows)
        for name, send in TRACKERS.items():
            if name in (args.report_to or ()):
                send(self.table, self.trainer)


def write_rows(folder: Path, rows: Rows) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "completions.jsonl", "a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(dict(zip(COLUMNS, row, strict=True)), ensure_ascii=False) + "\n")


def show_rows(rows: Rows) -> None:
    table = Table(title=f"Completions at step {rows[0][0]}", show_lines=True)
    for column in COLUMNS[1:]:
        table.add_column(column, overflow="fold")
    for _, prompt, completion in rows[:SHOWN]:
        table.add_row(*(_plain(text) for text in (prompt, completion)))
    Console().print(table)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")  # rich would read it as a style


# Trackers, each told in its own way. None of them is imported unless `report_to` names it.


def _wandb(rows: Rows, trainer: Any) -> None:
    wandb = importlib.import_module("wandb")
    wandb.log({"completions": wandb.Table(columns=COLUMNS, data=[list(row) for row in rows])})


def _trackio(rows: Rows, trainer: Any) -> None:
    trackio, pandas = importlib.import_module("trackio"), importlib.import_module("pandas")
    trackio.log({"completions": trackio.Table(dataframe=pandas.DataFrame(rows, columns=COLUMNS))})


def _comet(rows: Rows, trainer: Any) -> None:
    experiment = importlib.import_module("comet_ml").get_running_experiment()
    if experiment is not None:
        experiment.log_table("completions.csv", tabular_data=[list(row) for row in rows], headers=COLUMNS)


def _mlflow(rows: Rows, trainer: Any) -> None:
    columns = {name: [row[i] for row in rows] for i, name in enumerate(COLUMNS)}
    importlib.import_module("mlflow").log_table(data=columns, artifact_file="completions.json")


def _tensorboard(rows: Rows, trainer: Any) -> None:
    step = rows[-1][0]
    text = "\n\n".join(f"**{prompt}**\n\n{completion}" for at, prompt, completion in rows if at == step)
    for callback in trainer.callback_handler.callbacks:
        writer = getattr(callback, "tb_writer", None)
        if writer is not None:
            writer.add_text("completions", text, step)


TRACKERS: dict[str, Callable[[Rows, Any], None]] = {
    "wandb": _wandb,
    "trackio": _trackio,
    "comet_ml": _comet,
    "mlflow": _mlflow,
    "tensorboard": _tensorboard,
}


class WeaveCallback(TrainerCallback):
    """Log completions of the evaluation prompts to Weave at every evaluation, with the scores of `scorers`.

    scorers: name → function of (prompt, completion) that returns a number. `project_name` is needed unless Weave has
    been initialised. Raises `MissingExtraError` when weave is not installed.
    """

    def __init__(
        self,
        trainer: Any,
        project_name: str | None = None,
        scorers: dict[str, Callable[[str, str], float]] | None = None,
        generation_config: GenerationConfig | None = None,
        num_prompts: int | None = None,
        dataset_name: str = "eval_dataset",
        model_name: str | None = None,
    ) -> None:
        if importlib.util.find_spec("weave") is None:
            raise MissingExtraError("WeaveCallback needs weave, which is not installed; pip install weave.")
        self.trainer, self.project_name, self.scorers = trainer, project_name, scorers or {}
        self.generation_config, self.dataset_name = generation_config, dataset_name
        self.model_name = model_name or trainer.model.config.name_or_path or "model"
        self.prompts = eval_prompts(trainer, "WeaveCallback", num_prompts)
        self._logged, self._weave = -1, None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            self._connect()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step == self._logged:
            return
        self._logged = state.global_step
        found = complete(self.trainer, kwargs["model"], self.prompts, self.generation_config)
        if state.is_world_process_zero:
            self._log(found, state.global_step)

    def _connect(self) -> Any:
        if self._weave is None:
            weave = importlib.import_module("weave")
            clients = importlib.import_module("weave.trace.context.weave_client_context")
            if clients.get_weave_client() is None:
                if self.project_name is None:
                    raise ConfigError("`project_name` is None and Weave is not initialised; give one of them.")
                weave.init(self.project_name)
            self._weave = weave
        return self._weave

    def _log(self, found: list[tuple[str, str]], step: int) -> None:
        attributes = {"training_step": step, "model_name": self.model_name}
        if self.generation_config is not None:
            attributes["generation_config"] = self.generation_config.to_dict()
        logger = self._connect().EvaluationLogger(
            model=self.model_name, dataset=self.dataset_name, eval_attributes=attributes
        )
        totals = dict.fromkeys(self.scorers, 0.0)
        for prompt, completion in found:
            prediction = logger.log_prediction(inputs={"prompt": prompt}, output=completion)
            for name, scorer in self.scorers.items():
                score = scorer(prompt, completion)
                totals[name] += score
                prediction.log_score(scorer=name, score=score)
            prediction.finish()
        if self.scorers:
            logger.log_summary(
                {"total_predictions": len(found), **{f"avg_{k}": total / len(found) for k, total in totals.items()}}
            )
        else:
            logger.finish()
        say(f"weave: {len(found)} completions of step {step} logged")
