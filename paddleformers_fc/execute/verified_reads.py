"""Compare the checksums of blocks while their bytes are read: each byte is read from storage once, hashed and placed.

A :class:`BlockVerifier` holds the blocks that this rank compares. Jobs that fill tensors pass through it: contiguous
reads are cut at the bounds of its blocks, and all that lie in one block become one :class:`BlockRead`. It reads the
block from its first byte to its last, and hashes it while it is in the processor's cache. Bytes that are contiguous in
a tensor are read into it. Rows (columns of a matrix) are copied from scratch memory, which also receives the bytes that
this rank does not need. A block stays open for a while, because other tensors may need other columns of the same rows.

Transposes, casts and very short rows are read on their own, after the blocks that they lie in, and find them in the
page cache. Both reads count.

A fault is kept, and reading continues, so that one report lists all faults. The bytes that were read of such a block
are in its tensor by then.

Memory: the numbers of the blocks; the scratch memory of each thread, which bounds the pieces of unwanted bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from paddleformers_fc.execute.read_jobs import ContiguousRead, Memory, RowsRead, StridedRead, batch_jobs
from paddleformers_fc.execute.read_pool import ReadJob, ReadOptions, ReadPool
from paddleformers_fc.plan.block_owners import NO_BLOCKS, RecordedBlocks
from paddleformers_fc.storage.block_checksums import BlockComparison, differing_line
from paddleformers_fc.storage.checksum import FileChecksum
from paddleformers_fc.storage.files import MOST_BUFFERS, memory_at
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.storage.prefetch import ExpectedRange
from paddleformers_fc.storage.ranges import Identities, RangeReader
from paddleformers_fc.storage.regions import Region, Workspace
from paddleformers_fc.storage.rows import Rows

HASHED_BYTES = 4 * 1024 * 1024
"""Bytes read before they are hashed: a block, so that reads stay long; a last-level cache holds one per thread."""

Jobs = Iterable[tuple[int, ContiguousRead | StridedRead]]
"""Jobs with their bytes."""

Waiting = deque[tuple[int, ReadJob]]
"""Jobs that are not under way, with their bytes, in the order of the file."""

_MOST_WAITING = 32


class BlockVerifier:
    """The blocks that this rank compares in one load, and the faults found. For many threads.

    Args:
        root: the directory that files are relative to.
        recorded: the checksums.
        numbers: the numbers of the blocks, by file.
    """

    def __init__(
        self, root: AnyPath, recorded: RecordedBlocks = NO_BLOCKS, numbers: Mapping[str, Collection[int]] | None = None
    ) -> None:
        self._files = {
            root / path: _OwnedBlocks(root / path, recorded.files[path], set(found))
            for path, found in (numbers or {}).items()
        }

    def jobs(self, jobs: Jobs) -> Iterator[tuple[int, ReadJob]]:
        """Return jobs that read the same ranges, and compare the blocks of this rank that contain them."""
        if not self._files:
            yield from jobs
            return
        # Later jobs may place more of a block: other columns of the same rows. All jobs wait with it, because a store
        # answers with several blocks at a time: out of order they would be requested again.
        waiting: Waiting = deque()
        for size, job in jobs:
            file = self._files.get(job.path)
            if file is None:
                waiting.append((size, job))
            elif isinstance(job, ContiguousRead):
                file.contiguous(job, waiting)
            else:
                file.strided(size, job, waiting)
            while len(waiting) > _MOST_WAITING:
                yield _next(waiting)
        while waiting:
            yield _next(waiting)

    def finish(self, options: ReadOptions, identities: Identities) -> int:
        """Hash the blocks of this rank that no job has hashed, when no job is under way; bytes read from storage.

        Raises:
            Corrupt, StorageError: a read failed.
        """
        left = [block for file in self._files.values() for block in file.left()]
        if not left:
            return 0
        with ReadPool(options, identities) as pool:
            pool.expect(block.region for block in left)
            return pool.run(batch_jobs(block.as_job() for block in left))

    def blocks_in(self, path: AnyPath, begin: int, end: int) -> list[BlockRead]:
        """Return the blocks of this rank that overlap a range of a file and that no job has begun to read.

        The last one is left to the jobs after it, which may place more of it.
        """
        file = self._files.get(path)
        return [] if file is None else file.blocks_in(begin, end)

    def expected(self, path: AnyPath) -> Iterator[ExpectedRange]:
        """Return the ranges of a file that jobs read because of its blocks."""
        file = self._files.get(path)
        for block in [] if file is None else map(file.block, sorted(file.owned)):
            yield ExpectedRange(block.begin, block.end, block.end - block.begin)

    def comparison(self) -> BlockComparison:
        """Return what was found."""
        files = self._files.values()
        lines = [differing_line(file.checksum, sorted(file.differing)) for file in files if file.differing]
        ends = (file.block(number) for file in files for number in file.hashed)
        return BlockComparison(sum(block.end - block.begin for block in ends), lines)


class _OwnedBlocks:
    """The blocks of one file that this rank compares.

    Args:
        path: the file.
        checksum: its recorded checksums.
        owned: the numbers of the blocks.

    Attributes:
        begun: blocks that are part of a job.
        hashed: blocks that were hashed. A job that was never done leaves a difference.
        differing: blocks whose checksums differ.
    """

    def __init__(self, path: AnyPath, checksum: FileChecksum, owned: set[int]) -> None:
        self.path = path
        self.checksum = checksum
        self.owned = owned
        self.begun: dict[int, BlockRead] = {}
        self.hashed: set[int] = set()
        self.differing: list[int] = []
        self._length = checksum.block_bytes

    def block(self, number: int) -> BlockRead:
        """Return a block, with no place for its bytes."""
        begin = number * self._length
        return BlockRead(self, number, begin, min(begin + self._length, self.checksum.size))

    def left(self) -> list[BlockRead]:
        """Return the blocks that no job has hashed."""
        return [self.block(number) for number in sorted(self.owned - self.hashed)]

    def compare(self, number: int, digest: bytes) -> None:
        """Keep the checksum of a block that was read."""
        if digest != self.checksum.block(number):
            self.differing.append(number)
        self.hashed.add(number)

    def blocks_in(self, begin: int, end: int) -> list[BlockRead]:
        """See :meth:`BlockVerifier.blocks_in`."""
        found = []
        for number in range(begin // self._length, (end - 1) // self._length):
            if number in self.owned and number not in self.begun:
                block = self.begun[number] = self.block(number)
                block.close()
                found.append(block)
        return found

    def contiguous(self, job: ContiguousRead, waiting: Waiting) -> None:
        """Place the parts of a job in the blocks of this rank, and append the others as jobs."""
        for part in self._cut(job):
            block = self._begun(part.begin // self._length, waiting)
            if block is not None and block.takes(part):
                block.add(part)
            else:
                waiting.append((part.end - part.begin, part))

    def strided(self, size: int, job: StridedRead, waiting: Waiting) -> None:
        """Place rows in the blocks of this rank, and append the others as jobs.

        Transposes and casts are read again, after the blocks that they lie in.
        """
        begin, end = job.span
        rows = job.rows
        if rows is None:
            waiting.extend(one.as_job() for one in self.blocks_in(begin, end))
            waiting.append((size, job))
            return
        numbers = range(begin // self._length, (end - 1) // self._length + 1)
        parts = [(n, max(begin, n * self._length), min(end, (n + 1) * self._length)) for n in numbers]
        if not any(self._may_take(number, low) for number, low, _ in parts):
            waiting.append((size, job))
            return
        for number, low, high in parts:
            block = self._begun(number, waiting)
            if block is not None and block.position <= low:
                block.add_rows(rows, high)
            else:
                waiting.append((size * (high - low) // (end - begin), RowsRead(self.path, rows, low, high)))

    def _may_take(self, number: int, low: int) -> bool:
        """Return whether rows from a byte on can be placed in a block."""
        block = self.begun.get(number)
        return number in self.owned if block is None else not block.taken and block.position <= low

    def _begun(self, number: int, waiting: Waiting) -> BlockRead | None:
        """Return the job of a block if more can be placed of it; None if the block is not this rank's or its job was
        taken."""
        if number not in self.owned:
            return None
        if number not in self.begun:
            block = self.begun[number] = self.block(number)
            waiting.append((block.end - block.begin, block))
        block = self.begun[number]
        return None if block.taken else block

    def _cut(self, job: ContiguousRead) -> Iterator[ContiguousRead]:
        """Yield the parts of a job, each in one block of this rank or between two of them."""
        length, owned = self._length, self.owned
        part, mine = ContiguousRead(job.path, job.begin, job.begin), False
        bound = job.begin
        for memory, address, size in zip(job.filled, job.addresses, job.lengths, strict=True):
            while size:
                if part.end >= bound:
                    before, mine = mine, part.end // length in owned
                    bound = (part.end // length + 1) * length
                    if part.addresses and (before or mine):
                        yield part
                        part = ContiguousRead(job.path, part.end, part.end)
                taken = min(size, bound - part.end)
                part.add(memory, address, taken)
                address, size = address + taken, size - taken
        if part.addresses:
            yield part


def _next(waiting: Waiting) -> tuple[int, ReadJob]:
    """Remove the first job; a block takes nothing more."""
    size, job = waiting.popleft()
    if isinstance(job, BlockRead):
        job.close()
    return size, job


UNVERIFIED = BlockVerifier(Path())
"""Compares no block."""


@dataclass(slots=True, eq=False)
class BlockRead:
    """A block that is read from its first byte to its last, hashed, and compared; some of it goes to tensors.

    Args:
        file: gets the checksum.
        number: of the block in its file.
        begin: offset of the first byte.
        end: offset behind the last byte.
        position: offset behind the last byte that is read into a tensor by now.
        filled: whose memory is filled.
        addresses: where successive pieces of the block go; 0 for those that go to scratch memory.
        lengths: of the pieces, in bytes.
        rows: rows that get bytes of the block from scratch memory.
        rows_end: offset behind the last byte of them in this block.
        taken: whether nothing more can be placed, because a thread may read it by now.
    """

    file: _OwnedBlocks
    number: int
    begin: int
    end: int
    position: int = -1
    filled: list[Memory] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)
    rows_end: int = 0
    taken: bool = False

    def close(self) -> None:
        """Place nothing more."""
        self._skip_to(self.end)
        self.taken = True

    def as_job(self) -> tuple[int, ReadJob]:
        """Close the block, and return it as a job with its bytes."""
        self.close()
        return self.end - self.begin, self

    def takes(self, part: ContiguousRead) -> bool:
        """Return whether successive bytes of this block have no place by now."""
        return max(self.position, self.rows_end) <= part.begin

    def add(self, part: ContiguousRead) -> None:
        """Place successive bytes of the file."""
        self._skip_to(part.begin)
        self.filled += part.filled
        addresses, lengths = part.addresses, part.lengths
        if self.addresses and self.addresses[-1] + self.lengths[-1] == addresses[0]:
            # More of the same tensor: one piece.
            self.lengths[-1] += lengths[0]
            addresses, lengths = addresses[1:], lengths[1:]
        self.addresses += addresses
        self.lengths += lengths
        self.position = part.end

    def add_rows(self, rows: Rows, end: int) -> None:
        """Place rows from scratch memory.

        Args:
            rows: from a byte on that is not read into a tensor.
            end: offset behind the last byte of the rows in this block.
        """
        self.rows.append(rows)
        self.rows_end = max(self.rows_end, end)

    @property
    def region(self) -> Region:
        """The block as a region of its file."""
        size = self.end - self.begin
        return Region(self.file.path, self.begin, (size,), (0,), (size,), np.dtype(np.uint8))

    def read(self, reader: RangeReader, workspace: Workspace) -> int:
        """See :class:`ReadJob`."""
        path = self.file.path
        hasher, offset = xxhash.xxh3_64(), self.begin
        for addresses, lengths in self._batches(workspace):
            pieces = list(map(memory_at, addresses, lengths))
            reader.read_several(path, offset, pieces)
            for address, piece in zip(addresses, pieces, strict=True):
                hasher.update(piece)
                if self.rows and workspace.holds(address):
                    for rows in self.rows:
                        rows.fill(offset, piece)
                offset += piece.nbytes
        self.file.compare(self.number, hasher.digest())
        return self.end - self.begin

    def _skip_to(self, offset: int) -> None:
        """Leave the bytes before an offset without a place."""
        position = max(self.position, self.begin)
        if position < offset:
            self.addresses.append(0)
            self.lengths.append(offset - position)
            self.position = offset

    def _batches(self, workspace: Workspace) -> Iterator[tuple[list[int], list[int]]]:
        """Addresses and lengths of one read: no more than one hash call takes, and than scratch memory holds."""
        if len(self.addresses) == 1 and self.addresses[0] and self.lengths[0] <= HASHED_BYTES:
            yield self.addresses, self.lengths
            return
        scratch, room = workspace.address, workspace.scratch_bytes
        addresses: list[int] = []
        lengths: list[int] = []
        size = used = 0
        for address, length in zip(self.addresses, self.lengths, strict=True):
            while length:
                taken = min(length, HASHED_BYTES - size, length if address else room - used)
                if taken == 0 or len(addresses) == MOST_BUFFERS:
                    yield addresses, lengths
                    addresses, lengths, size, used = [], [], 0, 0
                    continue
                addresses.append(address or scratch + used)
                lengths.append(taken)
                size, length = size + taken, length - taken
                if address:
                    address += taken
                else:
                    used += taken
        yield addresses, lengths
