"""Checkpoints are whole or not there; what is damaged, another run's or cannot be written is named."""

from __future__ import annotations

import copy
import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from laws.runs import bit_equal, run, sft
from peft import LoraConfig
from pool import POOL
from safetensors.torch import load_file
from strategies import STRATEGIES, clean, lora
from tiny import tiny_model, token_rows
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

from posttrain.errors import ConfigError, ModelError
from posttrain.model.merge import difference, merge_adapter, probe_logits
from posttrain.parallel.ranks import rank
from posttrain.trainer import folder as folders
from posttrain.trainer.checkpoints import STAGING, checkpoints_in, find_checkpoint, publish
from posttrain.trainer.folder import LOCK, owned
from posttrain.trainer.manifest import MANIFEST, Manifest, damage, files_of, owner_of, read_manifest, write_manifest
from posttrain.trainer.resuming import use_learning_rate

ADAM: dict[str, Any] = {"optim": "adamw_torch", "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 1}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps that saved each."""
    folder = tmp_path_factory.mktemp("three")
    sft(output_dir=str(folder), max_steps=3, **ADAM).train()
    return folder


@pytest.fixture
def copied(three: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(three, tmp_path / "run"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def resumed(folder: Path, how: Any = "last", **fields: Any) -> Any:
    return sft(**ADAM | {"output_dir": str(folder), "max_steps": 4, "resume_from_checkpoint": how} | fields)


# ---- written whole ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_names_every_file_of_it(three):
    assert [n for n in names(three) if n.startswith((STAGING, "checkpoint"))] == [
        STAGING,
        *(f"checkpoint-{i}" for i in (1, 2, 3)),
    ]
    assert not list((three / STAGING).iterdir())
    for step in (1, 2, 3):
        folder = three / f"checkpoint-{step}"
        manifest = read_manifest(folder)
        assert manifest is not None
        assert (manifest.step, manifest.sequence, manifest.ranks) == (step, step, 1)
        assert sorted(manifest.files) == files_of(folder)
        assert {"model.safetensors", "optimizer.pt", "rng_state.pth", "run.json"} <= manifest.files.keys()
        assert damage(folder) == []


@pytest.mark.parametrize("how", [("points", "11"), pytest.param(("points", "1"), marks=pytest.mark.slow)])
def test_a_kill_at_any_step_of_a_save_leaves_the_last_whole_one(how, tmp_path):
    killed(tmp_path, *how)


@pytest.mark.slow
def test_forty_kills_at_random_moments(tmp_path):
    killed(tmp_path, "random", "40")


def killed(folder: Path, *how: str) -> None:
    program = Path(__file__).with_name("killed.py")
    paths = os.pathsep.join([str(program.parent.parent), str(program.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(program), str(folder), *how],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_checkpoint_that_was_whole_but_had_no_name_yet_gets_it(copied):
    newest = copied / "checkpoint-3"
    newest.rename(copied / STAGING / newest.name)
    assert find_checkpoint("last", str(copied), hashes=True) == str(newest)


def test_a_checkpoint_that_is_written_anew_takes_the_place_of_the_old_one(copied):
    (copied / STAGING).mkdir(exist_ok=True)
    for step, link in ((3, False), (2, True)):
        final, staged = copied / f"checkpoint-{step}", copied / STAGING / f"checkpoint-{step}"
        if link:
            final.rename(copied / "elsewhere")
            final.symlink_to(copied / "elsewhere")
        shutil.copytree(copied / "checkpoint-1", staged)
        publish(staged, final)
        assert (final / "trainer_state.json").is_file() and not final.is_symlink()
        assert not list((copied / STAGING).iterdir())
    assert (copied / "elsewhere" / MANIFEST).is_file()


def test_what_was_half_written_is_swept_away_by_the_next_run(copied):
    half = copied / STAGING / "checkpoint-9"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    resumed(copied).train()
    assert not half.exists()
    assert not (copied / "checkpoint-9").exists()


def test_files_of_other_ranks_are_theirs():
    for name, owner in {
        "rng_state_1.pth": 1,
        "global_step4/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt": 1,
        "pytorch_model_fsdp_0/__1_0.distcp": 1,
        "model-00001-of-00002.safetensors": 0,
        "rng_state_7.pth": 0,  # of a rank there is not: somebody must look after it
    }.items():
        assert owner_of(name, 2) == owner, name


# ---- rotation --------------------------------------------------------------------------------------------------------


def test_the_oldest_written_go_first_not_the_lowest_steps(copied):
    """Going on from step 1, steps 2 and 3 of the abandoned branch are older than what is written now."""
    resumed(copied, str(copied / "checkpoint-1"), max_steps=2, save_total_limit=2).train()
    assert [path.name for path in checkpoints_in(copied)] == ["checkpoint-3", "checkpoint-2"]
    assert find_checkpoint("last", str(copied)) == str(copied / "checkpoint-2")


def test_the_best_model_is_kept(tmp_path):
    settings: dict[str, Any] = {"eval_rows": token_rows(), "eval_strategy": "steps", "eval_steps": 1}
    trainer = sft(
        output_dir=str(tmp_path),
        max_steps=4,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # so that the first is the best
        **ADAM | settings,
    )
    trainer.train()
    best = tmp_path / "checkpoint-1"
    assert trainer.state.best_model_checkpoint == str(best)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["checkpoint-1", "checkpoint-4"]
    saved = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert saved["best_model_checkpoint"] == str(best)
    weights = load_file(best / "model.safetensors")
    assert torch.equal(weights["model.norm.weight"], trainer.model.model.norm.weight)


# ---- damage ----------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "flipped": (flip, "optimizer.pt has changed since it was written"),
    "cut": (lambda path: os.truncate(path, path.stat().st_size // 2), r"optimizer.pt has [\d,]+ bytes"),
    "missing": (Path.unlink, "optimizer.pt is missing"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken_when_asked(kind, copied, three):
    harm, message = DAMAGES[kind]
    harm(copied / "checkpoint-3" / "optimizer.pt")
    for how in ("last", str(copied / "checkpoint-3")):
        with pytest.raises(ConfigError, match=f"checkpoint-3 is damaged: {message}.*last_good"):
            resumed(copied, how).train()
    if kind == "flipped":
        again = resumed(copied, "last_good", max_steps=3)
        bit_equal(run(again), run(resumed(three, str(three / "checkpoint-2"), max_steps=3, save_strategy="no")))
        assert again._initial_global_step == 2


def test_a_damaged_manifest_is_not_passed_over_in_silence(copied):
    flip(copied / "checkpoint-2" / MANIFEST)
    with pytest.raises(ConfigError, match=r"checkpoint-2 is damaged: manifest.json cannot be read"):
        find_checkpoint("last", str(copied))
    assert find_checkpoint("last_good", str(copied)) == str(copied / "checkpoint-3")


def test_none_is_left(copied):
    for step in (1, 2, 3):
        flip(copied / f"checkpoint-{step}" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"'last_good', and `output_dir` .* holds no checkpoint"):
        find_checkpoint("last_good", str(copied))


def test_auto_begins_anew_where_there_is_none(three, tmp_path):
    assert find_checkpoint("auto", str(tmp_path)) is None
    assert find_checkpoint("auto", str(three)) == str(three / "checkpoint-3")


def test_a_manifest_is_read_as_it_was_written(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"abc")
    manifest = Manifest(4, 2, 1, {"a.bin": (3, "06b05ab6733a618578af5f94892f3950")})  # XXH3 of "abc", from its makers
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    assert damage(tmp_path) == []
    assert damage(tmp_path, part=1, parts=2) == []


# ---- what cannot be written ------------------------------------------------------------------------------------------


def full_disk(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class AtStep(TrainerCallback):
    def __init__(self, begin: dict[int, Any]) -> None:
        self.begin = begin

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begin.get(state.global_step + 1, lambda: None)()


@pytest.mark.parametrize("where", ["torch.save", "posttrain.trainer.saving.synced", "posttrain.trainer.saving.publish"])
def test_a_full_disk_loses_nothing_and_is_told(where, tmp_path, capsys):
    trainer = sft(output_dir=str(tmp_path), max_steps=3, **ADAM)
    patch = pytest.MonkeyPatch()
    trainer.add_callback(AtStep({2: lambda: patch.setattr(where, full_disk), 3: patch.undo}))
    whole = run(trainer)
    told = capsys.readouterr().err
    assert "checkpoint-2 could not be saved: OSError: [Errno 28]" in told
    assert "checkpoint-1. The next save tries again" in told
    assert "1 checkpoint(s) could not be saved: steps [2]" in told
    assert trainer.failed_saves == [2]
    told = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    saves = [(line["event"], line["step"]) for line in told if "checkpoint" in line.get("event", "")]
    assert saves == [("checkpoint", 1), ("checkpoint_failed", 2), ("checkpoint", 3)]
    assert [path.name for path in checkpoints_in(tmp_path)] == ["checkpoint-1", "checkpoint-3"]
    assert not list((tmp_path / STAGING).iterdir())
    bit_equal(whole, run(sft(max_steps=3, **ADAM | {"save_strategy": "no"})))


def test_a_file_too_large_is_told_in_the_words_of_torch_too(tmp_path, capsys):
    """A real limit: the optimizer is larger than a file may be, the weights are not."""
    trainer = sft(output_dir=str(tmp_path), max_steps=2, **ADAM)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    weights = sum(p.numel() * 4 for p in trainer.model.parameters())
    limit = lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))  # noqa: E731
    trainer.add_callback(AtStep({1: lambda: limit(int(weights * 1.5)), 2: lambda: limit(soft)}))
    try:
        trainer.train()
    finally:
        limit(soft)
    assert "checkpoint-1 could not be saved" in capsys.readouterr().err
    assert [path.name for path in checkpoints_in(tmp_path)] == ["checkpoint-2"]


class OneRankFull(TrainerCallback):
    """The second rank may write no file above 1 KiB in the first step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if rank() == 1:
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10 if state.global_step == 0 else hard, hard))


def save_on_a_full_rank(strategy: str, folder: str) -> list[int]:
    with clean():
        trainer = sft(output_dir=folder, max_steps=2, **ADAM, **STRATEGIES[strategy])
        trainer.add_callback(OneRankFull())
        trainer.train()
        return trainer.failed_saves


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2-sharded", "zero2"])
def test_what_one_rank_cannot_write_all_learn(strategy, tmp_path):
    pytest.importorskip("deepspeed") if strategy == "zero2" else None
    assert POOL.run(save_on_a_full_rank, strategy=strategy, folder=str(tmp_path)) == [[1], [1]]
    assert [path.name for path in checkpoints_in(tmp_path)] == ["checkpoint-2"]
    assert damage(tmp_path / "checkpoint-2") == []
    assert not list((tmp_path / STAGING).iterdir())


def test_another_error_while_saving_is_raised(tmp_path, monkeypatch):
    def broken(*args: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("posttrain.trainer.engine.write_run", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        sft(output_dir=str(tmp_path), max_steps=1, **ADAM).train()


def test_an_output_dir_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"`output_dir` \(.*file/run\) cannot be written: Not a directory"):
        sft(output_dir=str(tmp_path / "file" / "run"), max_steps=1, **ADAM).train()

    def denied(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(folders.os, "open", denied)
    with pytest.raises(ConfigError, match="cannot be written: Permission denied"), owned(tmp_path):
        pass


def test_a_disk_too_small_for_the_weights_is_told_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 1 << 10))
    with pytest.raises(ConfigError, match=r"has 0.00 GiB free, and the weights of one checkpoint take"):
        sft(output_dir=str(tmp_path), max_steps=1, **ADAM).train()
    assert not (tmp_path / LOCK).exists()


# ---- whose folder it is ----------------------------------------------------------------------------------------------


def test_the_folder_of_another_run(copied):
    fields = {"output_dir": str(copied), "max_steps": 1, **ADAM}
    with pytest.raises(ConfigError, match=r"holds 3 checkpoint\(s\) of another run, the newest checkpoint-3.*last"):
        sft(**fields).train()
    sft(**fields | {"save_strategy": "no"}).train()
    trainer = sft(overwrite_output_dir=True, **fields)
    trainer.train()
    assert [path.name for path in checkpoints_in(copied)] == ["checkpoint-2", "checkpoint-3", "checkpoint-1"]
    trainer.train()  # its own


def test_resuming_elsewhere_does_not_mix_with_another_run(copied, three):
    with pytest.raises(ConfigError, match="of another run"):
        resumed(copied, str(three / "checkpoint-2")).train()


def test_two_runs_in_one_folder(tmp_path):
    with owned(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
        with pytest.raises(ConfigError, match=rf"written by another run \(process {os.getpid()} on .*\.lock"):
            sft(output_dir=str(tmp_path), max_steps=1, **ADAM).train()
    assert not (tmp_path / LOCK).exists()


def test_a_lock_of_a_dead_process_is_taken_over(tmp_path, monkeypatch):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for change in ({"pid": dead.pid}, {"started": "1"}):  # the second: its number was given to another process
        (tmp_path / LOCK).write_text(json.dumps({**folders._myself(), **change}))
        with owned(tmp_path):
            pass
    (tmp_path / LOCK).write_text("")  # killed while it was written
    monkeypatch.setattr(folders, "HEARTBEAT_SECONDS", 0.02)
    with owned(tmp_path):
        pass


def test_a_lock_of_another_machine_is_watched(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "HEARTBEAT_SECONDS", 0.2)
    here = folders._myself()
    with owned(tmp_path):  # renews the lock
        monkeypatch.setattr(folders, "_myself", lambda: {**here, "host": "elsewhere"})
        with pytest.raises(ConfigError, match="written by another run"), owned(tmp_path):
            pass
        monkeypatch.undo()
    (tmp_path / LOCK).write_text(json.dumps({**here, "host": "elsewhere"}))
    monkeypatch.setattr(folders, "HEARTBEAT_SECONDS", 0.02)
    with owned(tmp_path):  # nobody renews it
        assert json.loads((tmp_path / LOCK).read_text())["host"] == here["host"]


# ---- what changed since ----------------------------------------------------------------------------------------------


def test_what_is_no_checkpoint(three, tmp_path):
    (tmp_path / "file").write_text("")
    tiny_model("qwen3").save_pretrained(tmp_path / "model")
    for asked, message in {
        tmp_path / "nowhere": "no checkpoint is there",
        tmp_path / "file": "a file",
        tmp_path / "model": "a saved model; start a new run with `model_name_or_path`",
        three: "that folder is no checkpoint, but holds some; name one, such as .*checkpoint-3",
    }.items():
        with pytest.raises(ConfigError, match=f"`resume_from_checkpoint` is .*{message}"):
            sft(resume_from_checkpoint=str(asked)).train()


@pytest.mark.parametrize("text", ['{"trainer": "SFTTrainer"}', "[1]", '{"shapes": 3, "settings": {}}', "{"])
def test_a_record_of_another_program_is_none(text, copied, capsys):
    checkpoint = copied / "checkpoint-2"
    (checkpoint / "run.json").write_text(text)
    (checkpoint / "manifest.json").unlink()
    resumed(copied, resume_from_checkpoint=str(checkpoint)).train()
    assert "has no run.json of this library" in capsys.readouterr().err


@pytest.mark.parametrize("named", ["file", "folder"])
def test_gguf_that_is_not_dequantized(named, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="GGUF weights are quantized"):
        sft(str(tmp_path if named == "folder" else tmp_path / "model.gguf"))


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "rows": ({"rows": token_rows(12, seed=9)}, "training data, content"),
    "fewer": ({"rows": token_rows(10)}, "training data, number of items: 12 there, 10 here"),
    "stream": ({"rows": token_rows().to_iterable_dataset()}, "kind: 'rows' there, 'a stream' here"),
    "packing": ({"packing": True}, "kind: 'rows' there, 'packed rows' here"),
    "seed": ({"data_seed": 5}, "data_seed: 0 there, 5 here"),
    "order": ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy: 'random' there"),
    "batch": ({"per_device_train_batch_size": 3}, "rows a step: 2 there, 3 here"),
    "accumulation": ({"gradient_accumulation_steps": 2}, "rows a step: 2 there, 4 here"),
    "drop": ({"dataloader_drop_last": True}, "dataloader_drop_last: False there, 2 here"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_data_or_order_that_changed_is_refused_by_name(name, three):
    fields, message = CHANGES[name]
    with pytest.raises(ConfigError, match=f"{message}.*resume_with_changes"):
        resumed(three, save_strategy="no", **fields).train()


def test_a_change_can_be_accepted(copied, capsys):
    trainer = resumed(copied, rows=token_rows(10), resume_with_changes=True)
    trainer.train()
    assert trainer.state.global_step == 4
    told = capsys.readouterr().err
    assert "number of items: 12 there, 10 here; " in told
    assert "rows may come twice or never" in told


MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "wider": ({"model": tiny_model("qwen3", intermediate_size=64)}, "gate_proj.weight is 48×32 there and 64×32 here"),
    "deeper": ({"model": tiny_model("qwen3", num_hidden_layers=3)}, "layers.2.* is missing there"),
    "family": ({"model": tiny_model("llama")}, "another model's .* is 8 there and missing here"),
    "adapter": ({"peft_config": LoraConfig(target_modules=["q_proj"])}, "a whole model, and this run trains an adapt"),
}


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_another_models_checkpoint(name, recorded, copied):
    fields, message = MODELS[name]
    if not recorded:  # as another program writes it
        for file in (MANIFEST, "run.json"):
            (copied / "checkpoint-3" / file).unlink()
    if not recorded and name in ("deeper", "family"):
        pytest.skip("names are compared by `load_weight_files`")
    with pytest.raises(ConfigError, match=message):
        resumed(copied, str(copied / "checkpoint-3"), save_strategy="no", **fields).train()


def test_another_trainers_checkpoint_and_another_optimizer(copied):
    with pytest.raises(ConfigError, match="holds the state of `optim` 'adamw_torch', and this run has 'sgd'"):
        resumed(copied, optim="sgd").train()
    record = json.loads((copied / "checkpoint-3" / "run.json").read_text())
    (copied / "checkpoint-3" / "run.json").write_text(json.dumps({**record, "trainer": "DPOTrainer"}))
    (copied / "checkpoint-3" / MANIFEST).unlink()
    with pytest.raises(ConfigError, match="written by DPOTrainer, and this is SFTTrainer"):
        resumed(copied, str(copied / "checkpoint-3")).train()


def test_another_learning_rate_takes_effect_and_is_told(copied, capsys):
    trainer = resumed(copied, learning_rate=1e-4, lr_scheduler_type="constant")
    trainer.train()
    assert trainer.state.log_history[-2]["learning_rate"] == pytest.approx(1e-4)
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)
    assert "learning_rate: 0.01 there, 0.0001 here; used from here on" in capsys.readouterr().err


def test_what_became_of_the_learning_rate_is_what_is_told(copied, capsys):
    """By hand: a schedule without `base_lrs`, DeepSpeed, and a saved rate of 0."""
    cases = [
        (1e-2, False, 1e-5, "used from here on"),
        (1e-2, True, 1e-2, "DeepSpeed keeps"),
        (0.0, False, 1e-2, "of 0"),
    ]
    record = json.loads((copied / "checkpoint-2" / "run.json").read_text())
    for then, deepspeed, rate, text in cases:
        (copied / "run.json").write_text(json.dumps(record | {"settings": {"learning_rate": then}}))
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
        trainer = SimpleNamespace(
            is_deepspeed_enabled=deepspeed,
            args=SimpleNamespace(learning_rate=1e-5),
            optimizer=optimizer,
            lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        )
        use_learning_rate(trainer, str(copied))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
        assert text in capsys.readouterr().err


def test_a_run_that_is_done_takes_no_further_step(copied, capsys):
    before = load_file(copied / "checkpoint-3" / "model.safetensors")
    trainer = resumed(copied, max_steps=3)
    trainer.train()
    assert trainer.state.global_step == 3
    assert "step 3 of 3 is done" in capsys.readouterr().err
    for name, value in before.items():
        assert torch.equal(value, trainer.model.state_dict()[name])


def test_patience_goes_on_counting(tmp_path):
    """Early stopping after two evaluations without gain: one before the stop, one after."""

    def build(**fields: Any) -> Any:
        trainer = sft(
            output_dir=str(tmp_path),
            eval_rows=token_rows(),
            eval_strategy="steps",
            eval_steps=1,
            metric_for_best_model="loss",
            greater_is_better=True,
            load_best_model_at_end=True,
            **ADAM | fields,
        )
        trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=2))
        return trainer

    build(max_steps=2).train()
    again = build(max_steps=9, resume_from_checkpoint="last")
    again.train()
    assert again.state.global_step == 3


class Counted(TrainerCallback, ExportableState):
    def __init__(self, start: int) -> None:
        self.count = start

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"count": self.count}}


def test_two_callbacks_of_one_class_go_on_each(copied):
    def build(*starts: int, **fields: Any) -> list[Counted]:
        found = [Counted(start) for start in starts]
        trainer = resumed(copied, **fields)
        for each in found:
            trainer.add_callback(each)
        trainer.train()
        return found

    resume = {"resume_from_checkpoint": str(copied / "checkpoint-2")}
    build(10, 50, **resume)
    first, second = build(0, 0, resume_from_checkpoint=str(copied / "checkpoint-3"), max_steps=5)
    assert (first.count, second.count) == (13, 53)


# ---- C73 -------------------------------------------------------------------------------------------------------------


class Export(TrainerCallback):
    """Write merged weights 50 times in bfloat16, in the middle of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.differences = folder, []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step != 2:
            return
        ids = list(range(3, 40))
        for _ in range(50):
            merged = merge_adapter(copy.deepcopy(model)).to(torch.bfloat16)
            merged.save_pretrained(self.folder)
            self.differences.append(difference(probe_logits(merged, ids), probe_logits(model, ids)))


def test_c73_exporting_does_not_change_the_model(tmp_path):
    """C73: live weights stay the same bits, and so does the run; the merged model says what the adapter does."""
    fields = ADAM | {"save_strategy": "no"}
    whole = run(sft(peft_config=lora(), **fields))
    trainer, export = sft(peft_config=lora(), **fields), Export(tmp_path)
    trainer.add_callback(export)
    again = run(trainer)
    assert max(export.differences) < 0.02
    bit_equal(whole, again)
