"""What a writer says about a file it finished.

A receipt is taken while the bytes are written, so it states what *should* be on disk, not what a later read found
there. Receipts travel from every rank to the coordinator, which puts them into the manifest.
"""

from __future__ import annotations

import msgspec

DEFAULT_BLOCK_BYTES = 4 * 1024 * 1024
"""How many bytes one block checksum covers, unless a writer is told otherwise."""


class FileReceipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
