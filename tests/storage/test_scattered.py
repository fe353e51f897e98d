"""Many short ranges arrive where they belong, and errors are those of any read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from paddleformers_fc.errors import Corrupt, StorageError
from paddleformers_fc.storage import files
from paddleformers_fc.storage.files import MOST_BUFFERS, OpenFile, open_regular
from paddleformers_fc.storage.rows import ScatterList, read_scattered
from tests.harness.sampling import thorough

SIZE = 1 << 20


@pytest.fixture(scope="module")
def data() -> bytes:
    return np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8).tobytes()


@pytest.fixture
def file(tmp_path: Path, data: bytes) -> Iterator[OpenFile]:
    (tmp_path / "rows").write_bytes(data)
    with open_regular(tmp_path / "rows") as one:
        yield one


def rows_into(array: np.ndarray[Any, Any], offsets: list[int]) -> ScatterList:
    """Rows of the array, in order."""
    addresses = array.ctypes.data + array.strides[0] * np.arange(len(offsets), dtype=np.int64)
    return ScatterList.alike(np.array(offsets, np.int64), addresses, array.shape[1])


@pytest.mark.parametrize("count", [0, 1, 255, 1283])
@pytest.mark.parametrize("length", [1, 7, 512, 4096])
def test_rows_arrive_where_they_belong(file: OpenFile, data: bytes, count: int, length: int) -> None:
    offsets = [int(one) for one in np.random.default_rng(count).integers(0, SIZE - length + 1, count)]
    array = np.zeros((count, length + 3), np.uint8)
    read_scattered(file, rows_into(array[:, :length], offsets))
    assert [bytes(row[:length]) for row in array] == [data[offset : offset + length] for offset in offsets]
    assert not array[:, length:].any(), "not a byte too many"


@pytest.mark.parametrize("count", [2, 3, MOST_BUFFERS, MOST_BUFFERS + 1, 3 * MOST_BUFFERS + 5])
@pytest.mark.parametrize("length", [1, 300])
def test_rows_that_follow_one_another_arrive_where_they_belong(
    file: OpenFile, data: bytes, count: int, length: int
) -> None:
    array = np.zeros((count, length + 3), np.uint8)
    read_scattered(file, rows_into(array[:, :length], list(range(5, 5 + count * length, length))))
    assert array[:, :length].tobytes() == data[5 : 5 + count * length]
    assert not array[:, length:].any(), "not a byte too many"


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
    with open_regular(tmp_path / "rows") as file:
        rows = ScatterList(offsets, array.ctypes.data + starts, lengths)
        if missing:
            os.truncate(tmp_path / "rows", end - missing)
            with pytest.raises(Corrupt, match="ends too early"):
                read_scattered(file, rows)
        else:
            read_scattered(file, rows)
    expected = np.zeros_like(array)
    for start, offset, length in zip(starts, offsets, lengths, strict=True):
        if offset + length <= end - missing:
            expected[start : start + length] = np.frombuffer(data, np.uint8, length, offset)
        else:
            array[start : start + length] = 0
    assert array.tobytes() == expected.tobytes(), "every row that is whole, and not a byte beside the rows"


@pytest.mark.parametrize("missing", [1, 8, 9, 64, 8 * MOST_BUFFERS])
def test_a_file_that_ends_within_successive_rows_is_named_with_the_byte(
    tmp_path: Path, data: bytes, missing: int
) -> None:
    """Also where it shrank after it was opened."""
    path, count = tmp_path / "rows", 2 * MOST_BUFFERS
    path.write_bytes(data[: 8 * count])
    array = np.zeros((count, 8), np.uint8)
    with open_regular(path) as file:
        os.truncate(path, 8 * count - missing)
        with pytest.raises(Corrupt, match="ends too early") as caught:
            read_scattered(file, rows_into(array, list(range(0, 8 * count, 8))))
    assert caught.value.where == f"{path}, byte {8 * count - missing}"
    assert array.tobytes()[: 8 * count - missing] == data[: 8 * count - missing]


@pytest.mark.parametrize("answer", [0, 1, 12, 16])
def test_a_read_that_the_system_cuts_short_is_read_to_its_end(
    file: OpenFile, data: bytes, monkeypatch: pytest.MonkeyPatch, answer: int
) -> None:
    """As of a signal, or of a file system that gives less at a time."""
    original, array = os.preadv, np.zeros((4, 8), np.uint8)

    def short(descriptor: int, buffers: Any, offset: int) -> int:
        if len(buffers) == 1:
            return original(descriptor, buffers, offset)
        array.reshape(-1)[:answer] = np.frombuffer(data, np.uint8, answer, offset)
        return answer

    monkeypatch.setattr(files.os, "preadv", short)
    read_scattered(file, rows_into(array, [3, 11, 19, 27]))
    assert array.tobytes() == data[3:35]


@pytest.mark.parametrize("offsets", [[0, 8], [0, 9]])
def test_a_row_that_is_cut_short_to_the_length_of_another_is_named(
    tmp_path: Path, data: bytes, offsets: list[int]
) -> None:
    (tmp_path / "rows").write_bytes(data[: offsets[1] + 8])
    array = np.zeros(24, np.uint8)
    with open_regular(tmp_path / "rows") as file:
        rows = ScatterList(np.array(offsets), array.ctypes.data + np.array([0, 8]), np.array([8, 16]))
        with pytest.raises(Corrupt, match="ends too early"):
            read_scattered(file, rows)


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
    with open_regular(path) as file:
        if first is None:
            read_scattered(file, rows_into(array, offsets))
        else:
            with pytest.raises(Corrupt, match="ends too early") as caught:
                read_scattered(file, rows_into(array, offsets))
            assert caught.value.where == f"{path}, byte {max(first, min(SIZE, first + length))}"


def test_a_file_that_was_closed_and_memory_that_is_not_there_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "rows").write_bytes(data)
    array = np.zeros((3, 8), np.uint8)
    with open_regular(tmp_path / "rows") as file:
        for count in (1, 2):
            nowhere = ScatterList.alike(8 * np.arange(count), np.full(count, 4096, np.int64), 8)
            with pytest.raises(StorageError, match="EFAULT"):
                read_scattered(file, nowhere)
    for offsets in ([0, 8, 16], [0, 9, 18]):
        with pytest.raises(StorageError, match="EBADF"):
            read_scattered(file, rows_into(array, offsets))
