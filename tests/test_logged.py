"""Completions of the evaluation prompts: what is asked, what is written, and where it goes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from data_fixtures import CHATML, byte_tokenizer
from pool import POOL
from tiny import tiny_model
from transformers import GenerationConfig

from posttrain import LogCompletionsCallback, SFTConfig, SFTTrainer, WeaveCallback
from posttrain.errors import ConfigError, MissingExtraError
from posttrain.trainer import logged
from posttrain.trainer.completions import complete, eval_prompts

ROWS = [{"prompt": f"say {'x' * i}", "completion": f" {i}"} for i in range(5)]
GREEDY = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=257)


def build(folder: Any, rows: Any = ROWS, **fields: Any) -> SFTTrainer:
    settings: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 2, "report_to": "none", "disable_tqdm": True, "bf16": False,
        "per_device_eval_batch_size": 2, "save_strategy": "no", "eval_strategy": "steps", "eval_steps": 1,
    }  # fmt: skip
    tokenizer = byte_tokenizer(template=CHATML)
    return SFTTrainer(tiny_model(eos_token_id=257), SFTConfig(**(settings | fields)), None, ROWS, rows, tokenizer)


def alone(model: Any, tokenizer: Any, text: str) -> str:
    """Greedy, one prompt at a time, without padding or `generate`."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    start = len(ids)
    model.eval()
    for _ in range(4):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == 257:
            break
    return tokenizer.decode(ids[start:], skip_special_tokens=True)


def test_completions_are_what_the_model_writes(tmp_path: Path):
    trainer = build(tmp_path)
    prompts = eval_prompts(trainer, "test")
    assert [trainer.processing_class.decode(ids) for ids in prompts] == [row["prompt"] for row in ROWS]
    before = torch.get_rng_state()
    trainer.model.train()
    found = complete(trainer, trainer.model, prompts, GREEDY)
    assert trainer.model.training and torch.equal(before, torch.get_rng_state())
    assert found == [(row["prompt"], alone(trainer.model, trainer.processing_class, row["prompt"])) for row in ROWS]
    assert len({text for _, text in found}) > 1


def test_prompts_of_chats_mappings_and_packed_sets(tmp_path: Path):
    chats = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]}] * 3
    trainer = build(tmp_path, {"a": chats, "b": chats}, assistant_only_loss=False, completion_only_loss=None)
    with pytest.raises(ConfigError, match="needs prompts"):
        eval_prompts(trainer, "LogCompletionsCallback")
    trainer = build(tmp_path, packing=True, max_length=64)
    assert len(eval_prompts(trainer, "x")) == 5 and len(eval_prompts(trainer, "x", 2)) == 2
    trainer.eval_dataset = None
    with pytest.raises(ConfigError, match="the trainer has none"):
        LogCompletionsCallback(trainer)


def test_a_run_logs_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    trainer = build(tmp_path)
    sent: list[Any] = []
    monkeypatch.setitem(logged.TRACKERS, "wandb", lambda rows, trainer: sent.append(list(rows)))
    monkeypatch.setitem(logged.TRACKERS, "mlflow", lambda rows, trainer: sent.append("not asked"))
    trainer.add_callback(LogCompletionsCallback(trainer, GREEDY, num_prompts=3))
    trainer.args.report_to = ["wandb"]
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(line["step"], line["prompt"]) for line in lines] == [
        (at, row["prompt"]) for at in (1, 2) for row in ROWS[:3]
    ]
    assert [len(rows) for rows in sent] == [3, 6]  # a tracker shows the whole table
    assert "Completions at step 1" in capsys.readouterr().out


