"""Blocks are compared while they are read: every kind of read finds a flipped bit, and no block is hashed twice.

A file of small numbers, cut into blocks of a few hundred bytes, is read by ranks that are threads.
"""

from __future__ import annotations

import errno
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

from paddleformers_fc.errors import CheckpointError, Corrupt, FlexError, StorageError
from paddleformers_fc.execute.exchange import ReadContext, Replicas, Traffic, read_redistributed
from paddleformers_fc.execute.export import export_checkpoint
from paddleformers_fc.execute.load import LoadReport, prepare_weights
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
from paddleformers_fc.storage.safetensors import read_header
from tests.execute.simulated import ARRAYS, MODEL, attempt, flip, job, live, save, succeed
from tests.harness.sealing import reseal

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
    root: Path,
    reads: Sequence[Items],
    once: bool = False,
    options: ReadOptions = TWO_THREADS,
    dtype: Any = np.float32,
    verified: bool = True,
) -> Callable[[Any], tuple[Traffic, dict[str, Any]]]:
    """The work of a rank: fill its tensors, and compare its blocks in the same pass."""
    identities = identities_of([root / FILE])
    recorded, source = recorded_blocks(), same_bytes_key(identities)
    everyone = [recorded.reads((one.stored for one in items), source) for items in reads]
    parts = tuple(one.stored for one in reads[0])
    replicas = Replicas(tuple(range(len(reads))), parts) if once else None
    blocks: dict[str, Any] = {"recorded": recorded, "block_reads": everyone} if verified else {}
    storage = ReadContext(root, identities, replicas=replicas, **blocks)

    def work(channel: Any) -> tuple[Traffic, dict[str, Any]]:
        items = tuple(reads[channel.rank])
        slots = {(ROLE, one.name): ArraySlot(np.zeros(one.stored.part.volume, dtype)) for one in items}
        plan = LoadPlan(items, (), {}, Report())
        done = read_redistributed(plan, storage, slots, channel, options)
        return done, {name: slot.array for (_, name), slot in slots.items()}

    return work


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
@pytest.mark.parametrize("image_bytes", [executor.IMAGE_BYTES, 96], ids=["usual", "shorter than a block"])
def test_every_read_fills_its_tensors_and_hashes_every_block_once_in_the_job(
    root: Path, hashed: list[bytes], monkeypatch: pytest.MonkeyPatch, kind: str, once: bool, image_bytes: int
) -> None:
    monkeypatch.setattr(executor, "IMAGE_BYTES", image_bytes)
    reads = READS[kind]
    results = succeed(len(reads), read(root, reads, once))
    for items, (_, arrays) in zip(reads, results, strict=True):
        for one in items:
            part = NUMBERS[tuple(map(slice, one.stored.part.lo, one.stored.part.hi))]
            np.testing.assert_array_equal(arrays[one.name], part.transpose(one.axes).ravel())
    raw = NUMBERS.tobytes()
    assert Counter(hashed) == Counter(raw[n * BLOCK : (n + 1) * BLOCK] for n in blocks_of(reads))
    assert sum(done.hashed for done, _ in results) == sum(map(len, hashed))


@pytest.mark.parametrize(("kind", "once"), WAYS)
def test_a_flipped_bit_of_any_block_that_is_read_is_reported_on_every_rank_with_file_and_block(
    root: Path, kind: str, once: bool
) -> None:
    reads = READS[kind]
    for number in sorted(blocks_of(reads)):
        # The last byte of a block: in some kinds one that no rank wants.
        at = min((number + 1) * BLOCK, NUMBERS.nbytes) - 1
        flip(root / FILE, at)
        error = job(len(reads), read(root, reads, once)).error(Corrupt)
        flip(root / FILE, at)
        assert error.evidence[0].startswith(f"{FILE} does not match its checksum in 1 of 6 blocks: block {number} ")
        assert "tensors that were being filled are undefined" in error.what
    for number in set(range(6)) - blocks_of(reads):
        flip(root / FILE, number * BLOCK)
    succeed(len(reads), read(root, reads, once))


