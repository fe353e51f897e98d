"""Compare the checksums of blocks while their bytes are read: each byte is read from storage once, hashed and placed.

A :class:`BlockVerifier` holds the blocks that this rank compares. Jobs that fill tensors pass through it: contiguous
reads are cut at the bounds of its blocks, and all that lie in one block become one :class:`BlockRead`. It reads the
block from its first byte to its last, and hashes it while it is in the processor's cache. Bytes of the
block that this rank does not want go to scratch memory. Before strided reads (columns, transposes) come the blocks that
they lie in, hashed through scratch memory; the strided read then finds them in the page cache. Both count as read.

A fault is kept, and reading continues, so that one report lists all faults. What was read of such a block is in its
tensor by then.

Memory: the numbers of the blocks; the scratch memory of each thread, which bounds the pieces of unwanted bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from paddleformers_fc.execute.read_jobs import ContiguousRead, Memory, StridedRead, batch_jobs
from paddleformers_fc.execute.read_pool import ReadJob, ReadOptions, ReadPool
from paddleformers_fc.plan.block_owners import NO_BLOCKS, RecordedBlocks
from paddleformers_fc.storage.block_checksums import BlockComparison, differing_line
from paddleformers_fc.storage.file_checksums import FileChecksum
from paddleformers_fc.storage.files import MOST_BUFFERS, memory_at
from paddleformers_fc.storage.identity import Identities
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.storage.prefetch import ExpectedRange
from paddleformers_fc.storage.ranges import RangeReader
from paddleformers_fc.storage.regions import Region, Workspace
from paddleformers_fc.storage.vectored_read import ScatterList

HASHED_BYTES = 4 * 1024 * 1024
"""Bytes read before they are hashed: a block, so that reads stay long; a last-level cache holds one per thread."""

Jobs = Iterable[tuple[int, ReadJob]]
"""Jobs with their bytes."""


class BlockVerifier:
    """The blocks that this rank compares in one load, and what it has found. For many threads.

    Args:
        root: the directory that files are relative to.
        recorded: the checksums.
        numbers: the numbers of the blocks, by file.
    """

    def __init__(
        self, root: AnyPath, recorded: RecordedBlocks = NO_BLOCKS, numbers: Mapping[str, Collection[int]] | None = None
    ) -> None:
        owned = {root / path: (recorded.files[path], set(found)) for path, found in (numbers or {}).items()}
        self._files = {path: checksum for path, (checksum, _) in owned.items()}
        self._owned = {path: found for path, (_, found) in owned.items()}
        # Blocks that are part of a job, and blocks that were hashed: a job that was never done leaves a difference.
        self._begun: dict[AnyPath, set[int]] = {path: set() for path in owned}
        self._hashed: dict[AnyPath, set[int]] = {path: set() for path in owned}
        self._differing: dict[AnyPath, list[int]] = {path: [] for path in owned}

    def jobs(self, jobs: Jobs) -> Iterator[tuple[int, ReadJob]]:
        """Return jobs that read what the given ones read, and compare the blocks of this rank that they lie in."""
        if not self._owned:
            yield from jobs
            return
        block: BlockRead | None = None
        for size, job in jobs:
            if not isinstance(job, ContiguousRead):
                if isinstance(job, StridedRead):
                    yield from ((block.end - block.begin, block) for block in self.blocks_in(*job.span))
                yield size, job
                continue
            for part in self._cut(job):
                if block is not None and block.takes(part):
                    block.add(part)
                    continue
                if (begun := self._begin(part.path, part.begin)) is None:
                    yield part.end - part.begin, part
                    continue
                if block is not None:
                    yield block.end - block.begin, block
                block = begun
                block.add(part)
        if block is not None:
            yield block.end - block.begin, block

    def finish(self, options: ReadOptions, identities: Identities) -> int:
        """Hash the blocks of this rank that no job has hashed, when no job is under way; bytes read from storage.

        Raises:
            Corrupt, StorageError: a read failed.
        """
        left = [
            self._block(path, number)
            for path, owned in self._owned.items()
            for number in sorted(owned - self._hashed[path])
        ]
        if not left:
            return 0
        with ReadPool(options, identities) as pool:
            pool.expect(block.region for block in left)
            return pool.run(batch_jobs((block.end - block.begin, block) for block in left))

    def blocks_in(self, path: AnyPath, begin: int, end: int) -> list[BlockRead]:
        """Return the blocks of this rank that a range of a file lies in and that no job has begun to read.

        The last one is left to the jobs after it, which may place more of it.
        """
        if path not in self._owned:
            return []
        length = self._files[path].block_bytes
        found = (self._begin(path, number * length) for number in range(begin // length, (end - 1) // length))
        return [block for block in found if block is not None]

    def expected(self, path: AnyPath) -> Iterator[ExpectedRange]:
        """Return the ranges of a file that jobs read because of its blocks."""
        for number in sorted(self._owned.get(path, ())):
            block = self._block(path, number)
            yield ExpectedRange(block.begin, block.end, block.end - block.begin)

    def compare(self, path: AnyPath, number: int, digest: str) -> None:
        """Keep the checksum of a block that was read."""
        if digest != self._files[path].blocks[number]:
            self._differing[path].append(number)
        self._hashed[path].add(number)

    def comparison(self) -> BlockComparison:
        """Return what was found."""
        lines = [
            differing_line(self._files[path], sorted(numbers)) for path, numbers in self._differing.items() if numbers
        ]
        ends = (self._block(path, number) for path, numbers in self._hashed.items() for number in numbers)
        return BlockComparison(sum(block.end - block.begin for block in ends), lines)

    def _cut(self, job: ContiguousRead) -> Iterator[ContiguousRead]:
        """The parts of a job that lie in one block each, or, without a block of this rank, between two of them."""
        owned = self._owned.get(job.path)
        if owned is None:
            yield job
            return
        length = self._files[job.path].block_bytes
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

    def _begin(self, path: AnyPath, offset: int) -> BlockRead | None:
        """The job of the block that holds a byte; None if it is not this rank's, or part of a job already."""
        owned = self._owned.get(path)
        number = offset // self._files[path].block_bytes if owned else 0
        if not owned or number not in owned or number in self._begun[path]:
            return None
        self._begun[path].add(number)
        return self._block(path, number)

    def _block(self, path: AnyPath, number: int) -> BlockRead:
        checksum: FileChecksum = self._files[path]
        begin = number * checksum.block_bytes
        return BlockRead(path, begin, min(begin + checksum.block_bytes, checksum.size), number, self)