def test_every_tracker_is_told_in_its_own_way(monkeypatch: pytest.MonkeyPatch):
    seen: dict[str, Any] = {}
    rows = [(1, "a", "b"), (2, "c", "d")]

    def module(name: str, **members: Any) -> None:
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**members))  # pyright: ignore[reportArgumentType]

    module("wandb", log=lambda x: seen.update(wandb=x["completions"]), Table=lambda columns, data: (columns, data))
    module("trackio", log=lambda x: seen.update(trackio=x["completions"]), Table=lambda dataframe: dataframe)
    experiment = SimpleNamespace(log_table=lambda name, tabular_data, headers: seen.update(comet=(name, tabular_data)))
    module("comet_ml", get_running_experiment=lambda: experiment)
    module("mlflow", log_table=lambda data, artifact_file: seen.update(mlflow=data))
    writer = SimpleNamespace(add_text=lambda *args: seen.update(tensorboard=args))
    trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[SimpleNamespace(tb_writer=writer)]))
    for send in logged.TRACKERS.values():
        send(rows, trainer)
    assert seen["wandb"] == (["step", "prompt", "completion"], [[1, "a", "b"], [2, "c", "d"]])
    assert seen["trackio"].to_dict("list") == seen["mlflow"] == {
        "step": [1, 2], "prompt": ["a", "c"], "completion": ["b", "d"],
    }  # fmt: skip
    assert seen["comet"] == ("completions.csv", [[1, "a", "b"], [2, "c", "d"]])
    assert seen["tensorboard"] == ("completions", "**c**\n\nd", 2)


def on_a_rank(folder: str) -> list[tuple[str, str]]:
    trainer = build(folder)
    return complete(trainer, trainer.model, eval_prompts(trainer, "x"), GREEDY)


def test_two_processes_write_the_same(tmp_path: Path):
    first, second = POOL.run(on_a_rank, folder=str(tmp_path))
    assert first == second == on_a_rank(str(tmp_path))


# ---- Weave -----------------------------------------------------------------------------------------------------------


def test_weave_is_asked_for_where_it_is_missing(tmp_path: Path):
    if importlib.util.find_spec("weave") is not None:
        pytest.skip("weave is installed")
    with pytest.raises(MissingExtraError, match="pip install weave"):
        WeaveCallback(build(tmp_path), "project")


class Logger:
    """Stands in for weave.EvaluationLogger, with its calls."""

    made: list[Logger] = []  # noqa: RUF012

    def __init__(self, model: str, dataset: str, eval_attributes: dict[str, Any]) -> None:
        self.about, self.predictions, self.end = (model, dataset, eval_attributes["training_step"]), [], None
        self.made.append(self)

    def log_prediction(self, inputs: dict[str, str], output: str) -> Any:
        prediction = SimpleNamespace(inputs=inputs, output=output, scores={}, done=False)
        prediction.log_score = lambda scorer, score: prediction.scores.update({scorer: score})
        prediction.finish = lambda: setattr(prediction, "done", True)
        self.predictions.append(prediction)
        return prediction

    def log_summary(self, summary: dict[str, Any]) -> None:
        self.end = summary

    def finish(self) -> None:
        self.end = "finished"


@pytest.mark.parametrize("scored", [True, False])
def test_weave_gets_predictions_and_scores(scored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started: list[str] = []
    weave, clients = ModuleType("weave"), ModuleType("weave.trace.context.weave_client_context")
    weave.__spec__ = importlib.util.spec_from_loader("weave", None)
    vars(weave).update(init=started.append, EvaluationLogger=Logger)
    vars(clients).update(get_weave_client=lambda: None)
    for name, module in (("weave", weave), (clients.__name__, clients)):
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("weave.trace", "weave.trace.context"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(Logger, "made", [])
    trainer = build(tmp_path)
    scorers: Any = {"length": lambda prompt, completion: len(prompt)} if scored else None
    trainer.add_callback(WeaveCallback(trainer, "project", scorers, GREEDY, num_prompts=2, model_name="tiny"))
    trainer.train()
    assert started == ["project"]
    assert [logger.about for logger in Logger.made] == [("tiny", "eval_dataset", 1), ("tiny", "eval_dataset", 2)]
    first = Logger.made[0]
    assert [p.inputs["prompt"] for p in first.predictions] == ["say ", "say x"] and all(
        p.done for p in first.predictions
    )
    assert [p.scores for p in first.predictions] == ([{"length": 4}, {"length": 5}] if scored else [{}, {}])
    assert first.end == ({"total_predictions": 2, "avg_length": 4.5} if scored else "finished")
    with pytest.raises(ConfigError, match="`project_name` is None"):
        WeaveCallback(trainer, None, scorers)._connect()
