"""An S3 store, through the backend that a user would install: names, ranges, checks and faults."""

from __future__ import annotations

from pathlib import Path

import fsspec
import numpy as np
import pytest

from paddleformers_fc.errors import Corrupt, NotACheckpoint, StorageError
from paddleformers_fc.storage.files import exists, is_directory, is_file, list_directory, read_file, size_of
from paddleformers_fc.storage.manifest import MANIFEST_NAME, read_manifest, verify_files
from paddleformers_fc.storage.paths import RemotePath
from tests.storage.buckets import CREDENTIALS, Bucket
from tests.storage.support import STATE, RangeReader, save


def test_names_of_a_bucket_are_looked_at_and_listed_as_in_a_directory(bucket: Bucket) -> None:
    bucket.put("a/b.json", b"12345")
    bucket.put("a/c.json", b"")
    directory = bucket.path / "a"
    assert [path.name for path in list_directory(directory)] == ["b.json", "c.json"]
    assert list_directory(bucket.path / "nothing") == []
    assert (exists(directory / "b.json"), exists(directory / "d.json")) == (True, False)
    assert (is_file(directory / "b.json"), is_file(directory)) == (True, False)
    assert (is_directory(directory), is_directory(bucket.path / "x")) == (True, False)
    assert (read_file(directory / "b.json"), read_file(directory / "c.json")) == (b"12345", b"")


def test_what_another_client_changes_after_a_listing_is_seen(bucket: Bucket) -> None:
    bucket.put("a/b", b"12345")
    bucket.put("a/c", b"")
    assert len(list_directory(bucket.path / "a")) == 2
    bucket.put("a/b", b"123")
    bucket.put("a/d", b"")
    bucket.remove("a/c")
    assert size_of(bucket.path / "a/b") == 3
    assert not exists(bucket.path / "a/c")
    assert [path.name for path in list_directory(bucket.path / "a")] == ["b", "d"]


def test_a_range_of_an_object_arrives_and_nothing_else_is_sent(bucket: Bucket) -> None:
    data = np.random.default_rng(0).bytes(100_000)
    path = bucket.put("data", data)
    array = np.zeros(250, np.float32)
    with RangeReader() as reader:
        reader.read_into(path, 777, array)
    assert array.tobytes() == data[777:1777]
    assert bucket.store.answers == [(f"/{bucket.path.name}/data", 1000)]


def test_a_missing_object_is_named(bucket: Bucket, tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-3", 7)
    directory = bucket.upload(tmp_path / "checkpoint-3")
    listed = read_manifest(directory)
    with RangeReader() as reader:
        reader.read_into(directory / STATE, 0, bytearray(1))
        bucket.remove(f"checkpoint-3/{STATE}")
        with pytest.raises(Corrupt, match=f"{directory}/{STATE} is missing"):
            reader.read_into(directory / STATE, 0, bytearray(1))
    with pytest.raises(Corrupt, match=f"{directory}/{STATE} is missing"):
        read_file(directory / STATE)
    with pytest.raises(Corrupt, match=f"{STATE} is missing"):
        verify_files(directory, listed, "size")
    bucket.remove(f"checkpoint-3/{MANIFEST_NAME}")
    with pytest.raises(NotACheckpoint, match=f"no {MANIFEST_NAME}"):
        read_manifest(directory)


def test_an_object_of_a_bucket_that_is_not_there_is_missing(bucket: Bucket) -> None:
    with pytest.raises(Corrupt, match=f"{bucket.path}-other/data is missing"):
        read_file(RemotePath(f"{bucket.path}-other/data"))


OPTIONS = {"key": "the-key-of-a-user", "secret": "the-secret-of-a-user", "token": "the-token-of-a-user"}


@pytest.mark.parametrize("configured", [{}, OPTIONS], ids=["environment", "configuration"])
def test_credentials_that_a_store_repeats_are_in_no_error(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, configured: dict[str, str]
) -> None:
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": bucket.store.url, **configured})
    path = bucket.put("data", bytes(100))
    with RangeReader() as reader:
        reader.read_into(path, 0, bytearray(10))
        bucket.store.repeats = True
        with pytest.raises(StorageError, match=f"refused to read {path}") as caught:
            reader.read_into(path, 10, bytearray(10))
    message = caught.value.render()
    assert "HTTP_X_AMZ_SECURITY_TOKEN: *** HTTP_AUTHORIZATION: AWS4-HMAC-SHA256 Credential=***/" in message
    assert not [secret for secret in (*CREDENTIALS.values(), *OPTIONS.values()) if secret in message]
    assert "permission to read" in caught.value.next_step
    # A traceback shows the whole chain.
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
