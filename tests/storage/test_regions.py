"""Regions: any box of a stored box, into any strides and dtype, is what numpy gives, in bounded memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st

from paddleformers_fc.errors import Corrupt
from paddleformers_fc.storage.ranges import RangeReader
from paddleformers_fc.storage.regions import (
    HOT_BYTES,
    INTERLEAVED_RUN,
    RUN_BYTES,
    SHORT_RUN,
    STRIPE,
    TILE_BYTES,
    Region,
    Workspace,
    bytes_read,
    read_region,
    row_major,
    strided_axes,
    tiles_of,
)
from tests.harness.sampling import thorough

DTYPES = [
    np.dtype(one)
    for one in (
        *(np.float32, np.float16, np.float64, np.int64, np.int8, np.uint8, np.bool_),
        *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
    )
]
FLOATS = [one for one in DTYPES if one.kind in "fV"]


@dataclass(frozen=True)
class Case:
    """A region of a stored box, what it goes into, and how."""

    shape: tuple[int, ...]
    lo: tuple[int, ...]
    size: tuple[int, ...]
    dtypes: tuple[np.dtype[Any], np.dtype[Any]]
    order: tuple[int, ...]
    margins: tuple[int, ...]
    skew: int
    scratch: int
    over_read: float

    def numbers(self) -> np.ndarray[Any, Any]:
        """Every bit pattern, NaNs and infinities among them, but finite ones that float16 cannot hold if it must."""
        count = math.prod(self.shape) * self.dtypes[0].itemsize
        bits = np.random.default_rng(count).integers(0, 256, count, dtype=np.uint8)
        if self.dtypes[0] == np.bool_:
            bits &= 1
        found = bits.view(self.dtypes[0]).reshape(self.shape)
        if self.dtypes[1] == np.float16 != self.dtypes[0]:
            found = np.where(np.isfinite(found) & (abs(found) > 65000), found.dtype.type(1), found)
        return found

    def target(self) -> np.ndarray[Any, Any]:
        """A part of a larger array, its axes in another order, at any address."""
        around = [self.size[axis] + self.margins[axis] for axis in self.order]
        memory = np.zeros(self.skew + math.prod(around) * self.dtypes[1].itemsize, np.uint8)[self.skew :]
        array = memory.view(self.dtypes[1]).reshape(around)[(..., *(slice(0, self.size[axis]) for axis in self.order))]
        return array.transpose(np.argsort(self.order))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=4)))
    bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    stored = draw(st.sampled_from(DTYPES))
    wanted = draw(st.sampled_from(FLOATS)) if stored in FLOATS and draw(st.booleans()) else stored
    return Case(
        shape,
        tuple(low for low, _ in bounds),
        tuple(high - low for low, high in bounds),
        (stored, wanted),
        tuple(draw(st.permutations(range(len(shape))))),
        tuple(draw(st.sampled_from([0, 0, 1, 3])) for _ in shape),
        draw(st.sampled_from([0, 0, 1, 2, 4])),
        draw(st.sampled_from([8, 64, 1000, 1 << 20])),
        draw(st.sampled_from([1.0, 1.5, 2.0, 100.0])),
    )


def part_of(case: Case, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return values[(..., *(slice(low, low + length) for low, length in zip(case.lo, case.size, strict=True)))]


def same_bits(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    return left.shape == right.shape and left.tobytes() == right.tobytes()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@thorough(600)
@given(cases())
def test_a_region_is_what_indexing_gives(tmp_path_factory: pytest.TempPathFactory, case: Case) -> None:
    path = tmp_path_factory.getbasetemp() / "region.bin"
    values = case.numbers()
    path.write_bytes(b"12345" + values.tobytes() + b"tail")
    region = Region(path, 5, case.shape, case.lo, case.size, case.dtypes[0])
    out = case.target()
    workspace = Workspace(case.scratch)
    with RangeReader() as reader:
        count = read_region(reader, region, out, workspace, case.over_read)
    assert same_bits(out, part_of(case, values).astype(case.dtypes[1]))
    needed = math.prod(case.size) * case.dtypes[0].itemsize
    assert needed <= count <= max(1, case.over_read) * needed
    if needed:
        widths = values.itemsize, out.itemsize
        walk = strided_axes(case.size, row_major(case.shape, widths[0]), out.strides, widths)
        assert count == bytes_read(walk, widths[0], case.scratch, case.over_read)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@thorough(150)
@given(cases(), st.randoms())
def test_blocks_read_in_any_order_fill_the_whole(
    tmp_path_factory: pytest.TempPathFactory, case: Case, random: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "tiles.bin"
    values = case.numbers()
    path.write_bytes(values.tobytes())
    out = case.target()
    region = Region(path, 0, case.shape, case.lo, case.size, case.dtypes[0])
    tiles = tiles_of(region, out, case.scratch, case.over_read)
    if tiles is not None:
        order = list(range(tiles.count))
        random.shuffle(order)
        workspace = Workspace(case.scratch)
        with RangeReader() as reader:
            for number in order:
                tiles.read(number, number + 1, reader, workspace)
    assert same_bits(out, part_of(case, values).astype(case.dtypes[1]))


def test_a_contiguous_region_reads_exactly_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    path.write_bytes(values.tobytes())
    out = np.empty((3, 8), np.float32)
    workspace = Workspace()
    with RangeReader() as reader:
        assert read_region(reader, Region(path, 0, (8, 8), (2, 0), (3, 8), values.dtype), out, workspace) == 96
    assert (out == values[2:5]).all()


def test_a_piece_of_a_file_is_distributed_to_long_rows_without_scratch_memory(tmp_path: Path) -> None:
    path = tmp_path / "interleaved"
    values = np.random.default_rng(0).integers(0, 256, (3000, INTERLEAVED_RUN), dtype=np.uint8)
    path.write_bytes(values.tobytes())
    out = np.zeros((3000, 2 * INTERLEAVED_RUN), np.uint8)
    workspace = Workspace()
    with RangeReader() as reader:
        for half in (0, INTERLEAVED_RUN):
            region = Region(path, 0, values.shape, (0, 0), values.shape, values.dtype)
            assert read_region(reader, region, out[:, half : half + INTERLEAVED_RUN], workspace) == values.nbytes
        assert workspace._memory is None
    assert (out.reshape(3000, 2, INTERLEAVED_RUN) == values[:, None]).all()


def test_numbers_are_cast_while_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "cast"
    values = np.linspace(-3, 3, 24, dtype=np.float32).reshape(4, 6)
    path.write_bytes(values.tobytes())
    out = np.empty((4, 6), ml_dtypes.bfloat16)
    workspace = Workspace()
    with RangeReader() as reader:
        read_region(reader, Region(path, 0, (4, 6), (0, 0), (4, 6), values.dtype), out, workspace)
    assert (out == values.astype(ml_dtypes.bfloat16)).all()


BESIDE_A_STRIPE = [1, STRIPE - 1, STRIPE, *(times * STRIPE + 1 for times in (1, 2, 3, 8)), 5 * STRIPE - 1]


@pytest.mark.parametrize("wanted", [np.float32, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("rows", BESIDE_A_STRIPE)
def test_a_transposed_region_is_whole_also_where_it_is_just_longer_than_a_stripe(
    tmp_path: Path, rows: int, wanted: type
) -> None:
    path = tmp_path / "transposed"
    values = np.random.default_rng(rows).standard_normal((rows + 2, 70)).astype(np.float32)
    path.write_bytes(values.tobytes())
    for columns in (1, 3, 64, 65):
        out = np.full((columns, rows), 7, wanted).T
        workspace = Workspace()
        with RangeReader() as reader:
            read_region(reader, Region(path, 0, values.shape, (1, 2), out.shape, values.dtype), out, workspace)
        assert (out == values[1 : rows + 1, 2 : columns + 2].astype(wanted)).all()


# Rows and columns of a region, elements of a row in the file, and whether it is transposed.
BESIDE_A_BOUND = {
    "a direct tile": (2, TILE_BYTES // 8 + 1, TILE_BYTES // 8 + 1, False),
    "two direct tiles": (1, TILE_BYTES // 2 + 1, TILE_BYTES // 2 + 1, False),
    "scratch memory": (HOT_BYTES // 4 + 1, 2, 2, True),
    "a run of a transpose": (STRIPE + 1, RUN_BYTES // 4 + 1, RUN_BYTES // 4 + 1, True),
    "runs just short enough to be sieved": (300, SHORT_RUN // 4 - 1, SHORT_RUN // 2 - 2, False),
    "runs just too long to be sieved": (300, SHORT_RUN // 4, SHORT_RUN // 2, False),
    "gaps just too long to be sieved": (300, SHORT_RUN // 4 - 1, SHORT_RUN // 2 - 1, False),
    "rows kept in mind": (4097, 3, 7, False),
}


@pytest.mark.parametrize("beside", BESIDE_A_BOUND)
def test_a_region_just_past_a_bound_is_what_numpy_gives(tmp_path: Path, beside: str) -> None:
    rows, columns, width, transposed = BESIDE_A_BOUND[beside]
    path = tmp_path / "past"
    values = np.arange(rows * width, dtype=np.uint32).reshape(rows, width)
    path.write_bytes(values.tobytes())
    out = np.zeros((columns, rows), np.uint32).T if transposed else np.zeros((rows, columns), np.uint32)
    workspace = Workspace()
    with RangeReader() as reader:
        count = read_region(reader, Region(path, 0, values.shape, (0, 0), out.shape, values.dtype), out, workspace)
    assert (out == values[:, :columns]).all()
    assert out.nbytes <= count <= 2 * out.nbytes
    assert (count > out.nbytes) == (beside == "runs just short enough to be sieved")


def test_a_file_that_ends_early_is_named_with_the_offset(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(40))
    workspace = Workspace()
    with RangeReader() as reader, pytest.raises(Corrupt, match="short"):
        read_region(
            reader,
            Region(path, 0, (4, 4), (0, 0), (4, 4), np.dtype(np.float32)),
            np.empty((4, 4), np.float32),
            workspace,
        )
