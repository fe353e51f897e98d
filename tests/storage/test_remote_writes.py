"""Files that are written to an S3 store: parts, deferred files, what is read again, and refusals."""

from __future__ import annotations

import numpy as np
import pytest

from paddleformers_fc.errors import Corrupt, OptionError, StorageError
from paddleformers_fc.storage import remote_writes
from paddleformers_fc.storage.checksum import checksum_of
from paddleformers_fc.storage.paths import RemotePath, parse_target
from paddleformers_fc.storage.remote_writes import (
    RemoteFileWriter,
    compare_uploaded,
    remove_remote,
    write_remote,
)
from paddleformers_fc.storage.safetensors import FileLayout, TensorWriter
from tests.storage.buckets import CREDENTIALS, Bucket

PART = 5 * 1024 * 1024
"""The shortest part that S3 takes, but for the last."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_writes, "UPLOAD_BYTES", PART)


def test_a_file_in_several_parts_whose_pieces_come_out_of_order_is_stored_in_order(bucket: Bucket) -> None:
    data, header = np.random.default_rng(0).bytes(2 * PART + 77), b"the header"
    file = RemoteFileWriter(bucket.path / "a", "file", len(header) + len(data))
    writer = TensorWriter(file, FileLayout(header, (len(data),)))
    third = len(data) // 3
    for begin, end in ((2 * third, len(data)), (third, 2 * third), (0, third)):
        memory = bytearray(data[begin:end])
        assert writer.write(begin, memory) == (begin == 0)
        memory[:] = bytes(len(memory))  # The caller reuses it.
    assert bucket.files("a") == {}
    assert writer.close() == checksum_of("file", header + data)
    assert bucket.files("a") == {"file": header + data}


@pytest.mark.parametrize("size", [0, 10, 2 * PART + 1])
def test_a_deferred_file_is_visible_when_it_is_published_and_leaves_nothing_when_it_is_abandoned(
    bucket: Bucket, size: int
) -> None:
    data = np.random.default_rng(1).bytes(size)
    for publish in (False, True):
        writer = RemoteFileWriter(bucket.path, "a/file", size, deferred=True)
        writer.write(0, data)
        writer.close()
        assert bucket.files("a") == {}
        writer.publish() if publish else writer.abandon()
        del writer
        assert bucket.files("a") == ({"file": data} if publish else {})
        assert bucket.unfinished() == []


@pytest.mark.parametrize("refused", [False, True])
def test_a_file_that_is_abandoned_also_after_a_refused_part_leaves_nothing_and_keeps_the_older_one(
    bucket: Bucket, refused: bool
) -> None:
    bucket.put("a/file", b"older")
    writer = RemoteFileWriter(bucket.path, "a/file", 3 * PART)
    writer.write(0, bytes(2 * PART))
    assert bucket.unfinished() == ["a/file"]
    if refused:
        bucket.store.accepts = lambda method, path, query: method != "PUT"
        writer.write(2 * PART, bytes(10))
        with pytest.raises(StorageError):
            writer.close()
    writer.abandon()
    del writer
    assert (bucket.files("a"), bucket.unfinished()) == ({"file": b"older"}, [])


def test_every_byte_of_what_was_uploaded_is_compared(bucket: Bucket) -> None:
    wrote = write_remote(bucket.path / "a", "one", b"12345")
    assert wrote == checksum_of("one", b"12345")
    compare_uploaded(bucket.path / "a", [wrote])
    bucket.put("a/one", b"12346")
    with pytest.raises(Corrupt, match="one"):
        compare_uploaded(bucket.path / "a", [wrote])
    bucket.put("a/one", b"1234")
    with pytest.raises(Corrupt, match="one is truncated: 4 of 5 bytes"):
        compare_uploaded(bucket.path / "a", [wrote])
    remove_remote(bucket.path / "a/one")
    remove_remote(bucket.path / "a/one")
    with pytest.raises(Corrupt, match="one is missing"):
        compare_uploaded(bucket.path / "a", [wrote])


def test_a_refused_write_or_deletion_repeats_no_credentials(bucket: Bucket) -> None:
    bucket.store.accepts = lambda method, path, query: False
    for action, work in {
        "write": lambda: write_remote(bucket.path / "a", "one", b"1"),
        "delete": lambda: remove_remote(bucket.path / "a/one"),
    }.items():
        with pytest.raises(StorageError, match=f"refused to {action}") as caught:
            work()
        text = caught.value.render()
        assert f"permission to {action} it" in text
        assert not any(secret in text for secret in CREDENTIALS.values())
        assert caught.value.__cause__ is None


def test_a_web_server_is_not_a_target() -> None:
    with pytest.raises(OptionError, match=r"(?s)An export cannot be written to https://\*\*\*@host/run.*read-only"):
        parse_target("https://ann:secret@host/run", "An export")
    assert parse_target("s3://bucket/run/", "An export") == RemotePath("s3://bucket/run")
