"""Which package may import which, and that the pure ones do without Paddle.

The contracts are in ``pyproject.toml``. Each is held here against the code as it is, and against a copy in which it is
broken: a contract that nothing can break says nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.harness.limits import LIMIT

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "paddleformers_fc"
PURE = ("errors", "text", "mapping", "aoa", "families", "layout", "formats", "plan", "storage")

LINT = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"

# Imports each module named on the command line in a process where Paddle cannot be imported. An attempt is reported
# even when the module swallows the ImportError, because behaviour must not depend on what is installed.
WITHOUT_PADDLE = """
import importlib, sys

attempts = []

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"paddle", "paddleformers", "paddlefleet", "torch", "transformers"}:
            attempts.append(name)
            raise ModuleNotFoundError(f"{name} is blocked in this test", name=name)

sys.meta_path.insert(0, Blocked())
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        print(f"{module}: {error}")
    while attempts:
        print(f"{module} imports {attempts.pop()}")
"""


def _python(code: str, arguments: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=LIMIT, check=False)


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
    result = _python(LINT, [], ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    project = _copy_of_the_project(tmp_path)
    for module, line, _ in BROKEN:
        with (project / PACKAGE / module).open("a") as file:
            file.write(f"\n\ndef broken() -> None:\n    {line}\n")
    result = _python(LINT, [], project)
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"Contracts: 0 kept, {_contracts()} broken." in result.stdout
    text = " ".join(result.stdout.split())
    assert [reported for *_, reported in BROKEN if reported not in text] == []


def _contracts() -> int:
    return (ROOT / "pyproject.toml").read_text().count("[[tool.importlinter.contracts]]")


def test_the_pure_packages_import_where_paddle_is_not_installed() -> None:
    modules = _pure_modules(ROOT)
    assert {f"{PACKAGE}.{name}" for name in PURE} <= set(modules)
    result = _python(WITHOUT_PADDLE, modules, ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""


def test_a_guarded_import_of_paddle_in_a_pure_package_is_noticed(tmp_path: Path) -> None:
    project = _copy_of_the_project(tmp_path)
    path = project / PACKAGE / "plan" / "__init__.py"
    path.write_text(path.read_text() + "\ntry:\n    import paddle\nexcept ImportError:\n    paddle = None\n")
    result = _python(WITHOUT_PADDLE, [f"{PACKAGE}.plan"], project)
    assert result.stdout == f"{PACKAGE}.plan imports paddle\n", result.stderr
