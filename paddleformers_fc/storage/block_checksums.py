"""Compare recorded block checksums, of complete files or of the blocks that are about to be read.

A :class:`FileChecksum` has one checksum per block of 4 MiB, so a range of a file is verified by reading the blocks that
contain it, in any order and on any number of threads.

Time: one read and one xxh3 pass over the requested blocks. Memory: the image of a window per thread, and the numbers of
the blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec

from paddleformers_fc.errors import Corrupt, FlexError, StorageError
from paddleformers_fc.storage.checksum import BlockHasher, FileChecksum, FileRecord, is_document, size_fault
from paddleformers_fc.storage.executor import Blocks, OwnedBlocks, ReadOptions, ReadPool
from paddleformers_fc.storage.files import map_paths, open_regular, read_into, stat_path
from paddleformers_fc.storage.identities import NO_IDENTITIES, Identities
from paddleformers_fc.storage.paths import AnyPath, RemotePath
from paddleformers_fc.storage.progress import expect
from paddleformers_fc.text import count_text

_READ_BYTES = 1024 * 1024
# One block at a time, because every read is a request.
_REMOTE_READ_BYTES = 4 * 1024 * 1024
_SHOWN = 4
COMPARED_AT_ONCE = 4
"""Number of threads that read and hash files."""


class BlockComparison(msgspec.Struct):
    """The result of a comparison.

    Args:
        bytes: number of bytes that were read and hashed.
        faults: one line per file whose blocks differ from what was written, or that ends too early.
        refusals: by file, why the system or the store did not allow to read it. This does not count as damage.
    """

    bytes: int = 0
    faults: list[str] = []
    refusals: dict[str, StorageError] = {}

    def add(self, other: BlockComparison) -> None:
        """Add another comparison."""
        self.bytes += other.bytes
        self.faults += other.faults
        self.refusals.update(other.refusals)

    @property
    def evidence(self) -> list[str]:
        """One line per damaged file, then one line per file that could not be read."""
        return [*self.faults, *(_unread_line(path, error.what) for path, error in sorted(self.refusals.items()))]

    @property
    def refusal(self) -> StorageError | None:
        """The first refusal, with a line for every other file that could not be read."""
        if not self.refusals:
            return None
        (_, first), *others = sorted(self.refusals.items())
        return StorageError(
            first.what,
            where=first.where,
            evidence=[*first.evidence, *(_unread_line(path, error.what) for path, error in others)],
            next_step=first.next_step,
        )

    def raise_if_found(self, fault: str, directory: AnyPath, next_step: str) -> None:
        """Raise an error if a file is damaged or could not be read.

        Args:
            fault: the beginning of the error.
            directory: the directory that was compared.
            next_step: advice for damaged files.

        Raises:
            Corrupt: files are damaged; lists every fault.
            StorageError: files cannot be read, and nothing else is wrong.
        """
        if self.faults:
            counted = count_text(len(self.evidence), "fault")
            raise Corrupt(
                f"{fault}: {counted} found.", where=str(directory), evidence=self.evidence, next_step=next_step
            )
        if self.refusal:
            raise self.refusal


def compare_files(
    directory: AnyPath, checksums: Collection[FileChecksum], level: str = "full", optional: Collection[str] = ()
) -> BlockComparison:
    """Compare the sizes of files, and the bytes of files with the right size, and return the differences.

    Args:
        directory: the directory that the checksums' paths are relative to.
        checksums: the recorded checksums of the files.
        level: under ``size`` only the bytes of metadata files are compared.
        optional: paths of files that may be missing.
    """
    seen = map_paths(lambda one: stat_path(directory / one.path), checksums, directory)
    sizes = {
        one.path: size_fault(status, one.size)
        for one, status in zip(checksums, seen, strict=True)
        if status is not None or one.path not in optional
    }
    right = [one for one in checksums if sizes.get(one.path) == ""]
    hashed = [(one, range(one.count)) for one in right if level == "full" or is_document(one.path)]
    found = compare_blocks(directory, hashed)
    found.faults[:0] = [f"{path} {fault}" for path, fault in sizes.items() if fault]
    return found


def compare_blocks(
    directory: AnyPath,
    requests: Iterable[tuple[FileChecksum, Iterable[int]]],
    identities: Identities = NO_IDENTITIES,
    threads: int = COMPARED_AT_ONCE,
) -> BlockComparison:
    """Compare blocks with their checksums and return the differences.

    Args:
        directory: the directory that the checksums' paths are relative to.
        requests: the checksums of each file, and the numbers of the blocks to compare.
        identities: the identities of files that were opened before; a replaced file is a fault.
        threads: number of threads that read and hash.
    """
    blocks = {directory / one.path: OwnedBlocks(one, frozenset(numbers)) for one, numbers in requests}
    expect(sum(one.length(number) for one in blocks.values() for number in one.numbers))
    with ReadPool(ReadOptions(threads=max(1, threads)), identities) as pool:
        pool.hash_rest(blocks, is_counted=True, keep_errors=True)
    return comparison_of(blocks)


def comparison_of(blocks: Blocks) -> BlockComparison:
    """Return the results of the comparison so far."""
    found = BlockComparison()
    unreadable: list[str] = []
    for one in blocks.values():
        found.bytes += sum(one.length(number) for number in one.hashed)
        if one.differing:
            found.faults.append(differing_line(one.checksum, sorted(one.differing)))
        if isinstance(one.error, StorageError):
            found.refusals[one.checksum.path] = one.error
        elif one.error is not None:
            unreadable.append(_unread_line(one.checksum.path, one.error.what))
    found.faults += sorted(unreadable)
    return found


def compare_documents(directory: AnyPath, records: Iterable[FileRecord]) -> BlockComparison:
    """Compare complete files with their digests and return the differences.

    Args:
        directory: the directory that the records' paths are relative to.
        records: the recorded sizes and digests of the files.
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
    """Compute the digest of a file, as in :class:`FileChecksum`.

    Raises:
        Corrupt, StorageError: the file is missing or cannot be read.
    """
    hasher, step = BlockHasher(), _REMOTE_READ_BYTES if isinstance(path, RemotePath) else _READ_BYTES
    with open_regular(path) as file:
        buffer = memoryview(bytearray(min(step, file.size)))
        for begin in range(0, file.size, step):
            chunk = buffer[: min(step, file.size - begin)]
            read_into(file, begin, chunk)
            hasher.update(chunk)
    return hasher.file_checksum("").digest


def _unread_line(path: str, what: str) -> str:
    return f"{path} cannot be read to the end: {what}"


def differing_line(checksum: FileChecksum, blocks: Sequence[int]) -> str:
    """Return the line of a report for a file whose blocks do not match their recorded checksums."""
    shown = [f"block {number} (from byte {number * checksum.block_bytes})" for number in blocks[:_SHOWN]]
    more = [f"{len(blocks) - _SHOWN} more"] if len(blocks) > _SHOWN else []
    return (
        f"{checksum.path} does not match its checksum in {len(blocks)} of {checksum.count} blocks: "
        f"{', '.join(shown + more)}"
    )
