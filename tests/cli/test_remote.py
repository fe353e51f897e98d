"""Commands read URLs; exports and conversions to a store have the bytes of local ones and are complete or absent."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

import paddleformers_fc
from paddleformers_fc.errors import Corrupt, OptionError, StorageError
from paddleformers_fc.execute import export_files
from paddleformers_fc.storage.export_checksums import CHECKSUMS_NAME
from tests.cli.support import content, document_of, md5_of, run
from tests.storage.buckets import Bucket
from tests.storage.serving import Served, serving


@pytest.fixture
def served(four: Path, weights: Path, tmp_path: Path) -> Iterator[Served]:
    shutil.copytree(four, tmp_path / "store/checkpoint-3")
    shutil.copytree(weights, tmp_path / "store/open")
    with serving(tmp_path / "store") as one:
        yield one


@pytest.fixture
def memory(four: Path) -> Iterator[str]:
    """The checkpoint in fsspec's memory; its URL."""
    url = f"memory://{uuid.uuid4().hex}/checkpoint-3"
    store = fsspec.filesystem("memory")
    store.put(str(four), url, recursive=True)
    yield url
    store.rm(url, recursive=True)


def test_a_url_gives_the_same_output_as_its_directory(four: Path, weights: Path, served: Served, memory: str) -> None:
    for directory, urls in (
        (weights, [f"{served.url}/open"]),
        (four, [f"{served.url}/checkpoint-3", memory, f"file://{four}"]),
    ):
        for verb in (["inspect", "--tensors"], ["verify"]):
            expected = document_of(verb[0], directory, *verb[1:])
            for url in urls:
                found = document_of(verb[0], url, *verb[1:])
                assert found["path"] == url.removeprefix("file://")
                assert {**found, "path": "", "seconds": 0} == {**expected, "path": "", "seconds": 0}


def test_a_url_without_a_checkpoint_is_refused(served: Served) -> None:
    top = run("inspect", served.url)
    assert (top.code, "Name a checkpoint inside it: checkpoint-3" in top.err) == (1, True)
    nowhere = run("verify", f"{served.url}/nowhere")
    assert (nowhere.code, "is not a checkpoint of a known format" in nowhere.err) == (1, True)


def test_an_unreadable_file_is_not_reported_as_damaged(served: Served) -> None:
    size = (served.root / "checkpoint-3/model_state/rank-00000.safetensors").stat().st_size
    served.answer = lambda data: data + b"more" if len(data) == size else data
    outcome = run("verify", f"{served.url}/checkpoint-3")
    assert outcome.code == 2
    assert "does not answer range requests" in outcome.err
    assert "could not be checked: level full" in outcome.out
    assert not any(word in outcome.out + outcome.err for word in ("FAILED", "damaged"))
    document = document_of("verify", f"{served.url}/checkpoint-3", code=2)
    assert (document["error"], document["passed"]) == ("StorageError", False)
    assert "files" in document["not_checked"]
    assert all(check["passed"] for check in document["checks"])


INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SMALL = 8_000
"""Bytes of a file, so that there are several."""


@pytest.mark.parametrize(("form", "size"), [("flex", "8kB"), ("hf", "8kB"), ("hf", "5GB"), ("distcp", "8kB")])
def test_a_conversion_to_a_store_is_the_local_one(
    four: Path, bucket: Bucket, tmp_path: Path, form: str, size: str
) -> None:
    url, local = f"{bucket.path}/run/checkpoint-3", tmp_path / "checkpoint-3"
    options = ("--format", form, "--max-shard-size", size)
    there, here = (document_of("convert", four, one, *options) for one in (url, local))
    assert {**there, "path": "", "seconds": 0} == {**here, "path": "", "seconds": 0}
    opened = paddleformers_fc.open(local).metadata
    assert there["format"] == opened.format
    assert there["roles"] == {role: one.tensors for role, one in opened.roles.items()}
    assert bucket.files("run/checkpoint-3") == content(local)
    assert bucket.unfinished() == []
    inspected = run("inspect", url)
    assert inspected.code == (1 if form == "distcp" else 0)
    assert form != "distcp" or "Copy it to a local directory" in inspected.err


