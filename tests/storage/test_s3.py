"""An S3 store, through the backend that a user would install: names, ranges, checks and faults."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from paddleformers_fc.errors import Corrupt, NotACheckpoint, StorageError
from paddleformers_fc.storage.files import exists, list_directory, read_file, size_of
from paddleformers_fc.storage.manifest import MANIFEST_NAME, read_manifest, verify_files
from paddleformers_fc.storage.paths import RemotePath
from tests.storage.buckets import CREDENTIALS, Bucket
from tests.storage.support import STATE, RangeReader, save


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
