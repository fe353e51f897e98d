"""Files of a store: exact ranges, and every fault as an error of ours that names URL and offset."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from paddleformers_fc.errors import Corrupt, FormatError, NotACheckpoint, OptionError, StorageError
from paddleformers_fc.storage import executor, files, remote, remote_writes
from paddleformers_fc.storage.checksum import checksum_of
from paddleformers_fc.storage.executor import ReadPool
from paddleformers_fc.storage.files import exists, is_directory, is_file, list_directory, read_file, size_of
from paddleformers_fc.storage.identities import identities_of
from paddleformers_fc.storage.manifest import MANIFEST_NAME, read_manifest, verify_files
from paddleformers_fc.storage.operations import row_major, strided
from paddleformers_fc.storage.paths import RemotePath, parse_path, parse_target
from paddleformers_fc.storage.remote_writes import (
    RemoteFileWriter,
    compare_uploaded,
    remove_remote,
    write_remote,
)
from paddleformers_fc.storage.safetensors import FileLayout, TensorWriter
from tests.harness.limits import LIMIT
from tests.storage.buckets import CREDENTIALS, Bucket
from tests.storage.serving import Served, serving
from tests.storage.support import STATE, WEIGHTS, RangeReader, save

CONTENT = np.random.default_rng(0).bytes(100_000)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path) as one:
        yield one


@pytest.fixture
def data(served: Served, tmp_path: Path) -> RemotePath:
    """A file of a web server, ``data`` of the test's directory."""
    (tmp_path / "data").write_bytes(CONTENT)
    return at(served, "data")


@pytest.fixture
def memory() -> Iterator[RemotePath]:
    """An empty directory in fsspec's memory."""
    path = RemotePath(f"memory://{uuid.uuid4().hex}")
    yield path
    store = fsspec.filesystem("memory")
    if store.exists(path.url):
        store.rm(path.url, recursive=True)


@pytest.fixture(params=["memory", "s3"])
def store(request: pytest.FixtureRequest) -> RemotePath:
    """An empty directory of either store."""
    if request.param == "memory":
        return request.getfixturevalue("memory")
    return request.getfixturevalue("bucket").path


def put(directory: RemotePath, name: str, content: bytes) -> RemotePath:
    with fsspec.open((directory / name).url, "wb") as file:
        file.write(content)
    return directory / name


def upload(source: Path, target: RemotePath) -> RemotePath:
    for path in files.files_within(source):
        put(target, path.relative_to(source).as_posix(), path.read_bytes())
    return target


def at(served: Served, name: str = "") -> RemotePath:
    found = parse_path(f"{served.url}/{name}")
    assert isinstance(found, RemotePath)
    return found


def test_names_are_stated_and_listed_as_in_a_directory(store: RemotePath) -> None:
    put(store, "a/b.json", b"12345")
    put(store, "a/c.json", b"")
    put(store, "same/same/d.json", b"")
    assert [path.name for path in list_directory(store / "a")] == ["b.json", "c.json"]
    assert [path.name for path in list_directory(store / "same")] == ["same"]
    assert list_directory(store / "nothing") == []
    assert (exists(store / "a/b.json"), exists(store / "a/d.json")) == (True, False)
    assert (is_file(store / "a/b.json"), is_file(store / "a")) == (True, False)
    assert (is_directory(store / "a"), is_directory(store / "x")) == (True, False)
    assert size_of(store / "a/b.json") == 5
    assert (read_file(store / "a/b.json"), read_file(store / "a/c.json")) == (b"12345", b"")


def test_a_file_holds_no_names_and_a_directory_may_be_empty(memory: RemotePath) -> None:
    put(memory, "a/b.json", b"12345")
    fsspec.filesystem("memory").makedirs((memory / "empty").url)
    assert list_directory(memory / "a/b.json") == []
    assert (is_directory(memory / "empty"), list_directory(memory / "empty")) == (True, [])
    with pytest.raises(FormatError, match="is not a regular file"):
        read_file(memory / "empty")


def test_a_range_arrives_and_nothing_else_is_requested(served: Served, data: RemotePath) -> None:
    array = np.zeros(250, np.float32)
    with RangeReader() as reader:
        reader.read_into(data, 777, array)
    assert array.tobytes() == CONTENT[777:1777]
    assert served.ranges == [("data", 777, 1000)]


