"""Which blocks a plan reads, byte by byte, and which rank compares which: every block that is read has one owner."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from paddleformers_fc.errors import FormatError
from paddleformers_fc.mapping.boxes import Box
from paddleformers_fc.plan.block_owners import MAX_SHARING_RANKS, BlockReads, RecordedBlocks, byte_runs
from paddleformers_fc.plan.items import StoredPart
from paddleformers_fc.storage.checksum import FileChecksum
from tests.harness.sampling import thorough

LENGTH = 100


def recorded(sizes: dict[str, int], lengths: dict[str, int] | None = None) -> RecordedBlocks:
    """Files of these sizes in blocks of these lengths."""
    blocks = {path: (lengths or {}).get(path, LENGTH) for path in sizes}
    return RecordedBlocks(
        {
            path: FileChecksum(path, size, "", blocks[path], bytes(8 * -(-size // blocks[path])))
            for path, size in sizes.items()
        }
    )


def run(file: str, begin: int, end: int) -> StoredPart:
    """Successive bytes of a file."""
    return StoredPart(file, begin, (end - begin,), Box((0,), (end - begin,)), "uint8")


def owners(blocks: RecordedBlocks, everyone: list[BlockReads]) -> list[set[tuple[str, int]]]:
    """What each rank compares."""
    ranks = range(len(everyone))
    return [{(path, n) for path, found in blocks.owned(everyone, rank).items() for n in found} for rank in ranks]


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


def blocks_read(parts: list[StoredPart], lengths: dict[str, int]) -> dict[str, list[int]]:
    """The blocks that a rank alone compares, of files of one size."""
    blocks = recorded(dict.fromkeys(lengths, 2000), lengths)
    return blocks.owned([blocks.reads(parts, "")], 0)


def test_a_file_without_checksums_next_to_files_that_have_them_is_refused() -> None:
    with pytest.raises(FormatError, match="b has no recorded checksums"):
        recorded({"a": 200}).reads([run("a", 0, 200), run("b", 0, 200)], "")


@thorough(400)
@given(parts(), st.sampled_from([1, 2, 3, 5, 8, 50]))
@example(COLUMN, 5)
@example(SLAB, 2)
def test_the_blocks_of_a_region_are_those_that_hold_a_byte_of_it_and_no_others(part: StoredPart, length: int) -> None:
    found = sorted({at // length for at in bytes_of(part)})
    assert blocks_read([part], {"a": length}) == ({"a": found} if found else {})


def test_a_region_of_many_rows_costs_steps_by_blocks_and_not_by_rows() -> None:
    part = StoredPart("a", 0, (1 << 20, 64), Box((0, 5), (1 << 20, 6)), "float32")
    assert list(byte_runs(part, 4 << 20)) == [(20, 64 * 4 * ((1 << 20) - 1) + 23)]


@thorough(200)
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 680), st.integers(1, 400)), max_size=4), max_size=5
    )
)
def test_every_block_that_is_read_has_one_owner_that_reads_it(wants: list[list[tuple[str, int, int]]]) -> None:
    blocks = recorded({"a": 690, "b": 690})
    parts = [[run(file, begin, min(begin + size, 690)) for file, begin, size in rank] for rank in wants]
    everyone = [blocks.reads(rank, "one") for rank in parts]
    read = [
        {
            (one.file, n)
            for one in rank
            for n in range(one.begin // LENGTH, (one.begin + one.shape[0] - 1) // LENGTH + 1)
        }
        for rank in parts
    ]
    found = owners(blocks, everyone)
    assert all(own <= reads for own, reads in zip(found, read, strict=True))
    assert sum(map(len, found)) == len(set().union(*read, set()))


@pytest.mark.parametrize(
    ("size", "reads", "compared"),
    [
        pytest.param(190, [(0, 40), (40, 190)], [[], [0, 1]], id="a rank that reads most of it comes before others"),
        pytest.param(110, [(0, 104), (104, 110)], [[0], [1]], id="the last block is measured by its own length"),
        pytest.param(290, [None, (120, 130)], [[], [1]], id="a rank that reads nothing compares nothing"),
    ],
)
def test_a_block_belongs_to(size: int, reads: list[tuple[int, int] | None], compared: list[list[int]]) -> None:
    blocks = recorded({"a": size})
    everyone = [blocks.reads([] if ends is None else [run("a", *ends)], "one") for ends in reads]
    assert owners(blocks, everyone) == [{("a", number) for number in own} for own in compared]


def test_ranks_that_read_the_same_blocks_get_equally_many_of_all() -> None:
    blocks = recorded({"a": 8990, "b": 2990})
    alone = blocks.reads([run("a", 0, 2990)], "one")
    both = blocks.reads([run("a", 0, 8990), run("b", 0, 2990)], "one")
    found = owners(blocks, [both, both, alone, both])
    assert sorted(map(len, found)) == [30, 30, 30, 30]


def test_blocks_of_a_file_that_ranks_read_together_are_assigned_in_turn() -> None:
    blocks = recorded({"a": 3990})
    everyone = [blocks.reads([run("a", 0, 3990)], "one")] * 4
    for own in owners(blocks, everyone):
        numbers = sorted(number for _, number in own)
        assert all(later - number <= 7 for number, later in zip(numbers, numbers[1:], strict=False))


def test_ranks_that_may_read_other_bytes_compare_what_they_read_themselves() -> None:
    blocks = recorded({"a": 390})
    reads = [blocks.reads([run("a", 0, 390)], source) for source in ("one", "one", "another", "")]
    found = owners(blocks, reads)
    every = {("a", number) for number in range(4)}
    assert found[0] | found[1] == every
    assert not found[0] & found[1]
    assert found[2] == found[3] == every
    assert owners(blocks, reads[:1]) == [every]


def test_more_ranks_than_share_compare_every_block_in_each_of_their_groups() -> None:
    blocks, ranks = recorded({"a": 12_990}), MAX_SHARING_RANKS + 36
    everyone = [blocks.reads([run("a", 0, blocks.files["a"].size)], "one") for _ in range(ranks)]
    found = owners(blocks, everyone)
    for group in (found[:MAX_SHARING_RANKS], found[MAX_SHARING_RANKS:]):
        assert set().union(*group) == {("a", number) for number in range(130)}
        assert sum(map(len, group)) == 130


def test_memory_of_the_assignment_is_less_than_two_bytes_per_block_and_rank() -> None:
    blocks, ranks = recorded({"a": 9_999_990}), 60
    everyone = [blocks.reads([run("a", 100_000 * rank, 100_000 * rank + 4_000_000)], "one") for rank in range(ranks)]
    tracemalloc.start()
    try:
        own = blocks.owned(everyone, 7)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert own["a"]
    assert peak < 2 * 100_000 * ranks