UNVERIFIED = BlockVerifier(Path())
"""Compares no block."""


@dataclass(slots=True)
class BlockRead:
    """A block that is read from its first byte to its last, hashed, and compared; some of it goes to tensors.

    Args:
        path: the file.
        begin: offset of the first byte.
        end: offset behind the last byte.
        number: of the block in its file.
        verifier: gets the checksum.
        position: offset behind the last byte that is placed by now.
        filled: whose memory is filled.
        addresses: where successive pieces of the block go; 0 for those that no tensor gets.
        lengths: of the pieces, in bytes.
    """

    path: AnyPath
    begin: int
    end: int
    number: int
    verifier: BlockVerifier
    position: int = -1
    filled: list[Memory] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def takes(self, part: ContiguousRead) -> bool:
        """Return whether successive bytes of the file are in this block, and none of them has a place by now."""
        return part.path is self.path and max(self.position, self.begin) <= part.begin and part.end <= self.end

    def add(self, part: ContiguousRead) -> None:
        """Place successive bytes of the file."""
        self._skip_to(part.begin)
        self.filled += part.filled
        self.addresses += part.addresses
        self.lengths += part.lengths
        self.position = part.end

    @property
    def region(self) -> Region:
        """The block as a region of its file."""
        size = self.end - self.begin
        return Region(self.path, self.begin, (size,), (0,), (size,), np.dtype(np.uint8))

    def read(self, reader: RangeReader, workspace: Workspace) -> int:
        """See :class:`ReadJob`."""
        self._skip_to(self.end)
        hasher, offset = xxhash.xxh3_64(), self.begin
        for addresses, lengths in self._batches(workspace):
            if len(addresses) == 1:
                reader.read_into(self.path, offset, memory_at(addresses[0], lengths[0]))
            else:
                sizes = np.array(lengths, np.int64)
                rows = ScatterList(offset + np.cumsum(sizes) - sizes, np.array(addresses, np.uint64), sizes)
                reader.read_rows(self.path, rows, workspace.scatter)
            for address, length in zip(addresses, lengths, strict=True):
                hasher.update((ctypes.c_char * length).from_address(address))
                offset += length
        self.verifier.compare(self.path, self.number, hasher.hexdigest())
        return self.end - self.begin

    def _skip_to(self, offset: int) -> None:
        """Leave the bytes before an offset without a place."""
        position = max(self.position, self.begin)
        if position < offset:
            self.addresses.append(0)
            self.lengths.append(offset - position)
            self.position = offset

    def _batches(self, workspace: Workspace) -> Iterator[tuple[list[int], list[int]]]:
        """Addresses and lengths of what is read at once: no more than is hashed at once, and fits scratch memory."""
        scratch, room = workspace.memory.ctypes.data, workspace.memory.nbytes
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
