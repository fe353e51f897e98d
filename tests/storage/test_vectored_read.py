"""Many short ranges arrive where they belong, in batches or one by one, and errors are those of any read."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from paddleformers_fc.errors import Corrupt, StorageError
from paddleformers_fc.storage import vectored_read
from paddleformers_fc.storage.files import MOST_BUFFERS, OpenFile, open_regular
from paddleformers_fc.storage.vectored_read import BATCH, ScatterList, VectoredReader
from tests.harness.limits import LIMIT
from tests.harness.sampling import thorough

SIZE = 1 << 20
APART = [0, 9, 17, 30]
"""Offsets of rows of 8 bytes that do not follow one another, so that they take a request each."""


@pytest.fixture(params=["batches", "one by one"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the kernel's batches and lists, and as on a system that has none to give."""
    if request.param == "one by one":
        monkeypatch.setattr(vectored_read, "_taken", lambda: None)
        monkeypatch.setattr(vectored_read, "_vector", lambda: None)
    return str(request.param)


@pytest.fixture(scope="module")
def data() -> bytes:
    return np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8).tobytes()


@pytest.fixture
def file(tmp_path: Path, data: bytes) -> Iterator[OpenFile]:
    (tmp_path / "rows").write_bytes(data)
    with open_regular(tmp_path / "rows") as one:
        yield one


def apart(data: bytes) -> bytes:
    """What stands at these offsets."""
    return b"".join(data[offset : offset + 8] for offset in APART)


def rows_into(array: np.ndarray[Any, Any], offsets: list[int]) -> ScatterList:
    """Rows of the array, in order."""
    addresses = array.ctypes.data + array.strides[0] * np.arange(len(offsets), dtype=np.int64)
    return ScatterList.alike(np.array(offsets, np.int64), addresses, array.shape[1])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("count", [0, 1, BATCH - 1, BATCH, BATCH + 1, 5 * BATCH + 3])
@pytest.mark.parametrize("length", [1, 7, 512, 4096])
def test_rows_arrive_where_they_belong(file: OpenFile, data: bytes, count: int, length: int) -> None:
    offsets = [int(one) for one in np.random.default_rng(count).integers(0, SIZE - length + 1, count)]
    array = np.zeros((count, length + 3), np.uint8)
    one = VectoredReader()
    one.read(file, rows_into(array[:, :length], offsets))
    one.close()
    one.close()
    assert [bytes(row[:length]) for row in array] == [data[offset : offset + length] for offset in offsets]
    assert not array[:, length:].any(), "not a byte too many"


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("count", [2, 3, MOST_BUFFERS, MOST_BUFFERS + 1, 3 * MOST_BUFFERS + 5])
@pytest.mark.parametrize("length", [1, 300])
def test_rows_that_follow_one_another_arrive_where_they_belong(
    file: OpenFile, data: bytes, count: int, length: int
) -> None:
    array = np.zeros((count, length + 3), np.uint8)
    one = VectoredReader()
    one.read(file, rows_into(array[:, :length], list(range(5, 5 + count * length, length))))
    assert array[:, :length].tobytes() == data[5 : 5 + count * length]
    assert not array[:, length:].any(), "not a byte too many"
    assert one._queue is None or vectored_read._vector() is None, "one read, and no request per row"
    one.close()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("gap", [0, 1])
@pytest.mark.parametrize("missing", [0, 1, 5000])
def test_rows_of_different_lengths_arrive_where_they_belong(
    tmp_path: Path, data: bytes, gap: int, missing: int
) -> None:
    lengths = np.random.default_rng(0).integers(1, 50, MOST_BUFFERS + 5)
    starts = np.concatenate([[0], np.cumsum(lengths + 3)[:-1]])
    offsets = np.concatenate([[0], np.cumsum(lengths + gap)[:-1]])
    array = np.zeros(int((lengths + 3).sum()), np.uint8)
    end = int(offsets[-1] + lengths[-1])
    (tmp_path / "rows").write_bytes(data[:end])
    one = VectoredReader()
    with open_regular(tmp_path / "rows") as file:
        rows = ScatterList(offsets, array.ctypes.data + starts, lengths)
        if missing:
            os.truncate(tmp_path / "rows", end - missing)
            with pytest.raises(Corrupt, match="ends too early"):
                one.read(file, rows)
        else:
            one.read(file, rows)
            assert gap or one._queue is None or vectored_read._vector() is None, "one read, and no request per row"
    one.close()
    expected = np.zeros_like(array)
    for start, offset, length in zip(starts, offsets, lengths, strict=True):
        if offset + length <= end - missing:
            expected[start : start + length] = np.frombuffer(data, np.uint8, length, offset)
        else:
            array[start : start + length] = 0
    assert array.tobytes() == expected.tobytes(), "every row that is whole, and not a byte beside the rows"


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("missing", [1, 8, 9, 64, 8 * MOST_BUFFERS])
def test_a_file_that_ends_within_successive_rows_is_named_with_the_byte(
    tmp_path: Path, data: bytes, missing: int
) -> None:
    """Also where it shrank after it was opened."""
    path, count = tmp_path / "rows", 2 * MOST_BUFFERS
    path.write_bytes(data[: 8 * count])
    array = np.zeros((count, 8), np.uint8)
    one = VectoredReader()
    with open_regular(path) as file:
        os.truncate(path, 8 * count - missing)
        with pytest.raises(Corrupt, match="ends too early") as caught:
            one.read(file, rows_into(array, list(range(0, 8 * count, 8))))
    one.close()
    assert caught.value.where == f"{path}, byte {8 * count - missing}"
    assert array.tobytes()[: 8 * count - missing] == data[: 8 * count - missing]