def test_nothing_is_written_into_a_checkpoint_or_a_directory_with_files_at_a_store(four: Path, bucket: Bucket) -> None:
    assert run("convert", four, f"{bucket.path}/run/checkpoint-9").code == 0
    assert run("diff", four, f"{bucket.path}/run/checkpoint-9").code == 0
    bucket.put("other/file", b"1")
    assert document_of("export", four, f"{bucket.path}/open")["md5"] == md5_of([bucket.files("open")[SINGLE]])
    for verb, target, words in (
        ("convert", "run/checkpoint-9", "Nothing is written into a checkpoint"),
        ("export", "open", "already contains a model"),
        ("export", "run/checkpoint-9/hf", "Nothing is written into a checkpoint"),
        ("convert", "other", "is not empty"),
    ):
        outcome = run(verb, four, f"{bucket.path}/{target}")
        assert (outcome.code, words in outcome.err) == (2, True)


def test_a_conversion_at_a_store_is_not_written_into_its_source(weights: Path, bucket: Bucket) -> None:
    source = bucket.upload(weights)
    before = bucket.files(weights.name)
    for target in (source, source / "below"):
        with pytest.raises(OptionError, match="not written into its source"):
            paddleformers_fc.open(source).convert(target)
    assert bucket.files(weights.name) == before


def test_an_older_export_is_replaced_and_no_reader_sees_a_mixture(four: Path, bucket: Bucket) -> None:
    """An export in one file is replaced by one in several, and that by one in one."""
    checkpoint, url = paddleformers_fc.open(four), f"{bucket.path}/hf"
    seen: list[dict[str, bytes]] = []

    def look(method: str, path: str, query: str) -> bool:
        seen.append(bucket.files("hf"))
        return True

    checkpoint.export(url)
    bucket.put("hf/notes.txt", b"of another program")
    whole = [bucket.files("hf")]
    bucket.store.accepts = look
    for size in (SMALL, 10**9):
        checkpoint.export(url, max_shard_bytes=size, replace=True)
        whole.append(bucket.files("hf"))
    assert whole[0] == whole[2]
    assert {*whole[0]} & {*whole[1]} >= {"config.json", "notes.txt"}
    marked = [one for one in seen if INDEX in one or SINGLE in one]
    assert 0 < len(marked) < len(seen)
    assert all(one in whole for one in marked)


STEP = 5
"""One request of so many is refused; files are sent in parts of three requests, so that each of them has its turn."""


@pytest.mark.parametrize(("form", "size"), [("hf", SMALL), ("hf", 10**9), ("distcp", 10**9)])
def test_a_conversion_refused_at_any_request_leaves_nothing(four: Path, bucket: Bucket, form: str, size: int) -> None:
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
def test_an_interrupt_leaves_nothing(four: Path, bucket: Bucket, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(directory: object, uploaded: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(export_files, "compare_uploaded", interrupted)
    with pytest.raises(KeyboardInterrupt):
        paddleformers_fc.open(four).export(f"{bucket.path}/hf", max_shard_bytes=size)
    assert (bucket.files("hf"), bucket.unfinished()) == ({}, [])


@pytest.mark.parametrize("name", ["config.json", INDEX, "model-00001-of-", CHECKSUMS_NAME])
def test_changed_bytes_are_found_and_the_export_is_withdrawn(four: Path, bucket: Bucket, name: str) -> None:
    def alter(path: str) -> None:
        key = path.partition("/hf/")[2]
        if key.startswith(name):
            data = bucket.files("hf")[key]
            bucket.put(f"hf/{key}", data[:-1] + bytes([data[-1] ^ 1]))

    bucket.store.changed = alter
    with pytest.raises(Corrupt, match=r"(?s)does not have the bytes that were uploaded.*" + name):
        paddleformers_fc.open(four).export(f"{bucket.path}/hf", max_shard_bytes=SMALL)
    assert bucket.files("hf") == {}
