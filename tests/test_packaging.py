"""The requirements, wheel and source archive: their files and metadata, and the wheel in environments of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path
from unittest import mock

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.cli.support import run, save
from tests.execute.simulated import canonical
from tests.harness.limits import LIMIT

ROOT = Path(__file__).resolve().parents[1]
BUILD = """
import sys
from setuptools import build_meta
target = sys.argv[1]  # Every build replaces the arguments.
print(build_meta.build_wheel(target), build_meta.build_sdist(target))
"""
REPOSITORY = "https://example.org/owner/name"
VERSIONS = ("3.10", "3.11", "3.12", "3.13")


def call(command: Sequence[object], cwd: Path, **variables: str) -> str:
    """Run a program without the variables of this environment's Python; its output."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**kept, **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def tracked() -> list[str]:
    """The files of the repository, by their path."""
    return call(["git", "ls-files", "-z"], ROOT).rstrip("\0").split("\0")


@dataclass(frozen=True)
class Built:
    """Both archives.

    Args:
        wheel: the wheel.
        package: its files without the wheel's metadata.
        source: the files of the source archive, without its first directory.
        metadata: the wheel's METADATA.
    """

    wheel: Path
    package: frozenset[str]
    source: frozenset[str]
    metadata: Message


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The archives of a copy, so that nothing is left behind in the repository."""
    sources, target = (tmp_path_factory.mktemp(name) for name in ("sources", "dist"))
    for name in tracked():
        if (ROOT / name).is_file():
            (sources / name).parent.mkdir(parents=True, exist_ok=True)
            (sources / name).write_bytes((ROOT / name).read_bytes())
    wheel, sdist = (target / name for name in call([sys.executable, "-c", BUILD, target], sources).split()[-2:])
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        parsed = Parser().parsestr(archive.read(metadata).decode())
    with tarfile.open(sdist) as archive:
        source = {one.name.partition("/")[2] for one in archive.getmembers() if one.isfile()}
    package = frozenset(name for name in names if ".dist-info/" not in name)
    return Built(wheel, package, frozenset(source), parsed)


def test_the_wheel_contains_every_file_of_the_package_and_no_other(built: Built) -> None:
    assert built.package == {name for name in tracked() if name.startswith("paddleformers_fc/")}


def test_the_source_archive_contains_package_documents_recipes_and_constraints_and_no_tests(built: Built) -> None:
    wanted = ("paddleformers_fc/", "docs/", "recipes/", "tools/")
    assert {name for name in tracked() if name.startswith(wanted)} <= built.source
    assert {"README.md", "LICENSE", "CONTRIBUTING.md", "constraints.txt", "constraints-nlp.txt"} <= built.source
    assert not [name for name in built.source if name.startswith(("tests", "benchmarks", ".")) or "__pycache__" in name]


def test_the_metadata_name_authors_licence_and_an_address(built: Built) -> None:
    assert built.metadata["Author"] == "paddleformers_fc developers"
    assert built.metadata["License"] == "Apache-2.0"
    assert "PaddleFormers, https://github.com/PaddlePaddle/PaddleFormers" in built.metadata.get_all("Project-URL", [])


def test_every_requirement_has_a_lower_bound(built: Built) -> None:
    requirements = list(map(Requirement, built.metadata.get_all("Requires-Dist", [])))
    assert {"http", "s3", "cpu", "formers", "docs"} <= set(built.metadata.get_all("Provides-Extra", []))
    assert not [str(one) for one in requirements if not any(s.operator in (">=", "==") for s in one.specifier)]


def test_the_long_description_has_no_relative_link_and_leads_to_a_known_repository(built: Built) -> None:
    described = str(built.metadata.get_payload())
    assert "[commands]" not in described
    assert not _relative(described)
    text = (ROOT / "setup.py").read_text(encoding="utf-8").replace('REPOSITORY = ""', f'REPOSITORY = "{REPOSITORY}"')
    scope: dict[str, object] = {"__file__": str(ROOT / "setup.py"), "__name__": "__main__"}
    exec(text.partition("\nsetup(")[0], scope)
    described = scope["long_description"](REPOSITORY)  # type: ignore[operator]
    assert not _relative(described)
    assert f"[commands]({REPOSITORY}/blob/v0.1.0/docs/commands.md)" in described


def _relative(text: str) -> list[str]:
    return re.findall(r"\]\((?!https?:|#)[^)]*\)", text)


def environment(directory: Path, python: object = sys.executable) -> Path:
    """Make an environment; its directory of programs."""
    call([python, "-m", "venv", directory], directory.parent)
    return directory / "bin"


def interpreter(version: str) -> Path | None:
    """This machine's Python of a version; None if it has none that makes environments."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return Path(sys.executable)
    code = "import ensurepip, sys, venv; print(sys.executable)"
    named = [f"python{version}", *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    for one in named:
        try:
            found = subprocess.run([one, "-c", code], capture_output=True, text=True, timeout=LIMIT, check=False)
        except FileNotFoundError:
            continue
        if found.returncode == 0:
            return Path(found.stdout.strip())
    return None


def check_without_paddle(programs: Path, directory: Path) -> None:
    """Inspect, verify and export a checkpoint with an installed wheel; the results are those of this repository."""
    checkpoint = save(directory / "out/checkpoint-3", canonical(), tp=2)
    command = programs / "paddleformers-fc"
    assert call([command, "inspect", checkpoint, "--json"], directory) == run("inspect", checkpoint, "--json").out
    verified = json.loads(call([command, "verify", checkpoint, "--json"], directory))
    assert verified | {"seconds": 0} == run("verify", checkpoint, "--json").document | {"seconds": 0}
    call([command, "export", checkpoint, directory / "theirs"], directory)
    assert run("export", checkpoint, directory / "ours").code == 0
    for file in (directory / "ours").iterdir():
        assert (directory / "theirs" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_the_wheel_reads_a_checkpoint_where_there_is_no_paddle(built: Built, tmp_path: Path, version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"Python {version} is not on this machine")
    programs = environment(tmp_path / "fresh", python)
    call([programs / "pip", "install", "-q", "-c", ROOT / "constraints.txt", built.wheel], tmp_path)
    check_without_paddle(programs, tmp_path)
    refused = subprocess.run(
        [programs / "paddleformers-fc", "inspect", "s3://bucket/run/checkpoint-3"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    (command,) = re.findall(r"pip (install \"paddleformers-fc\[s3\]\")", refused.stderr.replace("\n", " "))
    assert "s3fs" in call([programs / "pip", *command.replace('"', "").split(), "--dry-run"], tmp_path)


@pytest.mark.slow
def test_the_wheel_reads_a_checkpoint_with_the_lowest_versions_it_accepts(built: Built, tmp_path: Path) -> None:
    requirements = map(Requirement, built.metadata.get_all("Requires-Dist", []))
    lowest = [f"{one.name}=={next(iter(one.specifier)).version}" for one in requirements if one.marker is None]
    assert len(lowest) == 8
    programs = environment(tmp_path / "fresh")
    call([programs / "pip", "install", "-q", built.wheel, *lowest], tmp_path)
    check_without_paddle(programs, tmp_path)


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
