"""Exports and conversions to an S3 store: the same bytes as in a directory, and no reader sees a mixture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import paddleformers_fc
from paddleformers_fc.errors import Corrupt, OptionError, StorageError
from paddleformers_fc.execute import export_files
from paddleformers_fc.storage.export_checksums import CHECKSUMS_NAME
from paddleformers_fc.storage.files import files_within
from tests.cli.support import run
from tests.storage.buckets import Bucket

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SMALL = 8_000
"""Bytes of a file, so that there are several."""


def content(directory: Path) -> dict[str, bytes]:
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files_within(directory)}


@pytest.mark.parametrize(("size", "mark"), [(SMALL, INDEX), (10**9, SINGLE)])
def test_an_export_to_a_store_has_the_bytes_of_one_to_a_directory(
    four: Path, bucket: Bucket, tmp_path: Path, size: int, mark: str
) -> None:
    checkpoint = paddleformers_fc.open(four)
    local = checkpoint.export(tmp_path / "hf", max_shard_bytes=size)
    report = checkpoint.export(f"{bucket.path}/run/hf", max_shard_bytes=size)
    assert bucket.files("run/hf") == content(tmp_path / "hf")
    assert mark in content(tmp_path / "hf")
    assert (report.files, report.tensors, report.digests()) == (local.files, local.tensors, local.digests())
    assert bucket.unfinished() == []
    again = run("export", four, f"{bucket.path}/run/hf")
    assert (again.code, "already contains a model" in again.err) == (2, True)


def test_a_conversion_to_a_store_can_be_loaded_and_is_not_replaced(four: Path, bucket: Bucket, tmp_path: Path) -> None:
    found = run("convert", four, f"{bucket.path}/run/checkpoint-9", "--json").document
    assert run("convert", four, tmp_path / "checkpoint-9", "--json").document["bytes"] == found["bytes"]
    assert bucket.files("run/checkpoint-9") == content(tmp_path / "checkpoint-9")
    assert run("diff", four, f"{bucket.path}/run/checkpoint-9").code == 0
    again = run("convert", four, f"{bucket.path}/run/checkpoint-9")
    assert (again.code, "Nothing is written into a checkpoint" in again.err) == (2, True)
    inside = run("export", four, f"{bucket.path}/run/checkpoint-9/hf")
    assert (inside.code, "Nothing is written into a checkpoint" in inside.err) == (2, True)
    bucket.put("other/file", b"1")
    other = run("convert", four, f"{bucket.path}/other")
    assert (other.code, "is not empty" in other.err) == (2, True)


@pytest.mark.parametrize("form", ["hf", "distcp"])
def test_conversions_of_every_format_to_a_store_have_the_bytes_of_one_to_a_directory(
    four: Path, bucket: Bucket, tmp_path: Path, form: str
) -> None:
    url, local = f"{bucket.path}/run/checkpoint-3", tmp_path / "checkpoint-3"
    there, here = (
        run("convert", four, one, "--format", form, "--max-shard-size", "8kB", "--json") for one in (url, local)
    )
    assert (there.code, here.code) == (0, 0), there.err + here.err
    of_run = {"path", "seconds"}
    assert {key: value for key, value in there.document.items() if key not in of_run} == {
        key: value for key, value in here.document.items() if key not in of_run
    }
    opened = paddleformers_fc.open(local).metadata
    assert there.document["format"] == opened.format
    assert there.document["roles"] == {role: one.tensors for role, one in opened.roles.items()}
    assert bucket.files("run/checkpoint-3") == content(local)
    assert bucket.unfinished() == []
    again = run("convert", four, url, "--format", form)
    assert again.code == 2, again.err
    inspected = run("inspect", url)
    assert inspected.code == (0 if form == "hf" else 1)
    assert form == "hf" or "Copy it to a local directory" in inspected.err


def test_a_conversion_at_a_store_is_not_written_into_its_source(weights: Path, bucket: Bucket) -> None:
    source = bucket.upload(weights)
    before = bucket.files(weights.name)
    for target in (source, source / "below"):
        with pytest.raises(OptionError, match="not written into its source"):
            paddleformers_fc.open(source).convert(target)
    assert bucket.files(weights.name) == before


def replace(four: Path, bucket: Bucket, accepts: Callable[[str, str, str], bool]) -> tuple[dict[str, bytes], ...]:
    """Replace an export in one file by one in several, and that by one in one; what each of them contains."""
    checkpoint, url = paddleformers_fc.open(four), f"{bucket.path}/hf"
    checkpoint.export(url)
    bucket.put("hf/notes.txt", b"of another program")
    contents = [bucket.files("hf")]
    bucket.store.accepts = accepts
    for size in (SMALL, 10**9):
        checkpoint.export(url, max_shard_bytes=size, replace=True)
        contents.append(bucket.files("hf"))
    return tuple(contents)


def test_an_older_export_is_replaced_and_no_reader_sees_a_mixture(four: Path, bucket: Bucket) -> None:
    seen: list[dict[str, bytes]] = []

    def look(method: str, path: str, query: str) -> bool:
        seen.append(bucket.files("hf"))
        return True

    whole = replace(four, bucket, look)
    assert whole[0] == whole[2]
    assert {*whole[0]} & {*whole[1]} >= {"config.json", "notes.txt"}
    marked = [one for one in seen if INDEX in one or SINGLE in one]
    assert marked
    assert all(one in whole for one in marked)
    assert len(marked) < len(seen)


STEP = 5
"""One request of so many is refused; files are sent in parts of three requests, so that each of them has its turn."""


@pytest.mark.parametrize(("form", "size"), [("hf", SMALL), ("hf", 10**9), ("distcp", 10**9)])
def test_what_is_written_to_a_store_and_refused_at_any_request_leaves_no_file_and_no_upload(
    four: Path, bucket: Bucket, form: str, size: int
) -> None:
    refused_at, requests = -1, 0

    def accepts(method: str, path: str, query: str) -> bool:
        nonlocal requests
        requests += method != "DELETE"
        return method == "DELETE" or requests - 1 != refused_at

    def convert(target: str) -> None:
        paddleformers_fc.open(four).convert(f"{bucket.path}/{target}", format=form, max_shard_bytes=size)

    bucket.store.accepts = accepts
    convert("counted")
    total = requests
    assert total > 4
    some = range(0, total, STEP) if size == SMALL else (0, total // 2)
    for number in {*some, total - 1}:
        refused_at, requests = number, 0
        with pytest.raises(StorageError):
            convert("target")
        assert (bucket.files("target"), bucket.unfinished()) == ({}, [])


@pytest.mark.parametrize("size", [SMALL, 10**9])
def test_an_interrupted_export_leaves_no_file_and_no_upload(
    four: Path, bucket: Bucket, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(directory: object, uploaded: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(export_files, "compare_uploaded", interrupted)
    with pytest.raises(KeyboardInterrupt):
        paddleformers_fc.open(four).export(f"{bucket.path}/hf", max_shard_bytes=size)
    assert (bucket.files("hf"), bucket.unfinished()) == ({}, [])


@pytest.mark.parametrize("name", ["config.json", INDEX, "model-00001-of-", CHECKSUMS_NAME])
def test_bytes_that_the_store_changes_are_found_and_the_export_is_withdrawn(
    four: Path, bucket: Bucket, name: str
) -> None:
    def alter(path: str) -> None:
        key = path.partition("/hf/")[2]
        if key.startswith(name):
            data = bucket.files("hf")[key]
            bucket.put(f"hf/{key}", data[:-1] + bytes([data[-1] ^ 1]))

    bucket.store.changed = alter
    with pytest.raises(Corrupt, match=r"(?s)does not have the bytes that were uploaded.*" + name):
        paddleformers_fc.open(four).export(f"{bucket.path}/hf", max_shard_bytes=SMALL)
    assert bucket.files("hf") == {}
