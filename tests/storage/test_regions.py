"""Regions: any box of a stored box, into any strides, is what numpy's indexing gives, in bounded memory."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from paddleformers_fc.errors import Corrupt
from paddleformers_fc.storage.ranges import RangeReader
from paddleformers_fc.storage.regions import Region, read_region


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int, bool]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=4)))
    bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    lo, size = tuple(b[0] for b in bounds), tuple(b[1] - b[0] for b in bounds)
    return shape, lo, size, draw(st.sampled_from([8, 64, 1 << 20])), draw(st.booleans())


@settings(max_examples=300, deadline=None)
@given(cases())
def test_a_region_is_what_indexing_gives(
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int, bool],
) -> None:
    shape, lo, size, staging, strided = case
    path = tmp_path_factory.getbasetemp() / "region.bin"
    values = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    path.write_bytes(b"12345" + values.tobytes() + b"tail")
    out = np.full(size, -1, np.float32)
    if strided:
        out = np.full(tuple(reversed(size)), -1, np.float32).transpose()
    with RangeReader() as reader:
        count = read_region(reader, Region(path, 5, shape, lo, size, values.dtype), out, staging)
    assert (out == values[tuple(slice(a, a + n) for a, n in zip(lo, size, strict=True))]).all()
    assert count <= 2 * out.nbytes or out.nbytes == 0


def test_a_contiguous_region_reads_exactly_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    path.write_bytes(values.tobytes())
    out = np.empty((3, 8), np.float32)
    with RangeReader() as reader:
        assert read_region(reader, Region(path, 0, (8, 8), (2, 0), (3, 8), values.dtype), out) == 96
    assert (out == values[2:5]).all()


def test_numbers_are_cast_while_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "cast"
    values = np.linspace(-3, 3, 24, dtype=np.float32).reshape(4, 6)
    path.write_bytes(values.tobytes())
    out = np.empty((4, 6), ml_dtypes.bfloat16)
    with RangeReader() as reader:
        read_region(reader, Region(path, 0, (4, 6), (0, 0), (4, 6), values.dtype), out)
    assert (out == values.astype(ml_dtypes.bfloat16)).all()


def test_a_file_that_ends_early_is_named_with_the_offset(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(40))
    with RangeReader() as reader, pytest.raises(Corrupt, match="short"):
        read_region(reader, Region(path, 0, (4, 4), (0, 0), (4, 4), np.dtype(np.float32)), np.empty((4, 4), np.float32))
