"""The install commands of the README match ``setup.py`` and ``constraints.txt``."""

from __future__ import annotations

import re
from importlib.metadata import metadata
from pathlib import Path
from unittest import mock

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = re.compile(r"(?:(?<![\w.])\.|\.whl|paddleformers-fc)\[([a-z\d,]+)\]")


def declared() -> dict[str, list[str]]:
    """The requirements of ``setup.py`` by extra; those without one under the empty name."""
    with mock.patch("setuptools.setup") as recorded:
        code = compile((ROOT / "setup.py").read_text(encoding="utf-8"), str(ROOT / "setup.py"), "exec")
        exec(code, {"__file__": str(ROOT / "setup.py"), "__name__": "__main__"})
    given = recorded.call_args.kwargs
    return {"": given["install_requires"], **given["extras_require"]}


def pinned() -> dict[str, list[Requirement]]:
    """The pins of ``constraints.txt`` by name."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    found: dict[str, list[Requirement]] = {}
    for one in map(Requirement, filter(None, lines)):
        found.setdefault(one.name.replace("_", "-").lower(), []).append(one)
    return found


def test_every_extra_that_the_documents_name_exists() -> None:
    extras = declared()
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "Makefile", ROOT / "tools/install.sh"]
    texts += [ROOT / "constraints.txt", *(ROOT / "paddleformers_fc").rglob("*.py")]
    named = {
        extra.strip()
        for path in texts
        for group in EXTRAS.findall(path.read_text(encoding="utf-8"))
        for extra in group.split(",")
    }
    assert {"cpu", "formers", "http", "s3"} <= named
    assert named <= extras.keys()


def test_no_extra_requires_a_wheel_that_the_public_index_lacks() -> None:
    names = {Requirement(text).name for texts in declared().values() for text in texts}
    assert "paddlepaddle-gpu" not in names


@pytest.mark.parametrize("extra", ["", "cpu", "formers", "http", "s3", "plots", "test", "docs"])
def test_the_constraints_satisfy_what_is_required(extra: str) -> None:
    pins = pinned()
    for requirement in map(Requirement, declared()[extra]):
        found = pins[requirement.name.replace("_", "-").lower()]
        for pin in found:
            ((only,),) = [list(pin.specifier)]
            assert only.operator == "=="
            assert requirement.specifier.contains(Version(only.version)), f"{requirement} and {pin}"


def test_the_way_for_gpus_brings_no_cpu_wheel_of_paddle() -> None:
    names = {Requirement(text).name for text in metadata("paddleformers").get_all("Requires-Dist") or ()}
    assert not names & {"paddlepaddle", "paddlepaddle-gpu"}