def test_a_long_range_comes_in_parts_at_a_time(
    served: Served, data: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PART_BYTES", 1000)
    buffer = bytearray(9_500)
    with files.open_regular(data) as file:
        files.read_into(file, 100, buffer)
    assert bytes(buffer) == CONTENT[100:9600]
    assert sorted(length for _, _, length in served.ranges) == [500, *[1000] * 9]


@pytest.mark.parametrize(("offset", "got"), [(4000, 96), (4096, 0), (9999, 0)])
def test_a_file_that_ends_early_is_corrupt_and_the_error_has_the_position(
    memory: RemotePath, offset: int, got: int
) -> None:
    path = put(memory, "3.bin", bytes(4096))
    with RangeReader() as reader, pytest.raises(Corrupt) as caught:
        reader.read_into(path, offset, bytearray(200))
    assert "3.bin ends too early" in caught.value.what
    assert caught.value.where == f"{path}, byte {offset + got}"
    assert caught.value.evidence == (f"requested 200 bytes from byte {offset}, got {got}",)


@pytest.mark.parametrize(
    ("change", "message", "place"),
    [
        (lambda path: path.write_bytes(bytes(1000)), "ends too early", "/data, byte 1000"),
        (lambda path: path.unlink(), "/data is missing", "/data"),
    ],
    ids=["shrinks", "disappears"],
)
def test_a_file_that_changes_while_it_is_read_is_corrupt(
    data: RemotePath, tmp_path: Path, change: Callable[[Path], object], message: str, place: str
) -> None:
    with RangeReader() as reader:
        reader.read_into(data, 0, bytearray(10))
        change(tmp_path / "data")
        with pytest.raises(Corrupt, match=message) as caught:
            reader.read_into(data, 2000, bytearray(10))
    assert place in caught.value.where


def _broken(sent: bytes) -> bytes:
    raise ConnectionError("the test cuts the line")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda sent: sent[:-1], "(?s)got 49.*connection was cut"),
        (lambda sent: sent + b"x", "(?s)got 51.*does not answer range requests"),
        (lambda sent: b"", "(?s)got 0.*connection was cut"),
        (_broken, "refused to read .*/data"),
    ],
)
def test_an_answer_of_another_length_or_none_is_refused(
    served: Served, data: RemotePath, answer: Callable[[bytes], bytes], message: str
) -> None:
    with RangeReader() as reader:
        reader.read_into(data, 0, bytearray(10))
        served.answer = answer
        with pytest.raises(StorageError, match=message) as caught:
            reader.read_into(data, 100, bytearray(50))
    assert caught.value.where.endswith("/data, byte 100")


def test_a_missing_file_a_refused_one_and_a_failing_store_are_distinguished(served: Served, data: RemotePath) -> None:
    with pytest.raises(Corrupt, match="gone is missing"):
        read_file(at(served, "gone"))
    for status in (401, 403, 500, 503):
        served.refuse["data"] = status
        with pytest.raises(StorageError, match=f"(?s)refused to access .*data.*{status}") as caught:
            read_file(data)
        assert ("permission to read" in caught.value.next_step) == (status in (401, 403))
        with pytest.raises(StorageError):
            exists(data)


def test_a_store_that_is_not_there_is_an_error_of_storage() -> None:
    with pytest.raises(StorageError, match="refused to access http://127"):
        read_file(RemotePath("http://127.0.0.1:9/run/flex_checkpoint.json"))


def test_an_unknown_protocol_and_a_backend_that_is_not_installed_are_options() -> None:
    with pytest.raises(OptionError, match=r"(?s)fsspec does not accept nosuch://.*Protocol not known"):
        exists(RemotePath("nosuch://bucket/run"))
    fsspec.register_implementation("notinstalled", "nowhere.at.all.FileSystem", clobber=True)
    with pytest.raises(OptionError, match="backend of fsspec for notinstalled:// is not installed"):
        exists(RemotePath("notinstalled://bucket/run"))


def test_a_backend_with_an_extra_is_installed_by_the_command_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    imported = importlib.import_module("fsspec.registry")._registry
    monkeypatch.delitem(imported, "s3", raising=False)  # An earlier test may have imported it.
    with pytest.raises(OptionError, match=r'pip install "paddleformers-fc\[s3\]"'):
        exists(RemotePath("s3://bucket/never-asked-for"))


class Telling(fsspec.AbstractFileSystem):
    """A backend whose errors repeat everything they know."""

    protocol = "telling"

    def info(self, path: str, **_: object) -> dict[str, object]:
        """Fail."""
        key = self.storage_options["secret"]
        raise ValueError(f"cannot sign {path} for ann:{key} at https://ann:pass@host/{path}?X-Signature=abc&Key=def")


