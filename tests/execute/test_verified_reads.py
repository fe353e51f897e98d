"""Blocks are compared while they are read: every kind of read finds a flipped bit, and no block is hashed twice.

A file of small numbers, cut into blocks of a few hundred bytes, is read by ranks that are threads.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash

from paddleformers_fc.errors import Corrupt, FormatError
from paddleformers_fc.execute.exchange import ReadContext, Replicas, Traffic, read_redistributed
from paddleformers_fc.execute.reading import ArraySlot
from paddleformers_fc.mapping.boxes import Box, whole
from paddleformers_fc.plan.block_owners import RecordedBlocks
from paddleformers_fc.plan.items import LoadPlan, ReadItem, StoredPart
from paddleformers_fc.plan.report import Report
from paddleformers_fc.storage import executor, identities as identities_module
from paddleformers_fc.storage.checksum import BlockHasher
from paddleformers_fc.storage.executor import ReadOptions
from paddleformers_fc.storage.identities import identities_of, same_bytes_key
from paddleformers_fc.storage.paths import parse_path
from paddleformers_fc.storage.remote import RemoteStatus
from tests.execute.simulated import job, succeed

ROLE, FILE, BLOCK = "model_state", "numbers", 400
ROWS, COLUMNS = 24, 25
"""A row is a quarter of a block."""
NUMBERS = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
PLAIN, TURNED = (0, 1), (1, 0)
TWO_THREADS = ReadOptions(threads=2)


def item(name: str, rows: tuple[int, int], columns: tuple[int, int] = (0, COLUMNS), axes: Any = PLAIN) -> ReadItem:
    """Some rows and columns of the matrix as a tensor."""
    part = Box((rows[0], columns[0]), (rows[1], columns[1]))
    shape = tuple(part.shape[axis] for axis in axes)
    return ReadItem(ROLE, name, StoredPart(FILE, 0, NUMBERS.shape, part, "float32"), 0, shape, whole(shape), axes)


Items = Sequence[ReadItem]
REPLICAS = "all of it on three ranks"
READS: dict[str, Sequence[Items]] = {
    "whole blocks": [[item("a", (0, ROWS))]],
    "a block that two tensors share": [[item("a", (0, 6)), item("b", (6, ROWS))]],
    "many small tensors in a block": [[item(str(row), (row, row + 1)) for row in range(ROWS)]],
    "every second small tensor": [[item(str(row), (row, row + 1)) for row in range(0, ROWS, 2)]],
    "columns": [[item("a", (0, ROWS), (3, 9))]],
    "two halves of the columns": [[item("a", (0, ROWS), (0, 12)), item("b", (0, ROWS), (12, COLUMNS))]],
    "all of it, and columns again": [[item("a", (0, ROWS)), item("b", (0, ROWS), (3, 9))]],
    "columns, and some rows again": [[item("b", (0, ROWS), (3, 9)), item("c", (7, 19))]],
    "rows that columns overlap": [[item("a", (2, 9)), item("b", (5, ROWS), (0, 24))]],
    "a transpose": [[item("a", (0, ROWS), axes=TURNED)]],
    "columns between whole tensors": [[item("a", (0, 6)), item("b", (6, 18), (0, 5)), item("c", (18, ROWS))]],
    "rows of two ranks that share a block": [[item("a", (0, 6))], [item("b", (6, ROWS))]],
    REPLICAS: [[item("a", (0, ROWS))]] * 3,
    "columns of two ranks": [[item("a", (0, ROWS), (0, 9))], [item("b", (0, ROWS), (9, COLUMNS))]],
    "columns of one rank and all of another": [[item("a", (0, ROWS), (0, 9))], [item("b", (0, ROWS))]],
}


WAYS = [*((kind, False) for kind in READS), (REPLICAS, True)]
"""The reads, and whether the ranks read them together."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory of a file with the matrix."""
    (tmp_path / FILE).write_bytes(NUMBERS.tobytes())
    return tmp_path


def recorded_blocks() -> RecordedBlocks:
    hasher = BlockHasher(BLOCK)
    hasher.update(NUMBERS.tobytes())
    return RecordedBlocks({FILE: hasher.file_checksum(FILE)}, "Use another one.")


