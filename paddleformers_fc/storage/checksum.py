"""Compute checksums while bytes are written.

A :class:`BlockHasher` hashes every byte that a writer writes, block by block, with xxh3_64. The digest of a file is
xxh3_128 of the list of its block checksums: it depends on every byte, and many threads can hash blocks in any order.
Block checksums locate a flipped bit. xxh3 detects accidents, not forgery, because a forger can rewrite the manifest as
well. The checksums describe what was written, not what a later read found; every rank sends them to the coordinator,
which writes them into the manifest.

Time: one xxh3 pass over data that is still in the processor's cache, several GiB/s with the interpreter lock released.
Memory: a hash state per block.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Iterable, Iterator

import msgspec
import xxhash

from paddleformers_fc.storage.remote import RemoteStatus

_HEX = re.compile("[0-9a-f]+")

DEFAULT_BLOCK_BYTES = 4 * 1024 * 1024
"""Default number of bytes that one block checksum covers."""

BLOCK_DIGEST_BYTES = 8
"""Length of a block checksum."""


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A file as a manifest lists it.

    Attributes:
        path: posix path relative to the checkpoint directory.
        size: length of the file in bytes.
        digest: xxh3_128 of the block checksums, 32 lower-case hex digits.
    """

    path: str
    size: int
    digest: str


class FileChecksum(FileRecord, frozen=True, forbid_unknown_fields=True, gc=False):
    """A finished file with the checksums of its blocks.

    Attributes:
        block_bytes: length in bytes of every block but the last, which may be shorter.
        blocks: xxh3_64 of every block, 8 bytes each, most significant first. Block ``i`` covers the bytes from
            ``i * block_bytes`` of the *file*, headers included. An empty file has no block.
    """

    block_bytes: int
    blocks: bytes

    @property
    def count(self) -> int:
        """The number of blocks."""
        return len(self.blocks) // BLOCK_DIGEST_BYTES

    def block(self, number: int) -> bytes:
        """Return the checksum of a block."""
        return self.blocks[number * BLOCK_DIGEST_BYTES : (number + 1) * BLOCK_DIGEST_BYTES]


def records_of(checksums: Iterable[FileChecksum]) -> list[FileRecord]:
    """Return the manifest's records of files, sorted by path."""
    return [FileRecord(one.path, one.size, one.digest) for one in sorted(checksums, key=lambda one: one.path)]


INDEX_NAME = "flex_index.safetensors"
"""Name of a checkpoint's index, which contains no tensors."""


def is_document(path: str) -> bool:
    """Return whether a file of a checkpoint or export is a metadata file: small, and without tensors."""
    return not path.endswith(".safetensors") or path == INDEX_NAME


def record_faults(record: FileRecord) -> Iterator[str]:
    """Yield the faults of a record that was read from storage."""
    if not _is_plain(record.path):
        yield "is not a plain relative path"
    if record.size < 0:
        yield f"has the size {record.size}"
    if not is_hex(record.digest, 32):
        yield "has a malformed checksum"


def _is_plain(path: str) -> bool:
    parts = path.split("/")
    return "\0" not in path and "\\" not in path and all(part not in ("", ".", "..") for part in parts)


def is_hex(text: str, length: int) -> bool:
    return len(text) == length and _HEX.fullmatch(text) is not None


MISSING = "is missing"


def size_fault(status: os.stat_result | RemoteStatus | None, size: int) -> str:
    """Return how the status of a file contradicts its recorded size; empty if they match."""
    if status is None:
        return MISSING
    if isinstance(status, RemoteStatus):
        regular, found = status.kind == "file", status.size
    else:
        regular, found = stat.S_ISREG(status.st_mode), status.st_size
    if not regular:
        return "is not a regular file"
    if found < size:
        return f"is truncated: {found} of {size} bytes"
    if found > size:
        return f"is too long: {found} bytes instead of {size}"
    return ""


def checksum_of(path: str, data: bytes) -> FileChecksum:
    """Return the checksum of a file with this content."""
    hasher = BlockHasher()
    hasher.update(data)
    return hasher.file_checksum(path)


digest_of_blocks = xxhash.xxh3_128_hexdigest
"""Returns the digest of a file from the checksums of its blocks."""


class _Block:
    """A block that is being hashed: its state, the number of bytes hashed, and copies of bytes that came too early."""

    def __init__(self) -> None:
        self.state = xxhash.xxh3_64()
        self.length = 0
        self.early: dict[int, bytes] = {}


class BlockHasher:
    """Hashes the blocks of a file whose bytes may come in any order and from several threads.

    Bytes that come before their predecessors in the same block are copied until the predecessors are hashed.

    Args:
        block_bytes: length of a block in bytes; block ``i`` starts at offset ``i * block_bytes``.
    """

    def __init__(self, block_bytes: int = DEFAULT_BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._size = 0
        self._blocks: dict[int, _Block] = {}
        self._lock = threading.Lock()

    def update(self, data: memoryview | bytes, begin: int | None = None) -> None:
        """Hash contiguous bytes of any length.

        Args:
            data: the bytes.
            begin: their offset in the file; None if they follow the bytes hashed so far.
        """
        view = memoryview(data)
        left = view.cast("B") if view.nbytes else view
        at = self._size if begin is None else begin
        while left.nbytes:
            number, offset = divmod(at, self._block_bytes)
            part = left[: self._block_bytes - offset]
            self._hash(number, offset, part)
            left, at = left[part.nbytes :], at + part.nbytes

    def file_checksum(self, path: str) -> FileChecksum:
        """Return the checksum of the bytes so far, as a file named ``path``; more bytes may follow afterwards."""
        blocks = b"".join(self._blocks[number].state.digest() for number in range(len(self._blocks)))
        return FileChecksum(path, self._size, digest_of_blocks(blocks), self._block_bytes, blocks)

    def _hash(self, number: int, offset: int, part: memoryview | bytes) -> None:
        with self._lock:
            self._size += len(part)
            block = self._blocks.setdefault(number, _Block())
            if offset != block.length:
                block.early[offset] = bytes(part)
                return
        # No other thread has the bytes at this offset, so no other thread changes the state meanwhile.
        while part:
            block.state.update(part)
            with self._lock:
                block.length += len(part)
                part = block.early.pop(block.length, b"")
