"""A command line, a file and their precedence; and the schema the command line reads instead of the classes."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest

from posttrain.cli import schema
from posttrain.cli.coerce import coerce, parse_yaml
from posttrain.cli.commands import COMMANDS
from posttrain.cli.parse import TrlParser, parse
from posttrain.cli.schema import Option, describe
from posttrain.data.config import DatasetConfig, DatasetMixtureConfig
from posttrain.errors import ConfigError


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Base:
    """Parent."""

    rate: float = 1e-3
    """Rate of the parent."""
    colour: Union[Color, str] = "red"  # noqa: UP007
    """A colour."""


@dataclass
class Args(Base):
    """Child."""

    name: str = field(metadata={"help": "From the metadata."}, default="x")
    rate: float = 2e-5
    """Rate of
    the child."""
    length: Optional[int] = 1024  # noqa: UP045
    flag: bool = False
    keep: bool = True
    maybe: Optional[bool] = None  # noqa: UP045
    mode: Literal["a", "b"] = "a"
    names: Optional[list[str]] = None  # noqa: UP045
    sizes: list[int] = field(default_factory=list)
    word_or_list: Union[str, list[str]] = "none"  # noqa: UP007
    extra: Optional[dict[str, Any]] = None  # noqa: UP045
    strategy: Literal["no", "steps"] = "no"


@dataclass
class Needs:
    path: str
    """Where."""


def one(*args: str) -> Args:
    return TrlParser(Args).parse_args_and_config(list(args))[0]


def write(tmp_path: Path, text: str) -> str:
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return str(file)


# The schema


@pytest.fixture(scope="module")
def rendered() -> str:
    return schema.render()


def test_file_is_what_the_live_classes_say(rendered: str):
    live, kept = json.loads(rendered), json.loads(schema.FILE.read_text(encoding="utf-8"))
    if schema.is_stale():
        # Another transformers has other fields; ours must still agree.
        def ours(commands: dict[str, Any]) -> list[Any]:
            groups = [g for name in COMMANDS for g in commands[name].values()]
            return [item for group in groups for item in group if item["group"] != "TrainingArguments"]

        assert ours(live) == ours(kept)
    else:
        assert rendered == schema.FILE.read_text(encoding="utf-8"), "run: python -m posttrain.cli.schema"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_field_has_help(command: str):
    items = [item for items in schema.stored(command).values() for item in items]
    assert [item.name for item in items if not item.help] == []


def test_describe_reads_types_defaults_help_and_owner():
    options = {option.name: option for option in describe(Args)}
    assert options["rate"] == Option("rate", "float", 2e-5, group="Args", help="Rate of the child.")
    assert options["colour"] == Option("colour", "str", "red", group="Base", help="A colour.", choices=("red", "blue"))
    assert options["name"].help == "From the metadata."
    assert options["length"].type == "int | none"
    assert options["names"].type == "list[str] | none"
    assert options["sizes"].default == []
    assert options["mode"].choices == ("a", "b")
    assert describe(Needs)[0].required
    sources = describe(DatasetMixtureConfig)[0]
    assert sources.type == "list[mapping]" and [o.name for o in sources.fields][:2] == ["path", "name"]


def test_option_survives_json():
    for option in describe(DatasetMixtureConfig):
        assert Option.from_json(json.loads(json.dumps(option.to_json()))) == option


# The command line


@pytest.mark.parametrize(
    ("tokens", "name", "value"),
    [
        (["--rate", "2e-5"], "rate", 2e-5),
        (["--rate=-1"], "rate", -1.0),
        (["--length", "-1"], "length", -1),
        (["--length", "1e3"], "length", 1000),
        (["--length", "none"], "length", None),
        (["--flag"], "flag", True),
        (["--flag", "false"], "flag", False),
        (["--flag=True"], "flag", True),
        (["--no-keep"], "keep", False),
        (["--no_keep"], "keep", False),
        (["--maybe", "none"], "maybe", None),
        (["--no-maybe"], "maybe", False),
        (["--names", "a", "b"], "names", ["a", "b"]),
        (["--names", "a", "--names", "b", "c"], "names", ["a", "b", "c"]),
        (["--names", '["a", "b"]'], "names", ["a", "b"]),
        (["--names", "[a, b]"], "names", ["a", "b"]),
        (["--names", "[qv]_proj"], "names", ["[qv]_proj"]),
        (["--names", "none"], "names", None),
        (["--sizes", "1", "2"], "sizes", [1, 2]),
        (["--word-or-list", "a"], "word_or_list", "a"),
        (["--word_or_list", "a", "b"], "word_or_list", ["a", "b"]),
        (["--word_or_list", "none"], "word_or_list", "none"),
        (["--extra", '{"a": 1, "b": 2e-5}'], "extra", {"a": 1, "b": 2e-5}),
        (["--extra", "{a: true}"], "extra", {"a": True}),
        (["--mode", "b"], "mode", "b"),
        (["--colour", "blue"], "colour", "blue"),
        (["--name", "none"], "name", "none"),
        (["--name", "7"], "name", "7"),
        (["--rate", "1", "--rate", "2"], "rate", 2.0),
    ],
)
def test_flag(tokens: list[str], name: str, value: Any):
    found = getattr(one(*tokens), name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--rate", "fast"], r"`--rate` is 'fast'; expected a number\."),
        (["--rate", "nan"], "expected a number"),
        (["--length", "1.5"], "expected a whole number or none"),
        (["--length", "1e999"], "expected a whole number"),
        (["--flag", "perhaps"], "`--flag` is 'perhaps'; expected true or false"),
        (["--mode", "c"], "expected one of a, b"),
        (["--colour", "rod"], "expected one of red, blue.*Did you mean 'red'"),
        (["--extra", "a"], "`--extra` is 'a'; expected a mapping"),
        (["--extra", "{a: "], "not valid YAML"),
        (["--sizes", "1", "x"], "expected a list"),
        (["--rate"], "--rate needs a value"),
        (["--names"], "--names needs one or more values"),
        (["--rate", "1", "2"], "'2' follows --rate 1"),
        (["--rate=1", "2"], "'2' follows"),
        (["--no-keep", "true"], "--no-keep takes no value"),
        (["--ratee", "1"], "unknown flag --ratee. Did you mean '--rate'"),
        (["--no-fla"], "unknown flag --no-fla. Did you mean '--flag'"),
        (["--zzzzzz"], r"unknown flag --zzzzzz\.$"),
        (["word"], "unexpected argument 'word'"),
        (["-r", "1"], "unexpected argument '-r'"),
        (["--config"], "--config needs"),
        (["--config", "a", "--config", "b"], "given twice"),
        (["--config", "/no/such.yaml"], "cannot be read"),
    ],
)
def test_refused(tokens: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        one(*tokens)


def test_required_field():
    parser = TrlParser((Needs, Base))
    with pytest.raises(ConfigError, match="`path` is required"):
        parser.parse_args_and_config([])
    assert parser.parse_args_and_config(["--path", "p"])[0] == Needs("p")


def test_help_prints_and_exits(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        one("--rate", "1", "-h")
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "--rate" in out and "Rate of the child." in out and out.index("--flag") < out.index("--colour")


# The file


def test_file_values_go_through_the_type_of_the_field(tmp_path: Path):
    file = write(
        tmp_path,
        "rate: 2e-5\nlength: null\nflag: yes\nkeep: off\nstrategy: no\nnames: [a, b]\n"
        "extra: {lr: 1e-4, deep: {x: true}}\nname: 007\nword-or-list: a\n",
    )
    args = one("--config", file)
    assert args.rate == 2e-5 and args.length is None and args.flag is True and args.keep is False
    assert args.strategy == "no" and args.names == ["a", "b"] and args.name == "007" and args.word_or_list == "a"
    assert args.extra == {"lr": 1e-4, "deep": {"x": True}}


def test_quoted_numbers_are_numbers(tmp_path: Path):
    assert one("--config", write(tmp_path, "rate: '2e-5'\nlength: \"12\"")).length == 12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ratee: 1", "run.yaml: unknown key 'ratee'. Did you mean 'rate'"),
        ("rate: fast", "run.yaml: `rate` is 'fast'; expected a number"),
        ("name: 1e10", "Put quotes around it"),
        ("rate: null", "`rate` is None; expected a number"),
        ("- a", "expected a mapping from field names"),
        ("rate: [1", "not valid YAML"),
        ("rate: 1\nrate: 2", "comes twice"),
        ("env: 3", "`env` is 3; expected a mapping"),
        ("env: {A: [1]}", "`env.A` is"),
    ],
)
def test_file_refused(tmp_path: Path, text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        one("--config", write(tmp_path, text))


def test_empty_file_gives_defaults(tmp_path: Path):
    assert one("--config", write(tmp_path, "# nothing\n")) == Args()


def test_env_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("POSTTRAIN_TEST_A", "before")
    monkeypatch.setenv("POSTTRAIN_TEST_B", "before")
    one("--config", write(tmp_path, "env: {POSTTRAIN_TEST_A: 1, POSTTRAIN_TEST_B: false}"))
    assert (os.environ["POSTTRAIN_TEST_A"], os.environ["POSTTRAIN_TEST_B"]) == ("1", "false")


def test_required_field_may_come_from_the_file(tmp_path: Path):
    assert TrlParser(Needs).parse_args_and_config(["--config", write(tmp_path, "path: p")]) == (Needs("p"),)


def test_nested_sources_become_dataclasses(tmp_path: Path):
    text = "datasets:\n- path: a.jsonl\n- {path: b, fraction: 5e-1, data_files: {train: x.json}, columns: [text]}\n"
    (mixture,) = TrlParser(DatasetMixtureConfig).parse_args_and_config(["--config", write(tmp_path, text)])
    second = DatasetConfig("b", fraction=0.5, data_files={"train": "x.json"}, columns=["text"])
    assert mixture.datasets == [DatasetConfig("a.jsonl"), second]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("datasets: [{pth: a}]", r"`datasets`\[0\] has an unknown key 'pth'. Did you mean 'path'"),
        ("datasets: [{name: a}]", r"`datasets`\[0\] lacks `path`"),
        ("datasets: [{path: a, fraction: half}]", r"fraction.* is 'half'; expected a number"),
        ("datasets: [a.jsonl]", "expected a list"),
    ],
)
def test_nested_sources_refused(tmp_path: Path, text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        TrlParser(DatasetMixtureConfig).parse_args_and_config(["--config", write(tmp_path, text)])


# Precedence


def test_command_line_wins_also_with_the_default(tmp_path: Path):
    file = write(tmp_path, "gradient_accumulation_steps: 4\noutput_dir: from_file\npacking: true\n")
    given = parse(["--config", file, "--gradient_accumulation_steps", "1"], schema.stored("sft"))["SFTConfig"]
    assert given == {"gradient_accumulation_steps": 1, "output_dir": "from_file", "packing": True}
    # The order of the tokens does not matter.
    again = parse(["--gradient-accumulation-steps=1", "--no-packing", "--config", file], schema.stored("sft"))
    assert again["SFTConfig"] == {**given, "packing": False}


def test_command_line_wins_under_the_other_name_of_a_setting(tmp_path: Path):
    file = write(tmp_path, "activation_checkpointing: true")
    given = parse(["--config", file, "--no-gradient_checkpointing"], schema.stored("sft"))["SFTConfig"]
    assert given == {"gradient_checkpointing": False}


def test_sft_fields_that_are_easy_to_get_wrong():
    tokens = ["--report_to", "none", "--eval_strategy", "no", "--fsdp", "--debug", "a", "--optim", "sgd"]
    tokens += ["--resume_from_checkpoint", "true", "--deepspeed", "ds.json", "--lr_scheduler_kwargs", '{"a": 1}']
    tokens += ["--include_num_input_tokens_seen", "no", "--trackio_static_space_id", "false", "--max_length", "none"]
    given = parse(tokens, schema.stored("sft"))["SFTConfig"]
    assert given == {
        "report_to": "none",
        "eval_strategy": "no",
        "fsdp": True,
        "debug": "a",
        "optim": "sgd",
        "resume_from_checkpoint": "true",
        "deepspeed": "ds.json",
        "lr_scheduler_kwargs": {"a": 1},
        "include_num_input_tokens_seen": "no",
        "trackio_static_space_id": False,
        "max_length": None,
    }
    with pytest.raises(ConfigError, match="expected a mapping"):
        parse(["--model_init_kwargs", "bf16"], schema.stored("sft"))


# TrlParser


def test_remaining_strings(tmp_path: Path):
    parser, file = TrlParser(Args), write(tmp_path, "rate: 1\nother: 3\n")
    tokens = ["--config", file, "--flag", "--foo", "a", "b", "--bar=1"]
    unknown, of_file = ["--foo", "a", "b", "--bar", "1"], ["--other", "3"]
    args, rest = parser.parse_args_and_config(tokens, return_remaining_strings=True)
    assert args == Args(rate=1.0, flag=True) and rest == of_file + unknown
    args, *both = parser.parse_args_and_config(tokens, return_remaining_strings=True, separate_remaining_strings=True)
    assert both == [of_file, unknown]
    with pytest.raises(ConfigError, match="unknown key 'other'"):
        parser.parse_args_and_config(["--config", file])
    assert parser.parse_args_and_config(["--config", file], fail_with_unknown_args=False)[0].rate == 1.0


def test_defaults_are_below_the_file_and_the_command_line(tmp_path: Path):
    parser = TrlParser((Args, Needs))
    left = parser.set_defaults_with_config(path="from defaults", rate="1e-3", length=7, nobody=1)
    assert left == ["--nobody", "1"]
    file = write(tmp_path, "length: 8\nrate: 0.5")
    args, needs = parser.parse_args_and_config(["--config", file, "--rate", "2"])
    assert (args.rate, args.length, needs.path) == (2.0, 8, "from defaults")
    assert parser.parse_args_into_dataclasses([])[0].length == 7


def test_what_the_parser_cannot_do_is_named():
    with pytest.raises(ConfigError, match="add_subparsers"):
        TrlParser(Args).add_subparsers(dest="command")
    with pytest.raises(ConfigError, match="'--mine'"):
        TrlParser(Args).add_argument("--mine", type=int)
    with pytest.raises(ConfigError, match=r"`args_filename` is 'x.args'"):
        TrlParser(Args).parse_args_into_dataclasses([], args_filename="x.args")
    assert TrlParser().parse_args_and_config([]) == ()


def test_the_head_of_a_script_for_trl(tmp_path: Path):
    from posttrain import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig

    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig))
    file = write(tmp_path, f"model_name_or_path: m\noutput_dir: {tmp_path}\ndatasets:\n- path: a.jsonl\nmine: 1")
    line = ["--config", file, "--dataset_name", "d", "--use_peft", "--max_length", "64"]
    script, training, model, mixture, rest = parser.parse_args_and_config(line, return_remaining_strings=True)
    assert (script.dataset_name, training.max_length, model.use_peft) == ("d", 64, True)
    assert mixture.datasets[0].path == "a.jsonl" and rest == ["--mine", "1"]


def test_parse_dict_and_files(tmp_path: Path):
    parser = TrlParser([Args, Needs])
    assert parser.parse_dict({"path": "p", "rate": "1e-3"}) == (Args(rate=1e-3), Needs("p"))
    with pytest.raises(ConfigError, match="unknown key 'x'"):
        parser.parse_dict({"path": "p", "x": 1})
    assert parser.parse_dict({"path": "p", "x": 1}, allow_extra_keys=True)[1] == Needs("p")
    assert parser.parse_yaml_file(write(tmp_path, "path: p"))[1] == Needs("p")
    assert parser.parse_args_into_dataclasses(["--path", "p"])[1] == Needs("p")


def test_same_field_twice_is_refused():
    with pytest.raises(ConfigError, match="name is taken"):
        TrlParser((Base, Args))


def test_what_the_dataclass_refuses_is_a_config_error():
    @dataclass
    class Picky:
        n: int = 1

        def __post_init__(self) -> None:
            if self.n > 1:
                raise ValueError("too many")

    with pytest.raises(ConfigError, match="Picky: too many"):
        TrlParser(Picky).parse_args_and_config(["--n", "2"])


def test_sft_config_is_built_from_a_file(tmp_path: Path):
    from posttrain.model.config import ModelConfig
    from posttrain.trainer.sft import SFTConfig

    text = f"learning_rate: 3e-4\noutput_dir: {tmp_path}\nmodel_init_kwargs: {{a: 1e-5}}\ngradient_checkpointing: no\n"
    parser = TrlParser((ModelConfig, SFTConfig))
    model, args = parser.parse_args_and_config(["--config", write(tmp_path, text), "--lora_r", "4"])
    assert model.lora_r == 4 and args.learning_rate == 3e-4 and args.model_init_kwargs == {"a": 1e-5}
    assert args.activation_checkpointing is False


def test_yaml_scalars():
    text = "a: 2e-5\nb: no\nc: 007\nd: 1.\ne:\nf: 12:30\ng: 2020-01-01\nh: true\ni: -3\nj: 'null'\nk: .5\nl: 1_000"
    assert parse_yaml(text, "x") == {
        "a": 2e-5,
        "b": "no",
        "c": "007",
        "d": 1.0,
        "e": None,
        "f": "12:30",
        "g": "2020-01-01",
        "h": True,
        "i": -3,
        "j": "null",
        "k": 0.5,
        "l": "1_000",
    }
    assert parse_yaml("a: &x {q: 1}\nb: {<<: *x, r: 2}", "x")["b"] == {"q": 1, "r": 2}


def test_large_whole_numbers_keep_every_digit():
    assert coerce(Option("seed", "int"), str(2**63 - 1), "seed") == 2**63 - 1
