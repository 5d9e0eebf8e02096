"""The docs say what the code does: links resolve, code runs, commands and names exist, generated parts are current.

    POSTTRAIN_UPDATE_DOCS=1 pytest tests/test_docs.py

writes the line numbers of links into the code, and the table of fields in docs/sft.md.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from data_fixtures import CHATML, byte_tokenizer
from tiny import tiny_model, token_rows

from posttrain.cli.commands import COMMANDS
from posttrain.cli.origins import take_switches
from posttrain.cli.parse import index, parse, read_command_line, refuse_unknown
from posttrain.cli.schema import Option, stored

ROOT = Path(__file__).parent.parent
NAMES = ("quickstart", "sft", "models", "loop", "design", "extending", "adapters", "distributed", "migrating")
NAMES += (
    "dpo",
    "kto",
    "reward",
    "prm",
    "performance",
    "data",
    "templates",
    "inspect",
    "runs",
    "troubleshooting",
    "report",
    "command-line",
    "losses",
    "papers",
)
PAGES = ["README.md", *(f"docs/{name}.md" for name in NAMES)]
UPDATE_FLAG = "POSTTRAIN_UPDATE_DOCS"
UPDATE = os.environ.get(UPDATE_FLAG, "0") not in ("", "0")
HUB_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
# What docs/migrating.md says we do not have.
NAMES_OF_TRL = ("dataset_batch_size", "num_of_sequences", "setup_chat_format")
GROUPS = {
    "SFTConfig": "Fields of `SFTConfig`",
    "BaseConfig": "Fields shared by all trainers",
    "TrainingArguments": "Fields of `transformers.TrainingArguments`",
}
FENCE = re.compile(r"^(?:<!-- test: (\w+) -->\n)?```(\w*)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
CODE_LINK = re.compile(r"\[`(\w+)`\]\(([^)\s#]+\.py)#L(\d+)\)")
FIELDS = re.compile(r"(?<=<!-- fields -->\n).*?(?=<!-- /fields -->)", re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    mark: str  # what `<!-- test: … -->` before it says
    language: str
    code: str


@cache
def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(language: str, mark: str | None = None) -> list[Block]:
    found = [Block(page, m[1] or "", m[2], m[3]) for page in PAGES for m in FENCE.finditer(read(page))]
    return [b for b in found if b.language == language and mark in (None, b.mark)]


def only(mark: str) -> str:
    (block,) = blocks("python", mark)
    return block.code


def identify(block: Block) -> str:
    return f"{block.page}-{block.mark or 'compile'}"


# ---- links -----------------------------------------------------------------------------------------------------------


def links(page: str) -> Iterator[tuple[str, Path, str]]:
    """(text, file, anchor) of every relative link of a page."""
    for text, target in LINK.findall(FENCE.sub("", read(page))):
        if not target.startswith(("https://", "http://", "mailto:")):
            path, _, anchor = target.partition("#")
            yield text, ((ROOT / page).parent / path).resolve() if path else ROOT / page, anchor


def anchors(path: Path) -> set[str]:
    """What GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def definition(path: Path, name: str) -> int:
    """Line on which a file defines a name."""
    pattern = re.compile(rf"\s*(?:(?:def|class) {name}\b|{name}\b[^=]*=)")
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if pattern.match(line):
            return number
    raise AssertionError(f"{path} does not define {name!r}")


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_resolve(page: str):
    for text, path, anchor in links(page):
        assert path.exists(), f"[{text}] leads to {path}"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"[{text}] leads to #{anchor} of {path}"


@pytest.mark.parametrize("page", PAGES)
def test_links_into_the_code_name_a_definition(page: str):
    for text, _, anchor in ((t, p, a) for t, p, a in links(page) if p.suffix == ".py"):
        assert not anchor or re.fullmatch(r"`\w+`", text), f"[{text}] must be a name in backticks to have a line number"


def test_the_training_step_is_two_links_from_the_readme():
    assert any(path == ROOT / "docs/loop.md" for _, path, _ in links("README.md"))
    named = {text for text, path, _ in links("docs/loop.md") if path == ROOT / "posttrain/trainer/engine.py"}
    wanted = {"get_batch_samples", "experience", "unit", "loss_step", "training_step", "compute_loss", "_get_grad_norm"}
    assert {f"`{name}`" for name in wanted} <= named


