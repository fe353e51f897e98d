"""Assign the blocks of tensor files to the ranks that compare their checksums, so that each is hashed once.

Every rank reports which blocks it reads, and which of them mostly in file order. All ranks compute the same owners from
these reports, balanced by number of blocks. A rank that reads most of a block takes precedence, because it hashes while
it reads; any other rank has to read the rest of the block as well.

Ranks share a block only if they read the same bytes: the same files (device, inode, size and change time) through the
page cache of one machine, or the same objects of a store. Ranks on other machines hash their own reads, because local
copies and page caches can differ. Time: linear in the items of a plan, and in the blocks of a checkpoint for each rank
that shares them. Memory: a few numbers per block, and less than a byte per block and such rank. A checkpoint of 1 TB
has 250,000 blocks.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from heapq import heapify, heapreplace
from itertools import accumulate

import msgspec
import numpy as np
from msgspec import structs

from paddleformers_fc.errors import FormatError
from paddleformers_fc.plan.items import StoredPart
from paddleformers_fc.storage.checksum import FileChecksum
from paddleformers_fc.storage.dtypes import dtype_size
from paddleformers_fc.storage.manifest import RESTORE
from paddleformers_fc.storage.operations import row_major


def byte_runs(part: StoredPart, gap: int) -> Iterator[tuple[int, int]]:
    """Yield first and last byte of every contiguous run of a region.

    Runs less than ``gap`` bytes apart are joined, so that the number of steps depends on blocks and not on rows.

    Args:
        part: the region.
        gap: in bytes.
    """
    size = part.part.shape
    if 0 in size:
        return
    width = dtype_size(part.dtype)
    strides = row_major(part.shape, width)
    begin = part.begin + sum(low * stride for low, stride in zip(part.part.lo, strides, strict=True))
    yield from _runs(begin, list(zip(size, strides, strict=True)), width, gap)


def _runs(begin: int, axes: list[tuple[int, int]], width: int, gap: int) -> Iterator[tuple[int, int]]:
    while axes and axes[0][0] == 1:
        axes = axes[1:]
    span = sum((length - 1) * stride for length, stride in axes) + width
    # The holes of an outer axis are never shorter than those of an inner one.
    if not axes or axes[0][1] - (span - (axes[0][0] - 1) * axes[0][1]) < gap:
        yield begin, begin + span - 1
        return
    length, stride = axes[0]
    for number in range(length):
        yield from _runs(begin + number * stride, axes[1:], width, gap)


MAX_SHARING_RANKS = 64
"""Maximum number of ranks that share the comparison of blocks: each sends some hundred bytes to all others."""

Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]
"""A flag per block."""
Bits = np.ndarray[tuple[int], np.dtype[np.uint8]]
"""A bit per block."""
_Run = tuple[int, int, bool]
"""The first and last byte of a run, and whether every byte between them is read."""


class BlockReads(msgspec.Struct, frozen=True, array_like=True):
    """Message with the blocks that one rank reads.

    Args:
        source: equal on ranks that read the same bytes; empty if that is unknown.
        read: a bit per block, set if the rank reads any byte of it; compressed.
        streamed: a bit per block, set if the rank reads at least half of it in file order; compressed.
    """

    source: str = ""
    read: bytes = b""
    streamed: bytes = b""


class RecordedBlocks(msgspec.Struct, frozen=True, dict=True):
    """The blocks of tensor files whose checksums a load compares while it reads.

    Args:
        files: the recorded checksums, by path; equal on all ranks. Empty if none are compared.
        next_step: advice for files that do not match.
    """

    files: Mapping[str, FileChecksum] = {}
    next_step: str = RESTORE

    @cached_property
    def first(self) -> dict[str, int]:
        """The number of each file's first block, numbered across all files."""
        paths = sorted(self.files)
        ends = accumulate(self.files[path].count for path in paths)
        return {path: end - self.files[path].count for path, end in zip(paths, ends, strict=True)}

    @property
    def count(self) -> int:
        """Number of blocks in all files."""
        return sum(one.count for one in self.files.values())

    def reads(self, parts: Iterable[StoredPart], source: str) -> BlockReads:
        """Return the blocks that contain the bytes that one rank reads.

        Args:
            parts: the ranges that the rank reads.
            source: see :class:`BlockReads`.
        """
        found: dict[str, list[_Run]] = {}
        # Many regions are equal; their runs differ only by the offset of the stored box.
        alike: dict[tuple[object, ...], list[_Run]] = {}
        for part in parts:
            if part.file not in self.files:
                raise FormatError(
                    f"{part.file} has no recorded checksums, but other files in its directory do.",
                    where=part.file,
                    next_step="Export the weights again, or set flex_verify: off to read them without checksums.",
                )
            length = self.files[part.file].block_bytes
            kind = (part.dtype, part.shape, part.part, length)
            runs = alike.get(kind)
            if runs is None:
                size = part.part.volume * dtype_size(part.dtype)
                own = byte_runs(structs.replace(part, begin=0), length)
                runs = alike[kind] = [(low, high, high + 1 - low == size) for low, high in own]
            begin = part.begin
            found.setdefault(part.file, []).extend([(begin + low, begin + high, dense) for low, high, dense in runs])
        read, streamed = np.zeros((2, self.count), np.bool_)
        for file, of_file in found.items():
            blocks = slice(self.first[file], self.first[file] + self.files[file].count)
            read[blocks], streamed[blocks] = _touched(of_file, self.files[file])
        return BlockReads(source, _packed(read), _packed(streamed))

    def owned(self, everyone: Sequence[BlockReads], rank: int) -> dict[str, list[int]]:
        """Return the numbers of the blocks that one rank compares, by file.

        Args:
            everyone: the reads of all ranks, by rank.
            rank: the rank.
        """
        source = everyone[rank].source
        group = [other for other, one in enumerate(everyone) if other == rank or (source and one.source == source)]
        first = group.index(rank) // MAX_SHARING_RANKS * MAX_SHARING_RANKS
        group = group[first : first + MAX_SHARING_RANKS]  # More ranks form groups; each group compares all blocks.
        read = np.array([self._bits(everyone[other].read) for other in group])
        streamed = read & [self._bits(everyone[other].streamed) for other in group]
        read &= ~np.bitwise_or.reduce(streamed)
        mine = _balanced(streamed | read, self.count, group.index(rank))
        numbers: dict[str, list[int]] = {}
        for path, first in self.first.items():
            found = np.flatnonzero(mine[first : first + self.files[path].count])
            if found.size:
                numbers[path] = found.tolist()
        return numbers

    def requests(self, parts: Iterable[StoredPart]) -> Iterator[tuple[FileChecksum, list[int]]]:
        """Yield the files and the numbers of the blocks that contain some regions."""
        for path, numbers in self.owned([self.reads(parts, "")], 0).items():
            yield self.files[path], numbers

    def _bits(self, packed: bytes) -> Bits:
        return np.frombuffer(zlib.decompress(packed) if packed else bytes(-(-self.count // 8)), np.uint8)


NO_BLOCKS = RecordedBlocks()
"""For a load that compares no checksums of tensor files."""


def _touched(runs: list[_Run], checksum: FileChecksum) -> tuple[Flags, Flags]:
    """Return which blocks of a file contain a byte of the runs, and which are at least half covered by dense runs."""
    length, count = checksum.block_bytes, checksum.count
    low, high, dense = np.array(runs, np.int64).reshape(-1, 3).T
    begin, end = low // length, high // length
    read, covered = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    np.add.at(read, begin, 1)
    np.add.at(read, end + 1, -1)
    np.add.at(covered, begin, dense * length)
    np.add.at(covered, end + 1, -dense * length)
    covered = covered.cumsum()
    # A run may cover its first and last block only partly.
    np.add.at(covered, begin, -dense * (low % length))
    np.add.at(covered, end, -dense * (length - 1 - high % length))
    lengths = np.full(count, length)
    lengths[-1:] = (checksum.size - 1) % length + 1
    return read.cumsum()[:count] > 0, 2 * covered[:count] >= lengths


def _packed(flags: Flags) -> bytes:
    return zlib.compress(np.packbits(flags).tobytes(), 1)


def _balanced(able: np.ndarray[tuple[int, int], np.dtype[np.uint8]], count: int, member: int) -> Flags:
    """Assign every block to a member that can compare it, and return the blocks of one member.

    Blocks that the same members can compare go to the member with the fewest so far. All members end with equal
    numbers, and ranks that read one file together compare blocks at about the same position.

    Args:
        able: the packed bits of each member, one per block; at most :data:`MAX_SHARING_RANKS` members.
        count: number of blocks.
        member: the member.
    """
    mine, members = np.zeros(count, np.bool_), np.zeros(count, np.uint64)
    for index, bits in enumerate(able):
        members |= np.unpackbits(bits, count=count).astype(np.uint64) << np.uint64(index)
    loads = [0] * len(able)
    # Blocks that only one member can compare come first, because they count towards its load in any case.
    for among in sorted(np.unique(members[members > 0]).tolist(), key=lambda among: (among.bit_count(), among)):
        fewest = [(load, index) for index, load in enumerate(loads) if among >> index & 1]
        heapify(fewest)
        for block in np.flatnonzero(members == among).tolist():
            load, index = fewest[0]
            heapreplace(fewest, (load + 1, index))
            if index == member:
                mine[block] = True
        for load, index in fewest:
            loads[index] = load
    return mine
