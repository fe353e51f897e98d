"""Checksums computed while bytes are written.

A whole-file checksum finds a flipped bit only after the last byte and can be computed by one thread only. Block
checksums locate it and can be recomputed by many threads. Both come from one pass: a writer feeds every byte it writes
to a :class:`BlockHasher`, in file order.

Time: two xxh3 passes over data that is still in the processor's cache, each several GiB/s with the interpreter lock
released. Memory: two hash states and 16 characters per block. xxh3 detects accidents, not forgery, because a forger can
rewrite the manifest too.

Size and checksums of a finished file.

They are computed while the bytes are written, so they state what *should* be on disk, not what a later read found.
Every rank sends them to the coordinator, which puts them into the manifest.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

import msgspec
import xxhash

from paddleformers_fc.errors import OptionError
from paddleformers_fc.storage.remote import RemoteStatus

DEFAULT_BLOCK_BYTES = 4 * 1024 * 1024
"""Default number of bytes that one block checksum covers."""


class FileChecksum(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One finished file.

    Attributes:
        path: posix path relative to the checkpoint directory.
        size: length of the file in bytes.
        digest: xxh3_128 of the whole file, 32 lower-case hex digits.
        block_bytes: length in bytes of every block but the last, which may be shorter.
        blocks: xxh3_64 of every block, 16 lower-case hex digits each. Block ``i`` covers the bytes from
            ``i * block_bytes`` of the *file*, headers included. An empty file has no block.
    """

    path: str
    size: int
    digest: str
    block_bytes: int
    blocks: list[str]


def is_document(path: str) -> bool:
    """Return whether a file of a checkpoint or export holds no tensors, so that it is small and read whole."""
    return not path.endswith(".safetensors")


def checksum_faults(checksum: FileChecksum) -> Iterator[str]:
    """Yield the faults of a record that was read from a disk."""
    if not _is_plain(checksum.path):
        yield "is not a plain relative path"
    if checksum.size < 0 or checksum.block_bytes < 1:
        yield f"has the size {checksum.size} in blocks of {checksum.block_bytes} bytes"
    elif len(checksum.blocks) != -(-checksum.size // checksum.block_bytes):
        blocks, size, length = len(checksum.blocks), checksum.size, checksum.block_bytes
        yield f"has {blocks} block checksums for {size} bytes in blocks of {length}"
    if not _is_hex(checksum.digest, 32) or not all(_is_hex(block, 16) for block in checksum.blocks):
        yield "has a checksum that is not of the right form"


def _is_plain(path: str) -> bool:
    parts = path.split("/")
    return "\0" not in path and "\\" not in path and all(part not in ("", ".", "..") for part in parts)


def _is_hex(text: str, length: int) -> bool:
    return len(text) == length and set(text) <= set("0123456789abcdef")


def size_fault(status: os.stat_result | RemoteStatus | None, size: int) -> str:
    """Return how the status of a file contradicts its recorded size; empty if it does not."""
    if status is None:
        return "is missing"
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


_CHUNK_BYTES = 512 * 1024


def checksum_of(path: str, data: bytes) -> FileChecksum:
    """Return the checksum of a file by its content."""
    hasher = BlockHasher()
    hasher.update(data)
    return hasher.file_checksum(path)


class BlockHasher:
    """Hashes a stream of bytes, per block and as a whole.

    Args:
        block_bytes: length of a block in bytes; block ``i`` starts at stream offset ``i * block_bytes``.

    Raises:
        OptionError: ``block_bytes`` is not positive.
    """

    def __init__(self, block_bytes: int = DEFAULT_BLOCK_BYTES) -> None:
        if block_bytes < 1:
            raise OptionError(f"A checksum block of {block_bytes} bytes is not possible; at least 1 byte is needed.")
        self._block_bytes = block_bytes
        self._whole = xxhash.xxh3_128()
        self._block = xxhash.xxh3_64()
        self._room = block_bytes
        self._size = 0
        self._blocks: list[str] = []

    def update(self, data: memoryview | bytes) -> None:
        """Hash the next bytes of the stream, contiguous and of any length."""
        view = memoryview(data)
        if view.nbytes == 0:
            return
        view = view.cast("B")
        taken = 0
        while taken < view.nbytes:
            # Small steps: the second hash finds in the cache what the first has just read.
            chunk = view[taken : taken + min(self._room, _CHUNK_BYTES)]
            self._whole.update(chunk)
            self._block.update(chunk)
            taken += chunk.nbytes
            self._advance(chunk.nbytes)

    def file_checksum(self, path: str) -> FileChecksum:
        """Return the checksum of the bytes so far as that of a file ``path``; the stream may continue afterwards."""
        blocks = list(self._blocks)
        if self._room != self._block_bytes:
            blocks.append(self._block.hexdigest())
        return FileChecksum(path, self._size, self._whole.hexdigest(), self._block_bytes, blocks)

    def _advance(self, count: int) -> None:
        self._size += count
        self._room -= count
        if self._room == 0:
            self._blocks.append(self._block.hexdigest())
            self._block.reset()
            self._room = self._block_bytes