# ---- generated parts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_generated_parts_are_current(page: str):
    wanted = CODE_LINK.sub(lambda m: numbered(page, m), FIELDS.sub(lambda _: fields_tables(), read(page)))
    if UPDATE and wanted != read(page):
        (ROOT / page).write_text(wanted, encoding="utf-8")
        read.cache_clear()
    assert read(page) == wanted, "run POSTTRAIN_UPDATE_DOCS=1 pytest tests/test_docs.py"


def numbered(page: str, match: re.Match[str]) -> str:
    name, path, _ = match.groups()
    return f"[`{name}`]({path}#L{definition((ROOT / page).parent / path, name)})"


def fields_tables() -> str:
    items = stored("sft")["SFTConfig"]
    assert {item.group for item in items} == set(GROUPS)
    parts = []
    for group, title in GROUPS.items():
        rows = [field_row(item) for item in items if item.group == group]
        parts.append("\n".join([f"### {title}\n", "| field | values | default | |", "|---|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def field_row(item: Option) -> str:
    kinds = item.type.replace(" | ", ", ")
    words = 0 < len(item.choices) <= 8 and all(isinstance(choice, str) for choice in item.choices)
    values = ", ".join(f"`{choice}`" for choice in item.choices) if words else kinds
    default = "" if item.default is None else f"`{str(item.default).lower() if item.type == 'bool' else item.default}`"
    text = item.help.replace("%%", "%")
    if item.group == "TrainingArguments":
        text = re.split(r"(?<=\w[.!])\s+(?=[A-Z])", text)[0]
    return "| " + " | ".join(x.replace("|", "\\|") for x in (f"`{item.name}`", values, default, text)) + " |"


# ---- commands and names ----------------------------------------------------------------------------------------------


def test_the_readme_shows_the_two_commands():
    for name in ("demo", "test"):
        assert re.search(rf"^make {name}\b", read("README.md"), re.M)
        assert re.search(rf"^{name}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)


def commands() -> list[str]:
    """Every command of the pages that takes fields, as it would be typed."""
    shown = [*blocks(""), *blocks("bash")]
    # A variable of the shell stands for a number.
    codes = (re.sub(r'"?\$\w+"?', "1", b.code.replace("\\\n", " ")) for b in shown)
    lines = [line.replace("bash -c '", "").rstrip("'") for code in codes for line in code.splitlines()]
    return [line for line in lines if re.search(rf"(?:posttrain|posttrain\.cli) (?:{'|'.join(COMMANDS)}) ", line)]


@pytest.mark.parametrize("line", commands())
def test_commands_have_flags_that_exist(line: str):
    tokens = shlex.split(line, comments=True)
    name = next(token for token in tokens if token in COMMANDS)
    known = index(stored(name))
    args, _ = take_switches(tokens[tokens.index(name) + 1 :])
    given = read_command_line(args, known)
    refuse_unknown(given.unknown, known)


@pytest.mark.parametrize("block", blocks("bash"), ids=identify)
def test_shell_scripts_parse(block: Block):
    done = subprocess.run(["bash", "-n"], input=block.code, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", blocks("yaml"), ids=identify)
def test_yaml_has_keys_that_exist(block: Block, tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text(block.code, encoding="utf-8")
    assert parse(["--config", str(file)], stored("sft"))["SFTConfig"]["output_dir"].startswith("runs/")


@cache
def known_words() -> frozenset[str]:
    files = itertools.chain(
        *(ROOT.glob(f"{folder}/**/*.py") for folder in ("posttrain", "tests", "demo")),
        ROOT.glob("posttrain/**/*.yaml"),
        [ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "posttrain/cli/schema.json"],
    )
    mine = Path(__file__)
    words = itertools.chain(*(re.findall(r"\w+", f.read_text(encoding="utf-8")) for f in files if f != mine))
    return frozenset({*words, mine.stem, UPDATE_FLAG, *NAMES_OF_TRL})


@pytest.mark.parametrize("page", PAGES)
def test_names_in_backticks_exist(page: str):
    inline = re.findall(r"`([^`\n]+)`", FENCE.sub("", read(page)))
    names = {name for code in inline for name in re.findall(r"\b_?[A-Za-z0-9]+(?:_[A-Za-z0-9]+)+\b", code)}
    assert sorted(names - known_words()) == []


# ---- code ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", blocks("python"), ids=identify)
def test_python_compiles(block: Block):
    compile(block.code, block.page, "exec")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny chat model, as a folder that loads by its name."""
    folder = str(tmp_path_factory.mktemp("model"))
    tiny_model(eos_token_id=257).save_pretrained(folder)
    byte_tokenizer(template=CHATML).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("block", blocks("python", "run"), ids=identify)
def test_python_runs(block: Block, model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As written, but for the model."""
    assert HUB_MODEL in block.code
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(block.code.replace(HUB_MODEL, model_folder), block.page, "exec"), names)
    assert names["trainer"].state.global_step == 1
    (output,) = (tmp_path / "runs").iterdir()
    assert (output / "model.safetensors").is_file() and (output / "tokenizer.json").is_file()


SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 1,
    "optim": "sgd",
    "learning_rate": 0.5,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
}


@pytest.mark.parametrize("max_grad_norm", [0.1, 1000.0])  # clipped, and not: clipping hides a wrong scale
def test_the_step_of_loop_md_is_the_step_of_the_engine(max_grad_norm: float, tmp_path: Path):
    code = only("loop")
    assert len(code.splitlines()) <= 30
    names: dict[str, Any] = {}
    exec(
        "import torch\nfrom torch.nn.utils import clip_grad_norm_\nfrom posttrain.data.forest import build_forest\n"
        "from posttrain.errors import NonFiniteError\nfrom posttrain.parallel.ranks import all_sum, world_size",
        names,
    )
    exec(code, names)
    from posttrain import SFTConfig, SFTTrainer

    def build() -> Any:
        fields = SETTINGS | {"max_tokens_per_forward": 30, "max_grad_norm": max_grad_norm}
        args = SFTConfig(output_dir=str(tmp_path), **fields)
        return SFTTrainer(
            tiny_model(), args, train_dataset=token_rows(prefix=20), processing_class=byte_tokenizer(template=CHATML)
        )

    engine, page = build(), build()
    engine.train()
    optimizer = torch.optim.SGD(page.model.parameters(), lr=SETTINGS["learning_rate"])
    names["optimizer_step"](page, page.model, optimizer, iter(page.get_train_dataloader()), 2)
    start = dict(tiny_model().named_parameters())
    for (name, got), want in zip(page.model.named_parameters(), engine.model.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        assert not torch.equal(got, start[name])


def test_the_trainer_of_extending_md_trains(tmp_path: Path):
    code = only("trainer")
    assert len(code.splitlines()) <= 60
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(code, names)
    rows = token_rows(4, masked=False, prefix=20)

    def first_loss(**fields: Any) -> float:
        args = names["EvenConfig"](output_dir=str(tmp_path), **(SETTINGS | fields))
        trainer = names["EvenTrainer"](tiny_model(), args, rows, processing_class=byte_tokenizer())
        trainer.train()
        assert trainer.state.log_history[0]["entropy"] > 0
        return trainer.state.log_history[0]["loss"]

    model = tiny_model()
    by_hand = []
    for ids in rows["input_ids"]:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
        by_hand.append(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])).item())
    assert first_loss() == pytest.approx(sum(by_hand) / 4, rel=1e-5)
    assert first_loss(max_tokens_per_forward=30) == pytest.approx(sum(by_hand) / 4, rel=1e-5)


def test_the_checks_see_what_they_look_for():
    assert definition(ROOT / "posttrain/trainer/engine.py", "Engine") > 1
    with pytest.raises(AssertionError, match="no_such_name"):
        definition(ROOT / "posttrain/trainer/engine.py", "no_such_name")
    assert len(commands()) >= 4
    assert "a-measured-run" in anchors(ROOT / "docs/sft.md")
    assert "packing_strategy" in known_words() and "packing_stratgy" not in known_words()
