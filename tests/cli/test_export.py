"""``export`` writes Hugging Face files and one md5 that no layout changes."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.cli.support import flip, run, save
from tests.execute.simulated import canonical

ARRAYS = canonical()


def md5_of_arrays() -> str:
    """The documented definition, over the weights that were saved."""
    digest = hashlib.md5()
    for name in sorted(ARRAYS):
        digest.update(name.encode())
        digest.update(ARRAYS[name].tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize(("layout", "size"), [((2, 2), "1GB"), ((1, 3), "8kB")])
def test_the_md5_is_the_same_for_every_layout_and_file_size(tmp_path: Path, layout: tuple[int, int], size: str) -> None:
    checkpoint = save(tmp_path / "checkpoint-3", ARRAYS, *layout)
    target = tmp_path / "export"
    outcome = run("export", checkpoint, target, "--max-shard-size", size, "--json")
    assert outcome.code == 0
    document = outcome.document
    assert document["md5"] == md5_of_arrays()
    written = {path.name: path.stat().st_size for path in target.glob("*.safetensors")}
    assert (len(written) > 1) is (size == "8kB")
    assert {file["name"]: file["bytes"] for file in document["files"]} == written
    assert document["tensors"] == len(ARRAYS)
    assert document["bytes"] == sum(array.nbytes for array in ARRAYS.values())
    text = run("export", checkpoint, tmp_path / "again", "--max-shard-size", size).out
    assert all(part in text for part in (*written, document["md5"]))


@pytest.mark.parametrize("size", ["", "5", "-1GB", "0B"])
def test_an_invalid_size_is_refused(four: Path, tmp_path: Path, size: str) -> None:
    outcome = run("export", four, tmp_path / "export", f"--max-shard-size={size}")
    assert outcome.code == 2
    assert not (tmp_path / "export").exists()


def test_an_output_directory_is_refused_with_its_checkpoints(four: Path, tmp_path: Path) -> None:
    run_directory = tmp_path / "run"
    assert run("export", four, run_directory).code == 0
    shutil.copytree(four, run_directory / "checkpoint-3")
    outcome = run("export", run_directory, tmp_path / "export")
    assert outcome.code == 1
    assert "contains open weights and is not a flex checkpoint" in outcome.err
    assert "Name a checkpoint inside it: checkpoint-3." in outcome.err


def test_existing_weights_are_replaced_only_with_the_option(four: Path, tmp_path: Path) -> None:
    target = tmp_path / "export"
    target.mkdir()
    (target / "model.safetensors").write_bytes(b"precious")
    outcome = run("export", four, target)
    assert outcome.code == 2
    assert "--replace" in outcome.err
    assert (target / "model.safetensors").read_bytes() == b"precious"
    assert run("export", four, target, "--replace").code == 0
    assert run("diff", four, target).code == 0


def test_a_link_to_another_file_system_is_followed_and_stays(four: Path, tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("this machine has one file system")
    link = tmp_path / "export"
    with tempfile.TemporaryDirectory(dir=memory) as real:
        link.symlink_to(real)
        for size in ("8kB", "5GB"):
            outcome = run("export", four, link, "--max-shard-size", size, "--replace", "--json")
            assert outcome.document["md5"] == md5_of_arrays()
            (Path(real) / "notes.txt").write_text("mine")
        assert sorted(os.listdir(real)) == [
            "config.json",
            "flex_checksums.json",
            "model.safetensors",
            "notes.txt",
        ]
        assert link.is_symlink()
    assert os.listdir(tmp_path) == ["export"]


@pytest.mark.parametrize(
    ("why", "older"),
    [
        *(("mounted", True), ("mounted", False)),
        *(("below a directory of somebody else", True), ("where the process is", True)),
    ],
)
def test_a_directory_that_cannot_be_replaced_is_written_into(
    four: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str, older: bool
) -> None:
    target = tmp_path / "output"
    target.mkdir()
    if older:
        assert run("export", four, target, "--max-shard-size", "8kB").code == 0
        (target / "checkpoint-5").mkdir()
    named, inode = target, target.stat().st_ino
    if why == "mounted":
        monkeypatch.setattr(os.path, "ismount", lambda path: os.fspath(path) == str(target))
    elif why == "where the process is":
        monkeypatch.chdir(target)
        named = Path()
    else:
        may = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path and may(path, mode))
    make = os.mkdir

    def refuse(path: Any, *arguments: Any) -> None:
        if Path(path).parent == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        make(path, *arguments)

    monkeypatch.setattr(os, "mkdir", refuse)
    outcome = run("export", four, named, "--replace", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.document["md5"] == md5_of_arrays()
    exported = ["config.json", "flex_checksums.json", "model.safetensors"]
    assert sorted(os.listdir(target)) == [*(["checkpoint-5"] if older else []), *exported]
    assert (os.listdir(tmp_path), target.stat().st_ino) == (["output"], inode)


def test_a_link_that_leads_nowhere_else_is_an_error_with_a_reason(four: Path, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    outcome = run("export", four, tmp_path / "loop")
    assert outcome.code == 2
    assert "Traceback" not in outcome.err


def test_a_checkpoint_is_not_written_into(one: Path, copy: Path) -> None:
    before = sorted(path.relative_to(copy) for path in copy.rglob("*"))
    for source, target in ((one, copy), (copy, copy), (copy, copy / "a/b")):
        outcome = run("export", source, target, "--replace")
        assert outcome.code == 2
        assert "Nothing is written into a checkpoint" in outcome.err
    assert sorted(path.relative_to(copy) for path in copy.rglob("*")) == before


def test_a_foreign_configuration_is_replaced_only_with_the_option(four: Path, tmp_path: Path) -> None:
    own = tmp_path / "own" / "config.json"
    own.parent.mkdir()
    own.write_text('{"mine": 1}')
    refused = run("export", four, own.parent)
    assert refused.code == 2
    assert "config.json is there" in refused.err
    assert [path.name for path in own.parent.iterdir()] == ["config.json"]
    assert own.read_text() == '{"mine": 1}'
    assert run("export", four, own.parent, "--replace").code == 0
    assert own.read_bytes() == (four / "config.json").read_bytes()


def test_a_damaged_checkpoint_is_not_exported(copy: Path, tmp_path: Path) -> None:
    flip(copy / "model_state/rank-00000.safetensors", -1)
    target = tmp_path / "export"
    outcome = run("export", copy, target, "--json")
    assert outcome.code == 1
    assert outcome.document["error"] == "Corrupt"
    assert not target.exists()
    assert [path.name for path in tmp_path.iterdir()] == [copy.name]
    assert run("export", copy, tmp_path / "unchecked", "--verify", "size").code == 0


def test_a_tilde_is_expanded_without_a_shell(four: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(four, tmp_path / "home" / "checkpoint-3")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert run("export", "~/checkpoint-3", "~/export", "--json").document["md5"] == md5_of_arrays()
    assert sorted(os.listdir(tmp_path / "home")) == ["checkpoint-3", "export"]
    assert os.listdir(tmp_path / "work") == []
