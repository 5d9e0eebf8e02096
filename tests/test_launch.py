"""`posttrain sft --num_processes N`: what is launched, what wins, what is refused, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from data_fixtures import CHATML, byte_tokenizer
from safetensors.torch import load_file
from tiny import tiny_model

from posttrain.cli import agent, launch
from posttrain.cli.main import main
from posttrain.cli.run import suggest_launch
from posttrain.errors import ConfigError
from posttrain.trainer.checkpoints import is_complete

NAMES = ["cpu", "fsdp2", "multi_gpu", "single", "zero1", "zero2", "zero3"]
FLAGS = ["--model_name_or_path", "m", "--dataset_name", "d.jsonl", "--output_dir", "out"]


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Records launches instead of running them: (what was asked for, the child's command line)."""
    seen: list[Any] = []

    def record(line: list[str], environment: dict[str, str]) -> int:
        assert line[1:3] == ["-m", "posttrain.cli.agent"] and launch.LAUNCHED in environment
        seen.append((json.loads(line[3])["asked"], line[4:]))
        return 7

    monkeypatch.setattr(launch, "supervise", record)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return seen


def write(path: Path, values: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return str(path)


# ---- what is read, and what the child is given -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [["--num_processes", "2"], ["--num-processes", "2"], ["--num_processes=2"], ["--num-processes=2"]],
)
def test_every_spelling_launches_and_leaks_nothing(flags: list[str], order: list[Any]):
    before, after = ["sft", *FLAGS, *flags, "--packing"], ["sft", *flags, *FLAGS, "--packing"]
    for line in (before, after):
        assert main(line) == 7
        asked, child = order.pop()
        assert asked == {"num_processes": 2, "accelerate_config": None}
        assert child == ["sft", *FLAGS, "--packing"]


def test_the_command_line_beats_the_file(tmp_path: Path, order: list[Any]):
    file = write(tmp_path / "run.yaml", {"num-processes": 8, "accelerate_config": "zero3", "max_steps": 1})
    assert main(["sft", *FLAGS, "--config", file]) == 7
    assert main(["sft", *FLAGS, "--config", file, "--num-processes=2", "--accelerate-config", "cpu"]) == 7
    (from_file, child), (both, same) = order
    assert (from_file["num_processes"], Path(from_file["accelerate_config"]).stem) == (8, "zero3")
    assert (both["num_processes"], Path(both["accelerate_config"]).stem) == (2, "cpu")
    assert child == same == ["sft", *FLAGS, "--config", file]


def test_all_options_reach_the_launcher(order: list[Any]):
    many = {"num_processes": 4, "num_machines": 2, "machine_rank": 1, "main_process_port": 1234}
    many |= {"main_process_ip": "10.0.0.1", "gpu_ids": "0,1", "num_cpu_threads_per_process": 3}
    assert {*many, "accelerate_config"} == set(launch.OPTIONS)
    assert main(["sft", *FLAGS, *(text for k, v in many.items() for text in (f"--{k}", str(v)))]) == 7
    ((asked, child),) = order
    assert asked == many | {"accelerate_config": None} and child == ["sft", *FLAGS]
    multi_gpu = agent.choose_config(asked, 8)
    parsed = parse_for_accelerate(agent.accelerate_args(asked, launch.read_config(multi_gpu), multi_gpu, 8))
    assert {name: getattr(parsed, name) for name in many} == many


def test_without_an_option_nothing_is_launched(order: list[Any], capsys: pytest.CaptureFixture[str]):
    assert main(["sft", *FLAGS, "--num_processes", "none"]) == 2  # the data is missing: it ran here
    assert not order and "d.jsonl" in capsys.readouterr().err


def test_mistakes_are_found_before_the_launch(order: list[Any], capsys: pytest.CaptureFixture[str]):
    for line, message in (
        (["--num_processes", "2", "--learning_rat", "1"], "unknown flag --learning_rat"),
        (["--num_processes", "2", "--lora_r", "1"], "`lora_r` is set but `use_peft` is not"),
        (["--num_processes", "two"], "expected a whole number"),
        (["--num_processes", "0"], "`num_processes` is 0"),
        (["--num_processes", "2", "--accelerate_config", "single"], "this `accelerate_config` is for one process"),
        (["--num_processes", "3", "--num_machines", "2", "--machine_rank", "0"], "a multiple"),
        (["--num_machines", "2", "--machine_rank", "2"], "`machine_rank` is 2; expected 0 to 1"),
        (["--num_machines", "2", "--machine_rank", "0"], "set `main_process_ip`"),
        (["--multi_gpu"], "write --accelerate_config multi_gpu"),
        (["--config_file", "x.yaml"], "write --accelerate_config FILE"),
        (["--accelerate_config", "fspd2"], "Did you mean 'fsdp2'?"),
        (["--accelerate_config", "none/such.yaml"], "there is no such file"),
        (["--mixed_precision", "bf16", "--bf16"], "`mixed_precision` ('bf16') and `bf16` (True) are both set"),
    ):
        assert main(["sft", *FLAGS, *line]) == 2
        assert message in capsys.readouterr().err
    assert not order


