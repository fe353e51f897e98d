"""What the writer writes is what the safetensors library reads; what it could not write well it refuses."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddleformers_fc.errors import FormatError, StorageError
from paddleformers_fc.storage import files
from paddleformers_fc.storage.checksum import checksum_of
from paddleformers_fc.storage.safetensors import TensorWriter, layout_file, read_header
from tests.storage.support import write_tensors

PAIR = [("a", "F32", (2, 3)), ("b", "BF16", (4,))]


def test_tensors_lie_in_the_declared_order_from_an_aligned_start(tmp_path: Path) -> None:
    for length in range(0, 4200, 61):
        entries = [("z" * length, "F64", (1,)), ("a", "F32", (1,))]
        path = tmp_path / str(length)
        write_tensors(path, entries, {"z" * length: np.zeros(1), "a": np.zeros(1, np.float32)})
        header = read_header(path)
        assert list(header.tensors) == ["z" * length, "a"]
        assert header.tensors["z" * length].begin % 4096 == 0


def test_every_kind_of_buffer_is_taken(tmp_path: Path) -> None:
    array = np.arange(4, dtype=np.float32)
    buffers: list[Any] = [array, array.tobytes(), bytearray(array.tobytes()), memoryview(array), array.view(np.uint32)]
    for number, buffer in enumerate(buffers):
        write_tensors(tmp_path / str(number), [("x", "F32", (4,))], {"x": buffer})
        np.testing.assert_array_equal(load_file(tmp_path / str(number))["x"], array)


@pytest.mark.parametrize(
    ("entries", "metadata", "message"),
    [
        ([("a", "F32", (1,)), ("a", "F32", (1,))], {}, "'a' is already in use"),
        ([("__metadata__", "F32", (1,))], {}, "'__metadata__' is already in use"),
        ([("a", "float32", (1,))], {}, "Unknown tensor dtype 'float32'"),
        ([("a", "F32", (2, -1))], {}, r"'a' has the shape \[2, -1\]"),
        ([("a\ud800", "F32", (1,))], {}, "not valid Unicode"),
        ([], {"a": 1}, r"__metadata__\['a'\] is not a string"),
        ([], {"a": "x" * 100_000_000}, "and at most 100000000"),
    ],
)
def test_an_invalid_declaration_is_rejected_before_a_file_is_created(
    tmp_path: Path, entries: Any, metadata: Any, message: str
) -> None:
    with pytest.raises(FormatError, match=message):
        write_tensors(tmp_path / "x", entries, {}, metadata)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (np.zeros((3, 2), np.float32).T, "not C-contiguous"),
        (memoryview(bytes(48))[::2], "not contiguous"),
        (np.zeros(6, ">f4"), "big-endian"),
    ],
)
def test_a_buffer_that_is_not_the_bytes_of_a_tensor_is_refused(tmp_path: Path, buffer: Any, message: str) -> None:
    writer = opened(tmp_path / "x", PAIR)
    with pytest.raises(FormatError, match=message):
        writer.write(0, buffer)
    with pytest.raises(FormatError, match="0 of 32 bytes were given"):
        writer.close()


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(StorageError, match="EEXIST"):
        write_tensors(tmp_path / "x", [], {})
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="EEXIST"):
        write_tensors(tmp_path / "link", [], {})
    assert (tmp_path / "x").read_text() == "mine"
    assert not (tmp_path / "elsewhere").exists()


def test_only_directories_below_the_root_are_created(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a" / "b" / "x", [], {}, root=tmp_path)
    assert (tmp_path / "a" / "b" / "x").exists()
    with pytest.raises(StorageError, match="ENOENT"):
        write_tensors(tmp_path / "gone" / "a" / "x", [], {}, root=tmp_path / "gone")
    assert not (tmp_path / "gone").exists()
    with pytest.raises(FormatError, match="is not inside"):
        write_tensors(tmp_path / "x", [], {}, root=tmp_path / "a")


class StingyOs:
    """An ``os`` that accepts few bytes per write, and none from some point on."""

    def __init__(self, accepted: int, full_after: int = 10**9) -> None:
        self._accepted = accepted
        self._left = full_after

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        if self._left <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = os.pwrite(descriptor, data[: self._accepted], offset)
        self._left -= count
        return count


def test_a_write_that_accepts_nothing_ends_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = opened(tmp_path / "x")
    monkeypatch.setattr(files, "os", StingyOs(accepted=0))
    with pytest.raises(StorageError, match="no byte was accepted"):
        writer.write(0, b"aaacccccdd")
    writer.abandon()


FOUR = [("a", "U8", (3,)), ("b", "U8", (0,)), ("c", "U8", (5,)), ("d", "U8", (2,))]


def opened(path: Path, entries: Any = FOUR) -> TensorWriter:
    return TensorWriter(files.RandomAccessWriter(path), layout_file(path, entries, {"made": "here"}))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_pieces_that_come_in_any_order_are_the_declared_tensors(tmp_path: Path, order: tuple[int, ...]) -> None:
    pieces = [(0, b"aa"), (2, b"accc"), (6, b"ccdd")]
    writer = opened(tmp_path / "x")
    assert [writer.write(*pieces[number]) for number in order] == [False, False, True]
    checksum = writer.close()
    ordered = write_tensors(tmp_path / "y", FOUR, {"a": b"aaa", "b": b"", "c": b"ccccc", "d": b"dd"}, {"made": "here"})
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()
    assert (checksum.digest, checksum.blocks) == (ordered.digest, ordered.blocks)
    assert checksum == checksum_of("x", (tmp_path / "x").read_bytes())


def test_many_threads_write_one_file_and_one_of_them_learns_that_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "x"
    writer = opened(path, [("x", "U32", (200, 999))])
    with ThreadPoolExecutor(8) as pool:
        completed = list(pool.map(lambda row: writer.write(row * 999 * 4, np.full(999, row, np.uint32)), range(200)))
    assert sum(completed) == 1
    writer.close()
    assert (load_file(path)["x"] == np.arange(200)[:, None]).all()


@pytest.mark.parametrize(("begin", "buffer"), [(-1, b"x"), (9, b"xx"), (10, b"x")])
def test_bytes_behind_the_tensors_are_refused(tmp_path: Path, begin: int, buffer: bytes) -> None:
    writer = opened(tmp_path / "x")
    with pytest.raises(
        FormatError, match=f"the bytes from {begin} to {begin + len(buffer)} were given, and its tensor"
    ):
        writer.write(begin, buffer)
    writer.abandon()
    assert (tmp_path / "x").stat().st_size == 4096


@pytest.mark.parametrize(("pieces", "count"), [([], 0), ([(3, b"ccccc")], 5), ([(0, b"aaaccccc"), (0, b"aaa")], 11)])
def test_a_file_that_was_not_given_every_byte_once_is_refused_and_closed(
    tmp_path: Path, pieces: list[tuple[int, bytes]], count: int
) -> None:
    writer = opened(tmp_path / "x")
    for begin, buffer in pieces:
        writer.write(begin, buffer)
    with pytest.raises(FormatError, match=f"{count} of 10 bytes were given"):
        writer.close()
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if os.path.realpath(fd) == str(tmp_path / "x")]


def test_short_writes_of_a_shared_file_continue_and_a_full_disk_names_the_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "os", StingyOs(accepted=2))
    writer = opened(tmp_path / "x")
    writer.write(0, b"aaacccccdd")
    writer.close()
    assert load_file(tmp_path / "x")["c"].tobytes() == b"ccccc"
    writer = opened(tmp_path / "y")
    monkeypatch.setattr(files, "os", StingyOs(accepted=2, full_after=3))
    with pytest.raises(StorageError, match=r"(?s)byte 4103.*ENOSPC.*Free space"):
        writer.write(3, b"ccccc")
    writer.abandon()


def test_a_shared_file_that_cannot_be_synced_is_closed_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BrokenOs(StingyOs):
        def fsync(self, descriptor: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

    writer = opened(tmp_path / "x")
    writer.write(0, b"aaacccccdd")
    monkeypatch.setattr(files, "os", BrokenOs(accepted=100))
    with pytest.raises(StorageError, match="EIO"):
        writer.close()
    monkeypatch.setattr(files, "os", os)
    with pytest.raises(StorageError, match="is already closed"):
        writer.close()