def test_a_list_that_the_system_cuts_short_or_refuses_is_read_to_its_end(
    file: OpenFile, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a signal, or of a file system that gives less at a time."""
    answers = [-1, 0, 1, 12, 16]
    for answer in answers:
        monkeypatch.setattr(vectored_read, "_vector", lambda answer=answer: lambda *arguments: answer)
        array = np.zeros((4, 8), np.uint8)
        array.reshape(-1)[: max(0, answer)] = np.frombuffer(data, np.uint8, max(0, answer), 3)
        one = VectoredReader()
        one.read(file, rows_into(array, [3, 11, 19, 27]))
        one.close()
        assert array.tobytes() == data[3:35]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("offsets", [[0, 8], [0, 9]])
def test_a_row_that_is_cut_short_to_the_length_of_another_is_named(
    tmp_path: Path, data: bytes, offsets: list[int]
) -> None:
    (tmp_path / "rows").write_bytes(data[: offsets[1] + 8])
    array = np.zeros(24, np.uint8)
    one = VectoredReader()
    with open_regular(tmp_path / "rows") as file:
        rows = ScatterList(np.array(offsets), array.ctypes.data + np.array([0, 8]), np.array([8, 16]))
        with pytest.raises(Corrupt, match="ends too early"):
            one.read(file, rows)
    one.close()


@thorough(50)
@given(st.lists(st.integers(0, SIZE + 10), max_size=20), st.integers(1, 64))
def test_a_row_behind_the_end_is_named_whatever_is_beside_it(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, offsets: list[int], length: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "behind"
    if not path.exists():
        path.write_bytes(data)
    array = np.zeros((len(offsets), length), np.uint8)
    first = next((offset for offset in offsets if offset + length > SIZE), None)
    one = VectoredReader()
    with open_regular(path) as file:
        if first is None:
            one.read(file, rows_into(array, offsets))
        else:
            with pytest.raises(Corrupt, match="ends too early") as caught:
                one.read(file, rows_into(array, offsets))
            assert caught.value.where == f"{path}, byte {max(first, min(SIZE, first + length))}"
    one.close()


@pytest.mark.usefixtures("way")
def test_a_file_that_was_closed_and_memory_that_is_not_there_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "rows").write_bytes(data)
    array = np.zeros((3, 8), np.uint8)
    one = VectoredReader()
    with open_regular(tmp_path / "rows") as file:
        for count in (1, 2):
            nowhere = ScatterList.alike(8 * np.arange(count), np.full(count, 4096, np.int64), 8)
            with pytest.raises(StorageError, match="EFAULT"):
                one.read(file, nowhere)
    for offsets in ([0, 8, 16], [0, 9, 18]):
        with pytest.raises(StorageError, match="EBADF"):
            one.read(file, rows_into(array, offsets))
    one.close()


def test_a_context_is_used_again_but_never_by_two_threads_at_a_time(file: OpenFile, data: bytes) -> None:
    one, two = VectoredReader(), VectoredReader()
    array = np.zeros((4, 8), np.uint8)
    for reader in (one, two):
        reader.read(file, rows_into(array, APART))
    assert one._queue is not two._queue or one._queue is None
    kept = one._queue
    one.close()
    third = VectoredReader()
    third.read(file, rows_into(array, APART))
    assert third._queue is kept
    two.close()
    third.close()
    assert array.tobytes() == apart(data)


def test_many_threads_read_rows_of_one_file(file: OpenFile, data: bytes) -> None:
    meeting = threading.Barrier(8)

    def read(seed: int) -> bool:
        offsets = [int(one) for one in np.random.default_rng(seed).integers(0, SIZE - 64, 2000)]
        array = np.zeros((2000, 64), np.uint8)
        meeting.wait(LIMIT)
        one = VectoredReader()
        one.read(file, rows_into(array, offsets))
        one.close()
        return all(bytes(row) == data[offset : offset + 64] for row, offset in zip(array, offsets, strict=True))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(8)))


def test_a_child_process_makes_contexts_of_its_own(file: OpenFile, data: bytes) -> None:
    array = np.zeros((4, 8), np.uint8)
    one = VectoredReader()
    one.read(file, rows_into(array, APART))
    one.close()
    array[:] = 0
    child = os.fork()
    if child == 0:
        code = 1
        try:
            spare = len(vectored_read._SPARE)
            one = VectoredReader()
            one.read(file, rows_into(array, APART))
            code = 0 if array.tobytes() == apart(data) and spare == 0 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not array.any(), "the child's memory is its own"


def test_an_interrupted_read_leaves_no_results_for_the_next(file: OpenFile, data: bytes) -> None:
    array = np.zeros((4, 8), np.uint8)
    one = VectoredReader()
    one.read(file, rows_into(array, APART))
    kept = one._queue
    with pytest.raises(Corrupt):
        one.read(file, rows_into(array, [0, SIZE, 16, 24]))
    assert one._queue is None
    assert kept not in vectored_read._SPARE
    one.read(file, rows_into(array, APART))
    one.close()
    assert array.tobytes() == apart(data)
