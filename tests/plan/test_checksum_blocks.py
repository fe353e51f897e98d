"""The blocks that a plan reads, against every byte of every region counted one by one."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import example, given, strategies as st

from paddleformers_fc.mapping.boxes import Box
from paddleformers_fc.plan.block_owners import RecordedBlocks, byte_runs
from paddleformers_fc.plan.items import StoredPart
from paddleformers_fc.storage.checksum import FileChecksum
from tests.harness.sampling import thorough


@st.composite
def parts(draw: st.DrawFn) -> StoredPart:
    """A region of a small stored box."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    low = tuple(draw(st.integers(0, length)) for length in shape)
    high = tuple(draw(st.integers(lo, length)) for lo, length in zip(low, shape, strict=True))
    dtype = draw(st.sampled_from(["uint8", "float16", "float32"]))
    return StoredPart("a", draw(st.integers(0, 40)), shape, Box(low, high), dtype)


def bytes_of(part: StoredPart) -> set[int]:
    """Every byte of a region, the slow way."""
    width = np.dtype(part.dtype).itemsize
    ranges = [range(lo, hi) for lo, hi in zip(part.part.lo, part.part.hi, strict=True)]
    found: set[int] = set()
    for place in itertools.product(*ranges):
        index = int(np.ravel_multi_index(place, part.shape)) if place else 0
        found.update(range(part.begin + index * width, part.begin + (index + 1) * width))
    return found


COLUMN = StoredPart("a", 3, (6, 6), Box((0, 2), (6, 3)), "float32")
SLAB = StoredPart("a", 0, (5, 4, 3), Box((1, 0, 1), (5, 2, 2)), "uint8")


def blocks_read(parts: list[StoredPart], block_bytes: dict[str, int], size: int = 2000) -> dict[str, list[int]]:
    """The blocks that a rank alone compares, of files of one size."""
    files = {
        path: FileChecksum(path, size, "", length, bytes(8 * -(-size // length)))
        for path, length in block_bytes.items()
    }
    blocks = RecordedBlocks(files)
    return blocks.owned([blocks.reads(parts, "")], 0)


@thorough(400)
@given(parts(), st.sampled_from([1, 2, 3, 5, 8, 50]))
@example(COLUMN, 5)
@example(SLAB, 2)
def test_the_blocks_of_a_region_are_those_that_hold_a_byte_of_it_and_no_others(part: StoredPart, length: int) -> None:
    found = sorted({at // length for at in bytes_of(part)})
    assert blocks_read([part], {"a": length}) == ({"a": found} if found else {})


def test_regions_of_several_files_are_counted_by_the_blocks_of_each_file() -> None:
    left, right = (StoredPart(name, 100, (8,), Box((0,), (8,)), "uint8") for name in "ab")
    assert blocks_read([left, right], {"a": 10, "b": 1000}) == {"a": [10], "b": [0]}


def test_a_region_of_many_rows_costs_steps_by_blocks_and_not_by_rows() -> None:
    part = StoredPart("a", 0, (1 << 20, 64), Box((0, 5), (1 << 20, 6)), "float32")
    assert list(byte_runs(part, 4 << 20)) == [(20, 64 * 4 * ((1 << 20) - 1) + 23)]
