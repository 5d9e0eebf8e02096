"""The rules of the house that no linter knows: sizes, and which file may do what.

Layers between rooms are in .importlinter.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
FILE_LINES, LEAF_LINES, FUNCTION_LINES = 400, 199, 59

# What is over a cap, with the size it has today: "path" or "path::function". This table may only shrink.
EXCEPTIONS: dict[str, int] = {}

# Only these may switch gradients off or cut them: `experience` runs under no_grad, `loss_step` never does.
GRAD_FILES = {"posttrain/trainer/engine.py", "posttrain/trainer/meter.py"}
# … the engine's own loop over pieces, and checks before the first step.
GRAD_FILES |= {"posttrain/trainer/recovery.py", "posttrain/trainer/selfcheck.py"}
GRAD_FILES |= {"posttrain/trainer/rewards.py"}  # scores rows, and trains nothing
# … and what is found before training: the reference, scored once.
GRAD_FILES |= {"posttrain/trainer/references.py"}
# Packages named in one room only.
ROOM_OF = {"peft": "model", "vllm": "rollout", "deepspeed": "parallel"}
LOSS_MAY_IMPORT = {"torch", "posttrain.types", "posttrain.loss", "posttrain.errors"}


@cache
def sources() -> dict[str, str]:
    files = sorted((ROOT / "posttrain").rglob("*.py"))
    return {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in files}


@cache
def trees() -> dict[str, ast.Module]:
    return {path: ast.parse(text) for path, text in sources().items()}


def is_leaf(path: str) -> bool:
    """A file of trainer/ that defines a trainer on the engine: one method."""
    if not path.startswith("posttrain/trainer/"):
        return False
    classes = (node for node in trees()[path].body if isinstance(node, ast.ClassDef))
    return any(isinstance(base, ast.Name) and base.id == "Engine" for each in classes for base in each.bases)


def room(path: str) -> str:
    parts = path.split("/")
    return parts[1] if len(parts) > 2 else ""


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        name = prefix
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{prefix}.{node.name}" if prefix else node.name
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield name, node
        yield from functions(node, name)


def sizes() -> Iterator[tuple[str, int, int]]:
    """(what, lines, cap) of every file and function."""
    for path, text in sources().items():
        yield path, len(text.splitlines()), LEAF_LINES if is_leaf(path) else FILE_LINES
    for path, tree in trees().items():
        for name, node in functions(tree):
            yield f"{path}::{name}", (node.end_lineno or node.lineno) - node.lineno + 1, FUNCTION_LINES


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module a file imports, anywhere in it: `from a.b import c` gives a.b.c."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif is_call(node, "import_module") and node.args and isinstance(node.args[0], ast.Constant):
            yield str(node.args[0].value)


def is_call(node: ast.AST, name: str) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    return (isinstance(called, ast.Name) and called.id == name) or (
        isinstance(called, ast.Attribute) and called.attr == name
    )


def subclasses_upstream_trainer(tree: ast.AST) -> bool:
    from_transformers = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transformers"
        for alias in node.names
        if alias.name.endswith("Trainer")
    }
    bases = [base for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases]
    return any(ast.unparse(base) in from_transformers | {"transformers.Trainer"} for base in bases)


def cuts_gradients(tree: ast.AST) -> list[int]:
    names = {"no_grad", "inference_mode", "detach", "detach_", "set_grad_enabled"}
    attributes = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in names)
    return sorted(node.lineno for node in attributes)


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def test_sizes_are_under_their_caps():
    over = [f"{what}: {lines} lines, cap {cap}" for what, lines, cap in sizes() if lines > EXCEPTIONS.get(what, cap)]
    assert not over, "split these; do not raise a cap:\n" + "\n".join(over)


def test_exceptions_are_still_needed():
    found = {what: (lines, cap) for what, lines, cap in sizes()}
    stale = [what for what in EXCEPTIONS if what not in found or found[what][0] <= found[what][1]]
    assert not stale, f"no longer over the cap, take out of EXCEPTIONS: {stale}"
    shrunk = [f"{what}: {found[what][0]}" for what, size in EXCEPTIONS.items() if found[what][0] < size]
    assert not shrunk, f"smaller than EXCEPTIONS says, lower the numbers: {shrunk}"


def test_imports_are_absolute():
    # The checks below read module names as they are written.
    nodes = ((path, node) for path, tree in trees().items() for node in ast.walk(tree))
    assert not [(path, node.lineno) for path, node in nodes if isinstance(node, ast.ImportFrom) and node.level]


def test_no_utils_module():
    assert not [path for path in sources() if path.endswith(("/utils.py", "/util.py", "/helpers.py", "/common.py"))]


def test_hasattr_only_in_compat():
    found = [
        f"{path}:{node.lineno}"
        for path, tree in trees().items()
        if path != "posttrain/compat.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and is_call(node, "hasattr")
    ]
    assert not found


def test_only_the_engine_subclasses_the_upstream_trainer():
    found = {path for path, tree in trees().items() if subclasses_upstream_trainer(tree)}
    assert found <= {"posttrain/trainer/engine.py"}


def test_only_the_engine_and_the_meter_cut_gradients_in_trainer():
    found = {
        path: lines
        for path, tree in trees().items()
        if room(path) == "trainer" and path not in GRAD_FILES and (lines := cuts_gradients(tree))
    }
    assert not found


@pytest.mark.parametrize("package", sorted(ROOM_OF))
def test_package_is_imported_in_one_room(package: str):
    rooms = {room(path) for path, tree in trees().items() if any(is_within(name, package) for name in imports(tree))}
    assert rooms <= {ROOM_OF[package]}


def test_what_is_imported_is_declared():
    """A package that another one happens to bring goes away with it. Trackers are the user's own."""
    toml: Any = pytest.importorskip("tomllib")  # of Python 3.11
    project = toml.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [each for name, each in project["optional-dependencies"].items() if name not in ("test", "docs", "bench")]
    declared = {re.split(r"[^\w-]", item)[0] for each in [project["dependencies"], *extras] for item in each}
    nodes = [node for tree in trees().values() for node in ast.walk(tree)]
    found = {alias.name.split(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    found |= {(node.module or "").split(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {{"yaml": "pyyaml"}.get(n, n) for n in found - sys.stdlib_module_names - {"posttrain"}} <= declared


def test_leaf_trainers_do_not_import_each_other():
    leaves = {path.removesuffix(".py").replace("/", ".") for path in trees() if is_leaf(path)}
    found = [
        (path, name)
        for path, tree in trees().items()
        if is_leaf(path)
        for name in imports(tree)
        if any(is_within(name, leaf) for leaf in leaves)
    ]
    assert not found


def test_loss_imports_torch_and_types_only():
    found = [
        (path, name)
        for path, tree in trees().items()
        if room(path) == "loss"
        for name in imports(tree)
        if name.split(".")[0] not in sys.stdlib_module_names
        and not any(is_within(name, allowed) for allowed in LOSS_MAY_IMPORT)
    ]
    assert not found


def test_the_checks_see_what_they_look_for():
    assert subclasses_upstream_trainer(ast.parse("from transformers import Trainer as T\nclass A(T): ..."))
    assert subclasses_upstream_trainer(ast.parse("import transformers\nclass A(transformers.Trainer): ..."))
    assert not subclasses_upstream_trainer(
        ast.parse("from posttrain.trainer.engine import Trainer\nclass A(Trainer): ...")
    )
    assert cuts_gradients(ast.parse("with torch.no_grad(): pass\nx.detach()")) == [1, 2]
    assert list(imports(ast.parse("def f():\n    from peft import LoraConfig"))) == ["peft.LoraConfig"]
    assert list(imports(ast.parse("importlib.import_module('vllm')"))) == ["vllm"]
    assert [name for name, _ in functions(ast.parse("class A:\n    def f(self):\n        def g(): ..."))] == [
        "A.f",
        "A.f.g",
    ]
    assert is_leaf("posttrain/trainer/sft.py") and not is_leaf("posttrain/trainer/engine.py")
