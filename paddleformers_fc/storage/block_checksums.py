"""Comparison of recorded block checksums, of whole files or of the blocks that are about to be read.

A :class:`FileChecksum` has one checksum per block of 4 MiB, so a range of a file is verified by reading the blocks that
it touches, in any order and on any number of threads.

Time: one read and one xxh3 pass over the requested blocks. Memory: 1 MiB per thread, 4 MiB per thread for a remote
file, and the numbers of the blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import xxhash

from paddleformers_fc.errors import FlexError, StorageError
from paddleformers_fc.storage.checksum import BlockHasher, FileChecksum, FileRecord
from paddleformers_fc.storage.files import map_paths, open_regular, read_into
from paddleformers_fc.storage.paths import AnyPath, RemotePath
from paddleformers_fc.storage.progress import advance, expect
from paddleformers_fc.storage.ranges import NO_IDENTITIES, Identities, RangeReader

Numbers = Sequence[int]
"""Numbers of blocks of one file, rising."""

_READ_BYTES = 1024 * 1024
# A block: every read is a request.
_REMOTE_READ_BYTES = 4 * 1024 * 1024
_SPAN_BYTES = 64 * 1024 * 1024
_SHOWN = 4


@dataclass
class BlockComparison:
    """The result of a comparison.

    Args:
        bytes: how many were read and hashed.
        faults: one line per file whose blocks are not those that were written, or that ends too early.
        refusals: by file, why the system or the store did not let it be read; that is no damage.
    """

    bytes: int = 0
    faults: list[str] = field(default_factory=list)
    refusals: dict[str, StorageError] = field(default_factory=dict)

    def add(self, other: BlockComparison) -> None:
        """Add another comparison."""
        self.bytes += other.bytes
        self.faults += other.faults
        self.refusals.update(other.refusals)

    @property
    def evidence(self) -> list[str]:
        """One line per file that is damaged, and then per file that nothing is known of."""
        return [*self.faults, *(_unread_line(path, error.what) for path, error in sorted(self.refusals.items()))]

    @property
    def refusal(self) -> StorageError | None:
        """The first refusal, with a line for every other file that was refused."""
        if not self.refusals:
            return None
        (_, first), *others = sorted(self.refusals.items())
        return StorageError(
            first.what,
            where=first.where,
            evidence=[*first.evidence, *(_unread_line(path, error.what) for path, error in others)],
            next_step=first.next_step,
        )


def compare_blocks(
    directory: AnyPath,
    wanted: Iterable[tuple[FileChecksum, Numbers]],
    threads: int,
    identities: Identities = NO_IDENTITIES,
) -> BlockComparison:
    """Compare blocks with their checksums and return the differences.

    Args:
        directory: the directory that the checksums' paths are relative to.
        wanted: checksums, and the numbers of the blocks of each.
        threads: how many threads read and hash.
        identities: the identities of the files opened before; another file under a path is a fault.
    """
    files = [(checksum, numbers) for checksum, numbers in wanted if numbers]
    bad: dict[str, list[int]] = {checksum.path: [] for checksum, _ in files}
    unreadable: dict[str, str] = {}
    found = BlockComparison()
    expect(sum(_bytes_of(checksum, numbers) for checksum, numbers in files))
    with RangeReader(identities=identities) as reader:
        # A file system can hold more spans than there is memory for futures, so threads draw from one iterator.
        spans, lock, stop = _spans(files), threading.Lock(), threading.Event()

        def work() -> None:
            buffer = memoryview(bytearray(_REMOTE_READ_BYTES if isinstance(directory, RemotePath) else _READ_BYTES))
            while not stop.is_set():
                with lock:
                    span = next(spans, None)
                if span is None:
                    return
                try:
                    blocks, count = _differing(directory, reader, span, buffer)
                except StorageError as error:
                    with lock:
                        found.refusals[span.checksum.path] = error
                except FlexError as error:
                    with lock:
                        unreadable[span.checksum.path] = error.what
                else:
                    with lock:
                        bad[span.checksum.path].extend(blocks)
                        found.bytes += count
                    advance(count)

        with ThreadPoolExecutor(max(1, threads), "flex-verify") as pool:
            try:
                for done in [pool.submit(work) for _ in range(max(1, threads))]:
                    done.result()
            finally:
                # An interrupt ends the check after the spans in work, not after the last one.
                stop.set()
    found.faults += [
        differing_line(checksum, sorted(bad[checksum.path])) for checksum, _ in files if bad[checksum.path]
    ]
    found.faults += [_unread_line(path, what) for path, what in sorted(unreadable.items())]
    return found


def compare_documents(directory: AnyPath, records: Iterable[FileRecord]) -> BlockComparison:
    """Compare whole files with their digests and return the differences.

    Args:
        directory: the directory that the records' paths are relative to.
        records: of the files.
    """
    found = BlockComparison()

    def compare(record: FileRecord) -> None:
        try:
            if digest_of(directory / record.path) != record.digest:
                found.faults.append(f"{record.path} does not match its checksum")
        except StorageError as error:
            found.refusals[record.path] = error
        except FlexError as error:
            found.faults.append(_unread_line(record.path, error.what))

    for _ in map_paths(compare, records, directory):
        pass
    found.faults.sort()
    return found


def digest_of(path: AnyPath) -> str:
    """Return the digest of a file, as :class:`FileChecksum` has it.

    Raises:
        Corrupt, StorageError: it is gone or cannot be read.
    """
    hasher, step = BlockHasher(), _REMOTE_READ_BYTES if isinstance(path, RemotePath) else _READ_BYTES
    with open_regular(path) as file:
        buffer = memoryview(bytearray(min(step, file.size)))
        for begin in range(0, file.size, step):
            chunk = buffer[: min(step, file.size - begin)]
            read_into(file, begin, chunk)
            hasher.update(chunk)
    return hasher.file_checksum("").digest


@dataclass(frozen=True)
class _Span:
    """The blocks of one file that one thread hashes at a time."""

    checksum: FileChecksum
    numbers: Numbers


def _bytes_of(checksum: FileChecksum, numbers: Numbers) -> int:
    """Return the bytes of some blocks; only the last block of a file is shorter."""
    last = checksum.count - 1
    short = checksum.count * checksum.block_bytes - checksum.size if last in numbers else 0
    return len(numbers) * checksum.block_bytes - short


def _spans(wanted: Iterable[tuple[FileChecksum, Numbers]]) -> Iterator[_Span]:
    for checksum, numbers in wanted:
        count = max(1, _SPAN_BYTES // checksum.block_bytes)
        for first in range(0, len(numbers), count):
            yield _Span(checksum, numbers[first : first + count])


def _differing(directory: AnyPath, reader: RangeReader, span: _Span, buffer: memoryview) -> tuple[list[int], int]:
    """Return the blocks of a span whose checksum is not the recorded one, and the bytes that were hashed."""
    differing: list[int] = []
    total = 0
    for number in span.numbers:
        begin = position = number * span.checksum.block_bytes
        end = min(position + span.checksum.block_bytes, span.checksum.size)
        hasher = xxhash.xxh3_64()
        while position < end:
            chunk = buffer[: min(len(buffer), end - position)]
            reader.read_into(directory / span.checksum.path, position, chunk)
            hasher.update(chunk)
            position += len(chunk)
        total += end - begin
        if hasher.digest() != span.checksum.block(number):
            differing.append(number)
    return differing, total


def _unread_line(path: str, what: str) -> str:
    return f"{path} cannot be read to the end: {what}"


def differing_line(checksum: FileChecksum, blocks: Numbers) -> str:
    """Return the line of a report for a file in which these blocks do not have the recorded checksum."""
    shown = [f"block {number} (from byte {number * checksum.block_bytes})" for number in blocks[:_SHOWN]]
    more = [f"{len(blocks) - _SHOWN} more"] if len(blocks) > _SHOWN else []
    return (
        f"{checksum.path} does not match its checksum in {len(blocks)} of {checksum.count} blocks: "
        f"{', '.join(shown + more)}"
    )