def test_credentials_are_in_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("telling", Telling, clobber=True)
    monkeypatch.setitem(fsspec.config.conf, "telling", {"secret": "wJalrXUtnFEMI/K7MDENG"})
    with pytest.raises(StorageError, match="cannot sign") as caught:
        exists(RemotePath("telling://bucket/run"))
    message = caught.value.render()
    assert "***" in message
    assert not [word for word in ("wJalr", "pass", "abc", "def") if word in message]
    # A traceback shows the whole chain.
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_damage_at_a_store_is_found_at_its_level(memory: RemotePath, tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-3", 7)
    listed = read_manifest(upload(tmp_path / "checkpoint-3", memory / "checkpoint-3"))
    verify_files(memory / "checkpoint-3", listed, "full")
    damaged = bytearray((tmp_path / "checkpoint-3" / WEIGHTS).read_bytes())
    damaged[-1] ^= 1
    put(memory, f"checkpoint-3/{WEIGHTS}", bytes(damaged))
    put(memory, f"checkpoint-3/{STATE}", b"{}")
    verify_files(memory / "checkpoint-3", listed, "off")
    with pytest.raises(Corrupt, match="truncated: 2 of"):
        verify_files(memory / "checkpoint-3", listed, "size")
    with pytest.raises(Corrupt, match=r"(?s)truncated: 2 of.*does not match its checksum"):
        verify_files(memory / "checkpoint-3", listed, "full")


def test_a_file_that_is_replaced_while_it_is_read_is_refused_at_the_end(data: RemotePath, tmp_path: Path) -> None:
    ends = contextlib.ExitStack()
    reader = ends.enter_context(RangeReader(identities=identities_of([data])))
    reader.read_into(data, 0, bytearray(10))
    (tmp_path / "data").write_bytes(CONTENT[:-1] + b"x")
    reader.read_into(data, 10, bytearray(10))
    with pytest.raises(Corrupt, match="replaced or changed after"):
        ends.close()


def test_the_error_of_a_read_is_not_hidden_by_the_look_at_the_end(data: RemotePath) -> None:
    with pytest.raises(Corrupt, match="ends too early"), RangeReader(identities=identities_of([data])) as reader:
        reader.read_into(data, 99_950, bytearray(100))


def test_an_untagged_object_is_identified_by_its_size(served: Served, data: RemotePath, tmp_path: Path) -> None:
    served.tags = False
    identities = identities_of([data])
    (tmp_path / "data").write_bytes(CONTENT + b"x")
    with RangeReader(identities=identities) as reader, pytest.raises(Corrupt, match="replaced or changed"):
        reader.read_into(data, 0, bytearray(10))


def test_files_are_checked_concurrently(memory: RemotePath) -> None:
    meeting = threading.Barrier(remote.AT_ONCE, timeout=LIMIT)
    paths = [memory / str(number) for number in range(remote.AT_ONCE)]
    found = files.map_paths(lambda path: meeting.wait() >= 0 and path.name, paths, memory)
    assert list(found) == [path.name for path in paths]


@pytest.mark.parametrize(
    ("rows", "columns", "first", "requests", "over"), [(8, 1 << 20, 0, 8, 1.05), (4096, 2048, 512, 2, 4)]
)
def test_a_slice_of_long_rows_reads_what_it_needs_and_one_of_short_rows_is_few_requests(
    served: Served, tmp_path: Path, rows: int, columns: int, first: int, requests: int, over: float
) -> None:
    whole = np.random.default_rng(0).integers(0, 255, (rows, columns), np.uint8)
    (tmp_path / "matrix").write_bytes(whole.tobytes())
    width = columns // (4 if first else 2)
    for out in (np.zeros((rows, width), np.uint8), np.zeros((width, rows), np.uint8).T):
        served.ranges.clear()
        strides = row_major(whole.shape, 1), out.strides
        made = strided(at(served, "matrix"), first, out.shape, strides, (out.dtype, out.dtype), out.ctypes.data, out)
        assert made is not None
        with ReadPool() as pool:
            pool.run([made])
        assert np.array_equal(out, whole[:, first : first + width])
        assert served.bytes <= over * out.nbytes
        assert len(served.ranges) <= requests


@given(st.data())
def test_parts_are_requested_with_cheap_gaps_and_arrive_in_their_places(data: st.DataObject) -> None:
    content = np.random.default_rng(0).integers(0, 255, 3000, np.uint8)
    gap, ratio, free = (data.draw(st.integers(0, 60)) for _ in range(3))
    begins = sorted(data.draw(st.lists(st.integers(0, 2900), min_size=1, max_size=80)))
    outs = [np.zeros(data.draw(st.integers(1, 100)), np.uint8) for _ in begins]
    parts = [(begin, out.size, out.ctypes.data) for begin, out in zip(begins, outs, strict=True)]
    asked: list[tuple[int, int]] = []

    class Store:
        def fetch(self, ranges: Any) -> list[bytes]:
            asked.extend(ranges)
            assert len(ranges) <= 64
            return [content[low:high].tobytes() for low, high in ranges]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "GAP_BYTES", gap)
        patch.setattr(executor, "MAX_GAP_RATIO", ratio)
        patch.setattr(executor, "FREE_BYTES", free)
        executor._fetch(Store(), parts)  # type: ignore[arg-type]
    for begin, out in zip(begins, outs, strict=True):
        assert np.array_equal(out, content[begin : begin + out.size])
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(asked)), "no byte is requested twice"


# ---- S3, through the backend that a user would install.


def test_changes_of_another_client_after_a_listing_are_seen(bucket: Bucket) -> None:
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
    with RangeReader() as reader:
        reader.read_into(directory / STATE, 0, bytearray(1))
        bucket.remove(f"checkpoint-3/{STATE}")
        with pytest.raises(Corrupt, match=f"{directory}/{STATE} is missing"):
            reader.read_into(directory / STATE, 0, bytearray(1))
    with pytest.raises(Corrupt, match=f"{directory}/{STATE} is missing"):
        read_file(directory / STATE)
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


# ---- Files that are written to an S3 store: parts, deferred files, what is read again, and refusals.


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
