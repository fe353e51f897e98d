"""Size and checksums of a finished file.

They are computed while the bytes are written, so they state what *should* be on disk, not what a later read found.
Every rank sends them to the coordinator, which puts them into the manifest.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

import msgspec

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
