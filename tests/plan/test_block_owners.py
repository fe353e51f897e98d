"""Which rank compares which block: every block that is read has one owner among the ranks that read the same bytes."""

from __future__ import annotations

import tracemalloc

from hypothesis import given, strategies as st

from paddleformers_fc.mapping.boxes import Box
from paddleformers_fc.plan.block_owners import MAX_SHARING_RANKS, BlockReads, RecordedBlocks
from paddleformers_fc.plan.items import StoredPart
from paddleformers_fc.storage.checksum import FileChecksum
from tests.harness.sampling import thorough

LENGTH = 100


def recorded(blocks: dict[str, int]) -> RecordedBlocks:
    files = {
        path: FileChecksum(path, count * LENGTH - 10, "", LENGTH, bytes(8 * count)) for path, count in blocks.items()
    }
    return RecordedBlocks(files)


def run(file: str, begin: int, end: int) -> StoredPart:
    """Successive bytes of a file."""
    return StoredPart(file, begin, (end - begin,), Box((0,), (end - begin,)), "uint8")


def owners(blocks: RecordedBlocks, everyone: list[BlockReads]) -> list[set[tuple[str, int]]]:
    """What each rank compares."""
    ranks = range(len(everyone))
    return [{(path, n) for path, found in blocks.owned(everyone, rank).items() for n in found} for rank in ranks]


@thorough(200)
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 680), st.integers(1, 400)), max_size=4), max_size=5
    )
)
def test_every_block_that_is_read_has_one_owner_that_reads_it(wants: list[list[tuple[str, int, int]]]) -> None:
    blocks = recorded({"a": 7, "b": 7})
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


def test_a_rank_that_reads_most_of_a_block_comes_before_others() -> None:
    blocks = recorded({"a": 2})
    everyone = [blocks.reads([run("a", 0, 40)], "one"), blocks.reads([run("a", 40, 190)], "one")]
    assert owners(blocks, everyone) == [set(), {("a", 0), ("a", 1)}]


def test_the_last_block_of_a_file_is_measured_by_its_own_length() -> None:
    blocks = RecordedBlocks({"a": FileChecksum("a", 110, "", LENGTH, bytes(16))})
    everyone = [blocks.reads([run("a", 0, 104)], "one"), blocks.reads([run("a", 104, 110)], "one")]
    assert owners(blocks, everyone) == [{("a", 0)}, {("a", 1)}]


def test_ranks_that_read_the_same_blocks_get_equally_many_of_all() -> None:
    blocks = recorded({"a": 90, "b": 30})
    alone = blocks.reads([run("a", 0, 2990)], "one")
    both = blocks.reads([run("a", 0, 8990), run("b", 0, 2990)], "one")
    found = owners(blocks, [both, both, alone, both])
    assert sorted(map(len, found)) == [30, 30, 30, 30]


def test_blocks_of_a_file_that_ranks_read_together_are_assigned_in_turn() -> None:
    blocks = recorded({"a": 40})
    everyone = [blocks.reads([run("a", 0, 3990)], "one")] * 4
    for own in owners(blocks, everyone):
        numbers = sorted(number for _, number in own)
        assert all(later - number <= 7 for number, later in zip(numbers, numbers[1:], strict=False))


def test_ranks_that_may_read_other_bytes_compare_what_they_read_themselves() -> None:
    blocks = recorded({"a": 4})
    reads = [blocks.reads([run("a", 0, 390)], source) for source in ("one", "one", "another", "")]
    found = owners(blocks, reads)
    every = {("a", number) for number in range(4)}
    assert found[0] | found[1] == every
    assert not found[0] & found[1]
    assert found[2] == found[3] == every
    assert owners(blocks, reads[:1]) == [every]


def test_more_ranks_than_share_compare_every_block_in_each_of_their_groups() -> None:
    blocks, ranks = recorded({"a": 130}), MAX_SHARING_RANKS + 36
    everyone = [blocks.reads([run("a", 0, blocks.files["a"].size)], "one") for _ in range(ranks)]
    found = owners(blocks, everyone)
    for group in (found[:MAX_SHARING_RANKS], found[MAX_SHARING_RANKS:]):
        assert set().union(*group) == {("a", number) for number in range(130)}
        assert sum(map(len, group)) == 130


def test_a_rank_that_reads_nothing_compares_nothing() -> None:
    blocks = recorded({"a": 3})
    everyone = [blocks.reads([], "one"), blocks.reads([run("a", 120, 130)], "one")]
    assert owners(blocks, everyone) == [set(), {("a", 1)}]
    assert owners(RecordedBlocks(), [BlockReads(), BlockReads()]) == [set(), set()]


def test_memory_of_the_assignment_is_less_than_two_bytes_per_block_and_rank() -> None:
    blocks, ranks = recorded({"a": 100_000}), 60
    everyone = [blocks.reads([run("a", 100_000 * rank, 100_000 * rank + 4_000_000)], "one") for rank in range(ranks)]
    tracemalloc.start()
    try:
        own = blocks.owned(everyone, 7)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert own["a"]
    assert peak < 2 * 100_000 * ranks
