"""Which package may import which, and what a fresh process imports for its first call."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.support import save
from tests.execute.simulated import canonical
from tests.harness.limits import ROOT
from tests.harness.processes import WITHOUT_PADDLE, python

PACKAGE = "paddleformers_fc"
PURE = ("errors", "text", "mapping", "aoa", "families", "layout", "formats", "plan", "storage")

LINT = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"

# A program that imports the named modules where Paddle cannot be imported.
PURE_MODULES = f"""{WITHOUT_PADDLE}
import importlib

for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        print(f"{{module}}: {{error}}")
    while attempts:
        print(f"{{module}} imports {{attempts.pop()}}")
"""


def _copy_of_the_project(directory: Path) -> Path:
    shutil.copytree(ROOT / PACKAGE, directory / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", directory)
    return directory


def _pure_modules(root: Path) -> list[str]:
    files: list[Path] = []
    for name in PURE:
        module = root / PACKAGE / f"{name}.py"
        files += [module] if module.is_file() else (root / PACKAGE / name).rglob("*.py")
    dotted = [".".join(file.relative_to(root).with_suffix("").parts) for file in files]
    return sorted(name.removesuffix(".__init__") for name in dotted)


BROKEN = [
    ("mapping/boxes.py", "import paddle", f"{PACKAGE}.mapping.boxes -> paddle"),
    ("storage/files.py", f"from {PACKAGE} import mapping", f"{PACKAGE}.storage.files -> {PACKAGE}.mapping"),
    ("mapping/boxes.py", f"from {PACKAGE}.families import registry", f"boxes -> {PACKAGE}.families.registry"),
    ("formats/__init__.py", f"import {PACKAGE}.plan", f"{PACKAGE}.formats -> {PACKAGE}.plan"),
    ("cpu_runtime/device.py", f"from {PACKAGE} import storage", f"{PACKAGE}.cpu_runtime.device -> {PACKAGE}.storage"),
    ("plan/__init__.py", f"import {PACKAGE}.cpu_runtime", f"{PACKAGE}.plan -> {PACKAGE}.cpu_runtime"),
    ("execute/load.py", "import verification.simulate_ranks", f"{PACKAGE}.execute.load -> verification"),
    ("trainer/options.py", f"import {PACKAGE}.trainer.entry", f"No cycles are allowed in {PACKAGE}.trainer."),
]
"""Imports against the direction, at least one for each contract, and what is reported of them."""


def test_the_import_contracts_hold_and_each_can_be_broken(tmp_path: Path) -> None:
    result = python("-c", LINT, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    project = _copy_of_the_project(tmp_path)
    for module, line, _ in BROKEN:
        with (project / PACKAGE / module).open("a") as file:
            file.write(f"\n\ndef broken() -> None:\n    {line}\n")
    result = python("-c", LINT, cwd=project, check=False)
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"Contracts: 0 kept, {_contracts()} broken." in result.stdout
    text = " ".join(result.stdout.split())
    assert [reported for *_, reported in BROKEN if reported not in text] == []


def _contracts() -> int:
    return (ROOT / "pyproject.toml").read_text().count("[[tool.importlinter.contracts]]")


def test_the_pure_packages_import_where_paddle_is_not_installed() -> None:
    modules = _pure_modules(ROOT)
    assert {f"{PACKAGE}.{name}" for name in PURE} <= set(modules)
    assert python("-c", PURE_MODULES, *modules).stdout == ""


def test_a_guarded_import_of_paddle_in_a_pure_package_is_noticed(tmp_path: Path) -> None:
    project = _copy_of_the_project(tmp_path)
    path = project / PACKAGE / "plan" / "__init__.py"
    path.write_text(path.read_text() + "\ntry:\n    import paddle\nexcept ImportError:\n    paddle = None\n")
    result = python("-c", PURE_MODULES, f"{PACKAGE}.plan", cwd=project)
    assert result.stdout == f"{PACKAGE}.plan imports paddle\n", result.stderr


EXPENSIVE = ("datasets", "fsspec", "jinja2", "paddleformers", "pandas", "transformers", "typer", "yaml")
"""Each takes longer than a tenth of the imports of an ordinary load, and PaddleFormers longer than Paddle."""
TRAINER = ("datasets", "fsspec", "pandas", "paddleformers.trainer.trainer", "paddleformers_fc.trainer.session")

PADDLE_ALONE = """
import sys
import paddle
before = set(sys.modules)
import paddleformers_fc
model = paddle.nn.Linear(2, 3)
directory = sys.argv[1] + "/checkpoint-1"
paddleformers_fc.save(directory, model)
paddleformers_fc.load(directory, model)
print(*sorted(set(sys.modules) - before))
"""

MODEL_OF_PADDLEFORMERS = """
import sys
from paddleformers.transformers import LlamaConfig, LlamaForCausalLM
import paddleformers_fc
sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes))
directory = sys.argv[1] + "/checkpoint-1"
paddleformers_fc.save(directory, model)
paddleformers_fc.load(directory, model)
print(*sorted(sys.modules))
"""

READ = """
import sys
import paddleformers_fc
assert not {'numpy', 'paddle', 'msgspec'} & sys.modules.keys()
paddleformers_fc.open(sys.argv[1] + "/checkpoint-1").read("model.norm.weight")
print(*sorted(sys.modules))
"""


def _imported(code: str, directory: Path) -> set[str]:
    return set(python("-c", code, directory).stdout.split())


def _families(modules: set[str]) -> list[str]:
    inside = "paddleformers_fc.families.models."
    return sorted(name.removeprefix(inside) for name in modules if name.startswith(inside))


def _unwanted(modules: set[str], expensive: Sequence[str]) -> list[str]:
    return [name for name in expensive if name in modules]


def test_a_load_into_layers_of_paddle_imports_neither_paddleformers_nor_a_family(tmp_path: Path) -> None:
    modules = _imported(PADDLE_ALONE, tmp_path)
    assert "paddleformers_fc.execute.load" in modules
    assert _unwanted(modules, EXPENSIVE) == []
    assert _families(modules) == []


@pytest.mark.slow
def test_a_load_into_a_model_of_paddleformers_imports_no_trainer_and_one_family(tmp_path: Path) -> None:
    modules = _imported(MODEL_OF_PADDLEFORMERS, tmp_path)
    assert "paddleformers_fc.execute.load" in modules
    assert _unwanted(modules, TRAINER) == []
    assert _families(modules) == ["llama"]


def test_a_read_imports_neither_paddle_nor_a_store_and_one_family(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-1", canonical())
    modules = _imported(READ, tmp_path)
    assert _unwanted(modules, (*EXPENSIVE, "paddle", "torch", "rich")) == []
    assert _families(modules) == ["ernie4_5"]
