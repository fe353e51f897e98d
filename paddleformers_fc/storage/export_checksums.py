"""``flex_checksums.json``: the sizes and checksums of all files of an export, next to its index.

Transformers and other readers ignore this file. Its content depends only on the exported files, so that exports of
equal content have equal checksum files under every layout. It contains a checksum of itself.

Tools that change the directory do not update the file. Every error therefore advises to delete it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec
import xxhash

from paddleformers_fc.errors import FormatError
from paddleformers_fc.storage.block_checksums import compare_files
from paddleformers_fc.storage.checksum import FileChecksum, FileRecord, digest_of_blocks, is_hex, record_faults
from paddleformers_fc.storage.files import exists
from paddleformers_fc.storage.json_io import check_seal, decode_typed, read_document, read_recorded
from paddleformers_fc.storage.paths import AnyPath

CHECKSUMS_NAME = "flex_checksums.json"
"""The file's name inside an export."""

FORMAT = "flex_checksums"
VERSION = 2
_READABLE = (1, VERSION)
"""Version 1 has a different digest of a file; a reader computes the current one from the blocks."""
MAX_CHECKSUMS_BYTES = 256 * 1024 * 1024
"""Maximum size of a checksum file: enough for an export of 50 TB."""

_DELETE = "Delete this file to use the weights without checksums, or use the version that wrote it."

FileChecksums = Mapping[str, FileChecksum]
"""FileChecksums by path relative to the directory."""


class _Entry(FileRecord, frozen=True, forbid_unknown_fields=True):
    """The checksums of one file; ``blocks`` has 16 lower-case hex digits per block."""

    block_bytes: int
    blocks: list[str]

    def faults(self) -> Iterator[str]:
        """Yield the faults of an entry that was read from storage."""
        yield from record_faults(self)
        if self.block_bytes < 1 or len(self.blocks) != -(-self.size // self.block_bytes):
            blocks, size, length = len(self.blocks), self.size, self.block_bytes
            yield f"has {blocks} block checksums for {size} bytes in blocks of {length}"
        if not all(is_hex(block, 16) for block in self.blocks):
            yield "has a malformed block checksum"

    @property
    def checksum(self) -> FileChecksum:
        """The checksums of the file."""
        blocks = bytes.fromhex("".join(self.blocks))
        return FileChecksum(self.path, self.size, digest_of_blocks(blocks), self.block_bytes, blocks)


class _Checksums(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of the file; ``seal`` is xxh3_128 of the encoded checksums."""

    format: str = FORMAT
    version: int = VERSION
    files: list[_Entry]
    seal: str


_decoder = msgspec.json.Decoder(_Checksums)


def encode_checksums(checksums: Iterable[FileChecksum]) -> bytes:
    """Return the checksum file of an export, given the checksums of all its files."""
    files = [
        _Entry(one.path, one.size, one.digest, one.block_bytes, [one.block(at).hex() for at in range(one.count)])
        for one in sorted(checksums, key=lambda checksum: checksum.path)
    ]
    raw = msgspec.json.encode(_Checksums(files=files, seal=_seal(files)))
    return msgspec.json.format(raw, indent=1) + b"\n"


def read_checksums(directory: AnyPath) -> FileChecksums | None:
    """Read the checksum file of a directory of open weights; None if there is no such file.

    Raises:
        FormatError: the file is malformed, or has an unknown version.
        Corrupt: it does not match its own checksum.
        StorageError: it cannot be read.
    """
    path = directory / CHECKSUMS_NAME
    if not exists(path):
        return None
    document = decode_typed(_decoder, read_document(path, MAX_CHECKSUMS_BYTES), str(path), _DELETE)
    if document.format != FORMAT or document.version not in _READABLE:
        raise _malformed(path, [f"format {document.format!r} version {document.version}"])
    check_seal(path, document.seal, _seal(document.files), restore_or_delete(directory))
    faults = [f"{one.path!r} {fault}" for one in document.files for fault in one.faults()]
    if faults:
        raise _malformed(path, faults)
    return {one.path: one.checksum for one in document.files}


def verify_export(directory: AnyPath, checksums: FileChecksums, level: str, *, needed: Collection[str]) -> None:
    """Compare the files of an export with their checksums.

    A listed file may be missing if it is not needed, because a download may omit files that it does not use.

    Args:
        directory: the export.
        checksums: the result of :func:`read_checksums`.
        level: ``size`` compares sizes, and the checksums of metadata files; ``full`` compares all checksums.
        needed: the files that must exist and must be listed.

    Raises:
        Corrupt: files are damaged, missing or not listed; lists every fault.
        StorageError: a file cannot be read, and nothing else is wrong.
    """
    found = compare_files(directory, checksums.values(), level, checksums.keys() - set(needed))
    unlisted = sorted(set(needed) - checksums.keys())
    found.faults[:0] = [f"{name} is needed, and {CHECKSUMS_NAME} does not list it" for name in unlisted]
    found.raise_if_found(f"{directory} does not match its {CHECKSUMS_NAME}", directory, restore_or_delete(directory))


def read_exported(directory: AnyPath, checksums: FileChecksums | None, name: str, most: int) -> bytes:
    """Read a metadata file of open weights, and compare it with its checksum if one is recorded.

    Args:
        directory: the open weights.
        checksums: the result of :func:`read_checksums`.
        name: the file's path relative to the directory.
        most: maximum length in bytes.

    Raises:
        Corrupt: the file is missing or altered.
        FormatError: it is too long, or not a regular file.
        StorageError: it cannot be read.
    """
    if checksums is None or name not in checksums:
        return read_document(directory / name, most)
    return read_recorded(directory, checksums[name], most, restore_or_delete(directory))


def restore_or_delete(directory: AnyPath) -> str:
    """Return the advice for a file that differs from the exported file."""
    return (
        "Restore these files, or export again. If they were written again on purpose, as by "
        f"tokenizer.save_pretrained, delete {directory / CHECKSUMS_NAME}: without it they are not compared."
    )


def _malformed(path: AnyPath, evidence: list[str]) -> FormatError:
    return FormatError(f"{path} is not a valid checksum file.", where=str(path), evidence=evidence, next_step=_DELETE)


def _seal(files: list[_Entry]) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(files))
