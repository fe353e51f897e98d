"""Rows of a file: any range of it, read or copied, brings exactly its bytes to their places."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from paddleformers_fc.storage.rows import Rows
from tests.harness.sampling import thorough


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, int, int, int, list[int]]:
    """Offset, length, stride, pitch and count of rows, and cuts of the file."""
    length = draw(st.integers(1, 9))
    stride, pitch = length + draw(st.integers(0, 7)), length + draw(st.integers(0, 7))
    offset, count = draw(st.integers(0, 11)), draw(st.integers(1, 6))
    size = offset + count * stride + 5
    return offset, length, stride, pitch, count, sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=6))})


@thorough(600)
@given(cases())
def test_ranges_that_make_up_a_file_fill_every_row_and_nothing_else(
    case: tuple[int, int, int, int, int, list[int]],
) -> None:
    offset, length, stride, pitch, count, cuts = case
    file = np.arange(1, cuts[-1] + 1, dtype=np.uint8)
    wanted = np.zeros(count * pitch, np.uint8)
    for row in range(count):
        wanted[row * pitch : row * pitch + length] = file[offset + row * stride : offset + row * stride + length]
    copied, read = np.zeros_like(wanted), np.zeros_like(wanted)
    for begin, end in zip(cuts, cuts[1:], strict=False):
        at = {"offset": offset, "stride": stride, "pitch": pitch, "length": length, "count": count}
        Rows(owner=copied, address=copied.ctypes.data, **at).fill(begin, memoryview(file[begin:end]))
        parts = Rows(owner=read, address=read.ctypes.data, **at).between(begin, end)
        for start, address, size in zip(parts.offsets, parts.addresses, parts.lengths, strict=True):
            assert begin <= start < start + size <= end
            low = int(address) - read.ctypes.data
            read[low : low + size] = file[start : start + size]
    np.testing.assert_array_equal(copied, wanted)
    np.testing.assert_array_equal(read, wanted)