def test_unknown_name_lists_the_shipped_ones():
    with pytest.raises(ConfigError, match=", ".join(NAMES)):
        launch.find_config("nothing")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "not valid YAML"),
        ("num_processes: 2", "`distributed_type` is missing"),
        ("distributed_type: 'NO'\ndynamo_config: {dynamo_backend: INDUCTOR}", "set `torch_compile`"),
        ("distributed_type: TPU", "`distributed_type` is 'TPU'"),
        ("distributed_type: 'NO'\ncompute_environment: AMAZON_SAGEMAKER", "only LOCAL_MACHINE"),
    ],
)
def test_broken_file_is_one_error(tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "acc.yaml"
    file.write_text(text, encoding="utf-8")
    assert main(["sft", *FLAGS, "--accelerate_config", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and "acc.yaml" in line


def test_under_a_launcher_flags_are_refused_and_keys_passed_over(
    tmp_path: Path, order: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert main(["sft", *FLAGS, "--num_processes", "2"]) == 2
    assert "a launcher has already started this process (RANK=0, WORLD_SIZE=2)" in capsys.readouterr().err
    file = write(tmp_path / "run.yaml", {"num_processes": 8})
    without_data = ["sft", "--model_name_or_path", "m", "--config", file]
    assert main(without_data) == 2
    captured = capsys.readouterr()
    assert "num_processes: not read" in captured.out and "no data" in captured.err
    monkeypatch.setenv(launch.LAUNCHED, "cpu")  # our own launcher read it
    assert main(without_data) == 2
    assert "not read" not in capsys.readouterr().out
    monkeypatch.delenv("RANK"), monkeypatch.delenv("WORLD_SIZE")  # as a single process it started
    assert main(without_data) == 2
    assert not order


@pytest.mark.parametrize(("word", "bf16", "fp16"), [("bf16", True, False), ("fp16", False, True), ("no", False, False)])
def test_mixed_precision_is_bf16_and_fp16(word: str, bf16: bool, fp16: bool):
    config: dict[str, Any] = {}
    launch.choose_precision({"mixed_precision": word}, config)
    assert config == {"bf16": bf16, "fp16": fp16}


@pytest.mark.parametrize("stale", [False, True])
def test_parent_is_light(stale: bool):
    # With a schema of another transformers the fields could only be read with torch: the processes check them then.
    code = (
        "import sys, posttrain.cli.main; from posttrain.cli import launch; from posttrain.cli.main import main\n"
        f"posttrain.cli.main.is_stale = lambda: {stale}\n"
        "launch.supervise = lambda line, environment: 0\n"
        f"assert main({['sft', *FLAGS, '--num_processes', '2', '--accelerate_config', 'zero3']!r}) == 0\n"
        "heavy = [n for n in ('torch', 'transformers', 'accelerate', 'datasets', 'peft') if n in sys.modules]\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- what accelerate is told -----------------------------------------------------------------------------------------


def parse_for_accelerate(flags: list[str]) -> Any:
    return launch_command_parser().parse_args([*flags, "-m", "posttrain.cli", "sft"])


def test_shipped_configs_are_what_accelerate_reads():
    assert sorted(file.stem for file in launch.FOLDER.glob("*.yaml")) == NAMES
    kinds = {}
    for name in NAMES:
        path = launch.find_config(name)
        launch.read_config(path)
        config = ClusterConfig.from_yaml_file(str(path))
        kinds[name] = config.distributed_type.value
        # The number of processes is the launcher's to say.
        assert config.num_processes == (1 if name == "single" else -1)
        assert config.mixed_precision is None
        stage = config.deepspeed_config.get("zero_stage")
        assert stage == (int(name[-1]) if name.startswith("zero") else None)
    assert kinds.pop("fsdp2") == "FSDP" and kinds.pop("multi_gpu") == "MULTI_GPU" and kinds.pop("single") == "NO"
    assert kinds.pop("cpu") == "MULTI_CPU" and set(kinds.values()) == {"DEEPSPEED"}


@pytest.mark.parametrize(
    ("name", "asked", "devices", "wanted"),
    [
        ("multi_gpu", {}, 8, {"num_processes": 8, "num_machines": 1, "main_process_port": 0, "multi_gpu": False}),
        ("multi_gpu", {"num_processes": 2}, 8, {"num_processes": 2}),
        ("fsdp2", {"num_machines": 2, "machine_rank": 1}, 8, {"num_processes": 16, "main_process_port": None}),
        ("zero3", {"gpu_ids": "1,3"}, 8, {"num_processes": 2, "gpu_ids": "1,3"}),
        ("cpu", {}, 8, {"num_processes": 1, "multi_gpu": False}),
        ("cpu", {"num_processes": 2}, 0, {"num_processes": 2, "multi_gpu": True}),
        ("single", {}, 8, {"num_processes": 1}),
        ("multi_gpu", {"main_process_port": 1234}, 1, {"num_processes": 1, "main_process_port": 1234}),
    ],
)
def test_number_of_processes(name: str, asked: dict[str, Any], devices: int, wanted: dict[str, Any]):
    path = launch.find_config(name)
    parsed = parse_for_accelerate(agent.accelerate_args(asked, launch.read_config(path), path, devices))
    assert {key: getattr(parsed, key) for key in wanted} == wanted


def test_a_file_counts_unless_asked_otherwise(tmp_path: Path):
    path = Path(write(tmp_path / "acc.yaml", {"distributed_type": "MULTI_GPU", "num_processes": 4}))
    config = launch.read_config(path)
    assert parse_for_accelerate(agent.accelerate_args({}, config, path, 8)).num_processes == 4
    assert parse_for_accelerate(agent.accelerate_args({"num_processes": 2}, config, path, 8)).num_processes == 2


def test_the_machine_chooses_where_nobody_does():
    cases = (({}, 4, "multi_gpu"), ({}, 0, "cpu"), ({}, 1, "single"), ({"gpu_ids": "2"}, 4, "single"))
    cases += (
        ({"num_processes": 1}, 4, "single"),
        ({"num_processes": 2}, 4, "multi_gpu"),
        ({"gpu_ids": "2,3"}, 4, "multi_gpu"),
    )
    cases += (({"num_processes": 1}, 0, "cpu"), ({"num_machines": 2}, 1, "multi_gpu"))
    for asked, devices, name in cases:
        assert agent.choose_config(asked, devices).stem == name


def test_several_gpus_and_one_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for name in ("WORLD_SIZE", launch.LAUNCHED):
        monkeypatch.delenv(name, raising=False)
    suggest_launch("sft", 8)
    assert "8 GPUs are visible and one is used. For all of them: posttrain sft … --num_processes 8" in (
        capsys.readouterr().out
    )
    suggest_launch("sft", 1)
    monkeypatch.setenv(launch.LAUNCHED, "multi_gpu")
    suggest_launch("sft", 8)
    assert capsys.readouterr().out == ""


# ---- processes -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A command line that trains a tiny model on eight rows."""
    folder = tmp_path_factory.mktemp("launch")
    tiny_model(eos_token_id=257).save_pretrained(folder / "model")
    byte_tokenizer(template=CHATML).save_pretrained(folder / "model")
    rows = [{"prompt": f"say {i}", "completion": f" {i * 7} times"} for i in range(8)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    file = write(
        folder / "run.yaml",
        {
            "model_name_or_path": str(folder / "model"),
            "dataset_name": str(folder / "rows.jsonl"),
            "max_steps": 2,
            "optim": "sgd",
            "learning_rate": 0.5,
            "bf16": False,
            "report_to": "none",
            "save_strategy": "no",
            "num_processes": 7,
            "env": {"GLOO_SOCKET_IFNAME": "lo"},
        },
    )
    return ["sft", "--config", file]


def start(*line: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, "-m", "posttrain.cli.main", *line]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize(
    "name", ["cpu", *(pytest.param(n, marks=pytest.mark.slow) for n in ("fsdp2", "zero2", "zero3"))]
)
def test_two_processes_end_where_one_does(name: str, run: list[str], tmp_path: Path):
    two = start(
        *run, "--accelerate_config", name, "--num_processes", "2", "--per_device_train_batch_size", "2",
        "--output_dir", str(tmp_path / "two"),
    )  # fmt: skip
    out, err = two.communicate(timeout=120)
    assert two.returncode == 0, err
    assert out.count("saved to") == 1 and "step 2/2" not in err
    one = start(
        *run, "--accelerate_config", "single", "--num_processes", "1", "--per_device_train_batch_size", "4",
        "--output_dir", str(tmp_path / "one"),
    )  # fmt: skip
    assert one.wait(timeout=120) == 0
    first, second = (load_file(tmp_path / folder / "model.safetensors") for folder in ("one", "two"))
    moved = dict(tiny_model(eos_token_id=257).named_parameters())
    for weight, value in first.items():
        torch.testing.assert_close(second[weight], value, rtol=1e-5, atol=1e-6)
        assert not torch.equal(value, moved[weight])


def alive(marker: str) -> list[int]:
    """Processes whose command line holds the text."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                text = (entry / "cmdline").read_bytes().decode(errors="replace")
                dead = "\nState:\tZ" in (entry / "status").read_text()
            except OSError:
                continue
            if marker in text and not dead:
                found.append(int(entry.name))
    return found


def wait_until(condition: Any, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("number", "whom", "code"),
    [
        (signal.SIGKILL, "us", -9),
        (signal.SIGKILL, "launcher", 128 + 9),
        (signal.SIGTERM, "us", 128 + 15),
        (signal.SIGINT, "us", 128 + 2),
        (signal.SIGUSR1, "us", 128 + 10),
    ],
)
def test_nothing_is_left_behind(number: int, whom: str, code: int, run: list[str], tmp_path: Path):
    out = str(tmp_path / "out")
    line = [*run, "--accelerate_config", "cpu", "--num_processes", "2", "--output_dir", out]
    parent = start(*line, "--max_steps", "1000000", "--logging_steps", "1")
    try:
        assert parent.stdout is not None
        assert any("step 1/" in text for text in parent.stdout)
        assert len(alive(out)) == 4  # us, the launcher, two ranks
        launcher = [pid for pid in alive(out) if b"posttrain.cli.agent" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(parent.pid if whom == "us" else launcher[0], number)
        assert wait_until(lambda: not alive(out))
        parent.communicate(timeout=60)
        assert parent.returncode == code
        if number != signal.SIGKILL:  # saved once, and whole
            (saved,) = Path(out).glob("checkpoint-*")
            assert is_complete(saved)
    finally:
        for pid in alive(out):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_exit_code_and_error_of_a_rank_come_through(run: list[str], tmp_path: Path):
    line = [*run, "--accelerate_config", "cpu", "--num_processes", "2", "--output_dir", str(tmp_path)]
    done = start(*line, "--dataset_name", str(tmp_path / "none.jsonl"))
    _, err = done.communicate(timeout=120)
    assert done.returncode == 2 and "none.jsonl" in err and "Traceback" not in err


SUPERVISE = "import sys; from posttrain.cli.launch import supervise; sys.exit(supervise(sys.argv[1:], {}))"


@pytest.mark.parametrize(
    ("child", "code"),
    [("import sys; sys.exit(5)", 5), ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137)],
)
def test_exit_code_is_the_childs(child: str, code: int):
    done = subprocess.run([sys.executable, "-c", SUPERVISE, sys.executable, "-c", child])
    assert done.returncode == code


@pytest.mark.parametrize(
    ("signals", "code"), [([signal.SIGTERM], 3), ([signal.SIGINT], 3), ([signal.SIGTERM] * 2, 137)]
)
def test_signals_are_passed_on_and_the_second_kills(signals: list[int], code: int):
    stubborn = "slow" if len(signals) > 1 else "quick"
    child = (
        "import os, signal, sys, time\n"
        "def end(number, frame):\n"
        "    os.write(1, b'asked\\n')\n"  # print is not re-entrant
        f"    if {stubborn!r} == 'quick': sys.exit(3)\n"
        "for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, end)\n"
        "os.write(1, b'ready\\n')\n"
        "while True: time.sleep(0.05)"
    )
    line = [sys.executable, "-c", SUPERVISE, sys.executable, "-c", child]
    parent = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    for number in signals:
        assert parent.stdout.readline().strip() in ("ready", "asked")
        parent.send_signal(number)
    assert parent.wait(timeout=20) == code


def test_how_a_rank_ended(capsys: pytest.CaptureFixture[str]):
    assert (agent._ended(2, "rank 1"), agent._ended(-9, "rank 1"), agent._ended(-15, "rank 1")) == (2, 137, 143)
    (line,) = capsys.readouterr().err.splitlines()
    assert "rank 1 was ended by SIGKILL; the system may have run out of memory" in line