def read(
    root: Path, reads: Sequence[Items], once: bool = False, options: ReadOptions = TWO_THREADS
) -> Callable[[Any], tuple[Traffic, dict[str, Any]]]:
    """The work of a rank: fill its tensors, and compare its blocks in the same pass."""
    identities = identities_of([root / FILE])
    recorded, source = recorded_blocks(), same_bytes_key(identities)
    everyone = [recorded.reads((one.stored for one in items), source) for items in reads]
    parts = tuple(one.stored for one in reads[0])
    replicas = Replicas(tuple(range(len(reads))), parts) if once else None
    storage = ReadContext(root, identities, recorded=recorded, block_reads=everyone, replicas=replicas)

    def work(channel: Any) -> tuple[Traffic, dict[str, Any]]:
        items = tuple(reads[channel.rank])
        slots = {(ROLE, one.name): ArraySlot(np.zeros(one.stored.part.volume, np.float32)) for one in items}
        plan = LoadPlan(items, (), {}, Report())
        done = read_redistributed(plan, storage, slots, channel, options)
        return done, {name: slot.array for (_, name), slot in slots.items()}

    return work


def flip(root: Path, at: int) -> None:
    raw = bytearray((root / FILE).read_bytes())
    raw[at] ^= 4
    (root / FILE).write_bytes(raw)