def test_faults_of_several_blocks_and_ranks_come_in_one_report(root: Path) -> None:
    for number in (1, 2, 5):
        flip(root / FILE, number * BLOCK + 7)
    error = job(2, read(root, READS["rows of two ranks that share a block"])).error()
    assert all(f"block {number} (from byte {number * BLOCK})" in " ".join(error.evidence) for number in (1, 2, 5))


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
        flip(root / FILE, low)
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
    plain, verified = (read(root, READS["whole blocks"], dtype=np.float16, verified=one) for one in (False, True))
    (error,) = job(1, plain)
    assert isinstance(error, FlexError)
    assert not isinstance(error, Corrupt)
    assert "block 0 (from byte 0)" in job(1, verified).error(Corrupt).evidence[0]


# ---- Checkpoints under ``flex_verify: full``: headers and documents first, and tensors while they are filled.


BLOCK_BYTES = 500
"""No divisor of a header's length."""
WEIGHTS, STATES = "model_state/rank-00000.safetensors", "optimizer_state/rank-00001.safetensors"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of two ranks, its checksums recorded in many small blocks."""
    directory = tmp_path / "checkpoint-3"
    save(directory, ARRAYS, 2)
    reseal(directory, BLOCK_BYTES)
    return directory


def attempt_full(directory: Path, ranks: int, only: str | None = None) -> list[Any]:
    return attempt(directory, ranks, only=only, verify="full")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("at", [3, 9, 200, "its end"])
def test_a_byte_of_a_header_is_refused_before_any_tensor_changes(checkpoint: Path, ranks: int, at: int | str) -> None:
    path = checkpoint / STATES
    end = min(tensor.begin for tensor in read_header(path).tensors.values())
    flip(path, end - 1 if isinstance(at, str) else at)
    for outcome in attempt_full(checkpoint, ranks):
        assert isinstance(outcome, CheckpointError), outcome
        assert STATES in str(outcome)
        assert "are undefined" not in str(outcome)
    # No rank opens a file that it does not read.
    attempt_full(checkpoint, ranks, "model_state").results()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("unread", [WEIGHTS, STATES])
def test_a_load_under_full_whose_reads_the_system_refuses_is_refused_on_every_rank(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, unread: str, ranks: int
) -> None:
    original = os.preadv
    numbers = min(one.begin for one in read_header(checkpoint / unread).tensors.values())

    def refuse(descriptor: int, buffers: Any, offset: int) -> int:
        if offset > numbers and os.readlink(f"/proc/self/fd/{descriptor}").endswith(unread):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse)
    error = attempt(checkpoint, ranks=ranks, verify="full").error(StorageError)
    assert unread in str(error)
    assert "tensors that were being filled are undefined" in error.what


@pytest.mark.parametrize("ranks", [1, 2])
def test_open_weights_that_are_replaced_after_they_were_opened_are_refused(checkpoint: Path, ranks: int) -> None:
    export_checkpoint(checkpoint, checkpoint.parent / "hf")
    weights = checkpoint.parent / "hf" / "model.safetensors"

    def work(channel: Any) -> LoadReport:
        exchange, seen = channel.gather, []

        def replaced(*given: Any) -> Any:
            everyone = exchange(*given)
            if not seen and channel.rank == 0:
                flip(weights)
            seen.append(given)
            exchange("waiting", b"")  # All have seen what was there before.
            return everyone

        channel.gather = replaced
        roles = {"model_state": live(ARRAYS, 1, channel.rank, empty=True)["model_state"]}
        return prepare_weights(checkpoint.parent / "hf", roles, MODEL, channel).fill()

    assert "was replaced or changed after it was checked" in str(job(ranks, work).error(Corrupt))
