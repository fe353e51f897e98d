"""Checksums computed while bytes are written.

A whole-file checksum finds a flipped bit only after the last byte and can be computed by one thread only. Block
checksums locate it and can be recomputed by many threads. Both come from one pass: a writer feeds every byte it writes
to a :class:`BlockHasher`, in file order.

Time: two xxh3 passes over data that is still in the processor's cache, each several GiB/s with the interpreter lock
released. Memory: two hash states and 16 characters per block. xxh3 detects accidents, not forgery, because a forger can
rewrite the manifest too.
"""

from __future__ import annotations

import xxhash

from paddleformers_fc.errors import OptionError
from paddleformers_fc.storage.file_checksums import DEFAULT_BLOCK_BYTES, FileChecksum

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