def blocks_of(reads: Sequence[Items]) -> set[int]:
    """The blocks that hold a number which any rank reads."""
    index = np.arange(NUMBERS.size).reshape(NUMBERS.shape) * NUMBERS.itemsize // BLOCK
    parts = [one.stored.part for items in reads for one in items]
    return {int(n) for part in parts for n in np.unique(index[tuple(map(slice, part.lo, part.hi))])}


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was hashed, block by block."""
    contents: list[bytes] = []

    class Noting:
        def __init__(self) -> None:
            self.data = b""

        def update(self, data: Any) -> None:
            self.data += bytes(data)

        def digest(self) -> bytes:
            contents.append(self.data)
            return xxhash.xxh3_64_digest(self.data)

    monkeypatch.setattr(executor, "xxhash", SimpleNamespace(xxh3_64=Noting))
    return contents


@pytest.mark.parametrize(("kind", "once"), WAYS)
def test_every_read_fills_its_tensors_and_hashes_every_block_once_in_the_job(
    root: Path, hashed: list[bytes], kind: str, once: bool
) -> None:
    reads = READS[kind]
    results = succeed(len(reads), read(root, reads, once))
    for items, (_, arrays) in zip(reads, results, strict=True):
        for one in items:
            part = NUMBERS[tuple(map(slice, one.stored.part.lo, one.stored.part.hi))]
            np.testing.assert_array_equal(arrays[one.name], part.transpose(one.axes).ravel())
    raw = NUMBERS.tobytes()
    assert Counter(hashed) == Counter(raw[n * BLOCK : (n + 1) * BLOCK] for n in blocks_of(reads))
    assert sum(done.hashed for done, _ in results) == sum(map(len, hashed))


@pytest.mark.parametrize("kind", READS)
def test_pieces_shorter_than_a_block_fill_the_same_bytes(
    root: Path, hashed: list[bytes], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(executor, "IMAGE_BYTES", 96)
    test_every_read_fills_its_tensors_and_hashes_every_block_once_in_the_job(root, hashed, kind, False)


@pytest.mark.parametrize(("kind", "once"), WAYS)
def test_a_flipped_bit_of_any_block_is_reported_on_every_rank_with_file_and_block(
    root: Path, kind: str, once: bool
) -> None:
    reads = READS[kind]
    for number in sorted(blocks_of(reads)):
        # The last byte of a block: in some kinds one that no rank wants.
        at = min((number + 1) * BLOCK, NUMBERS.nbytes) - 1
        flip(root, at)
        errors = job(len(reads), read(root, reads, once))
        flip(root, at)
        assert all(isinstance(error, Corrupt) for error in errors), errors
        assert len({str(error) for error in errors}) == 1
        assert errors[0].evidence[0].startswith(f"{FILE} does not match its checksum in 1 of 6 blocks: block {number} ")
        assert "tensors that were being filled are undefined" in errors[0].what


@pytest.mark.parametrize("kind", READS)
def test_a_flipped_bit_in_a_block_that_no_rank_reads_is_no_fault(root: Path, kind: str) -> None:
    for number in set(range(6)) - blocks_of(READS[kind]):
        flip(root, number * BLOCK)
    succeed(len(READS[kind]), read(root, READS[kind]))


def test_faults_of_several_blocks_and_ranks_come_in_one_report(root: Path) -> None:
    for number in (1, 2, 5):
        flip(root, number * BLOCK + 7)
    one, other = job(2, read(root, READS["rows of two ranks that share a block"]))
    assert str(one) == str(other)
    lines = " ".join(one.evidence)
    assert all(f"block {number} (from byte {number * BLOCK})" in lines for number in (1, 2, 5))


@pytest.mark.parametrize("options", [ReadOptions(1), ReadOptions(3), ReadOptions(1, staging_memory_bytes=64)])
@pytest.mark.parametrize("kind", [kind for kind, ranks in READS.items() if len(ranks) == 1])
def test_bytes_are_read_once_whether_no_tensor_wants_them_or_several_do(
    root: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: ReadOptions
) -> None:
    ranges: list[tuple[int, int]] = []
    original = os.preadv

    def noting(descriptor: int, buffers: Any, offset: int) -> int:
        count = original(descriptor, buffers, offset)
        ranges.append((offset, offset + count))
        return count

    monkeypatch.setattr(os, "preadv", noting)
    ((done, _),) = succeed(1, read(root, READS[kind], options=options))
    assert done.read == done.hashed == NUMBERS.nbytes
    assert sum(end - begin for begin, end in ranges) == NUMBERS.nbytes
    assert all(end == begin for (_, end), (begin, _) in pairwise(sorted(ranges)))


def test_a_file_that_changes_while_it_is_read_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare = executor.OwnedBlocks.compare

    def change(blocks: Any, low: int, digest: bytes) -> None:
        compare(blocks, low, digest)
        flip(root, low)
        os.utime(root / FILE, ns=(0, 0))

    monkeypatch.setattr(executor.OwnedBlocks, "compare", change)
    items = [item("a", (0, 6), axes=TURNED), item("b", (6, ROWS))]
    (error,) = job(1, read(root, [items], options=ReadOptions(threads=1)))
    assert isinstance(error, Corrupt), error
    assert "was replaced or changed" in error.what


def test_ranks_read_the_same_bytes_if_their_files_and_machine_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"the same")
    one, other = (identities_of([tmp_path / name]) for name in ("a", "b"))
    copy = {tmp_path / "a": next(iter(other.values()))}
    key = same_bytes_key(one)
    assert key == same_bytes_key(dict(one)) != same_bytes_key(copy), "a copy under the same path on another disk"
    remote = {parse_path("s3://bucket/a"): RemoteStatus("file", 8, "tag")}
    stored = same_bytes_key(remote)
    monkeypatch.setattr(identities_module, "boot_id", lambda: "another machine")
    assert same_bytes_key(one) not in (key, "")
    assert same_bytes_key(remote) == stored != ""
    assert same_bytes_key({}) == ""


def test_damage_explains_a_number_that_cannot_be_cast(root: Path) -> None:
    raw = bytearray((root / FILE).read_bytes())
    raw[7] = 0x7E
    (root / FILE).write_bytes(raw)
    identities = identities_of([root / FILE])
    recorded, one = recorded_blocks(), READS["whole blocks"][0][0]
    everyone = [recorded.reads([one.stored], same_bytes_key(identities))]
    slots = {(ROLE, "a"): ArraySlot(np.zeros(NUMBERS.size, np.float16))}

    def work(storage: ReadContext) -> Callable[[Any], Traffic]:
        return lambda channel: read_redistributed(LoadPlan((one,), (), {}, Report()), storage, slots, channel)

    (error,) = job(1, work(ReadContext(root, identities)))
    assert not isinstance(error, Corrupt | Traffic), error
    (error,) = job(1, work(ReadContext(root, identities, recorded=recorded, block_reads=everyone)))
    assert isinstance(error, Corrupt)
    assert "block 0 (from byte 0)" in error.evidence[0]
    assert FormatError is not type(error)
