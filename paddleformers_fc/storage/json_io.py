"""Read JSON from untrusted sources within bounds.

Configurations, indices and the Trainer's state come from disks and downloads. Python's reader accepts more than JSON
(other encodings, duplicate keys) and fails in many ways (recursion, numbers with thousands of digits).
:func:`parse_json` raises only :class:`ValueError`, with the reason. It accepts NaN and infinity, because the Trainer's
state and some published configurations contain them.

Metadata files with a recorded checksum are read with :func:`read_recorded`, which compares the checksum at every
verification level, because the complete file is read in any case.

Time: linear in the text. Memory: the bytes of the file, which are bounded, and up to thirty times as much to parse it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from typing import Any, TypeVar

import msgspec

from paddleformers_fc.errors import Corrupt, FormatError
from paddleformers_fc.storage.checksum import FileRecord, checksum_of
from paddleformers_fc.storage.files import open_regular, read_range
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.storage.remote import RESTORE_FILE

MAX_DOCUMENT_BYTES = 16 * 1024 * 1024
"""Default maximum length of a JSON file; a configuration has a few kilobytes."""

MAX_DEPTH = 32
"""Maximum nesting depth."""

MAX_DIGITS = 40
"""Maximum number of characters of an integer: 2^128 has 39 digits."""

_T = TypeVar("_T")


def read_document(path: AnyPath, most: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Return all bytes of a metadata file.

    Args:
        path: the file.
        most: maximum length in bytes, checked before the file is read.

    Raises:
        Corrupt: there is no such file.
        FormatError: it is too long, or not a regular file.
        StorageError: it cannot be read.
    """
    with open_regular(path) as file:
        if file.size > most:
            raise FormatError(
                f"{path} is too long: {file.size} bytes.",
                where=str(path),
                evidence=[f"such a file may have at most {most} bytes"],
                next_step="The file is damaged or has another purpose. Restore it or use another copy.",
            )
        return read_range(file, 0, file.size)


def read_recorded(directory: AnyPath, checksum: FileRecord, most: int, next_step: str) -> bytes:
    """Read a metadata file, and compare it with its recorded checksum.

    Args:
        directory: the directory that the checksum's path is relative to.
        checksum: the size and checksum that were recorded when the file was written.
        most: maximum length in bytes, as for :func:`read_document`.
        next_step: advice for an altered file.

    Raises:
        Corrupt: the file is missing or altered.
        FormatError: it is too long, or not a regular file.
        StorageError: it cannot be read.
    """
    path = directory / checksum.path
    raw = read_document(path, most)
    digest = checksum_of(checksum.path, raw).digest
    if (len(raw), digest) != (checksum.size, checksum.digest):
        raise Corrupt(
            f"{path} does not match its checksum.",
            where=str(path),
            evidence=[f"recorded {checksum.size} bytes, {checksum.digest}; found {len(raw)} bytes, {digest}"],
            next_step=next_step,
        )
    return raw


def decode_typed(decoder: msgspec.json.Decoder[_T], raw: bytes | msgspec.Raw, where: str, next_step: str) -> _T:
    """Decode JSON to a typed value.

    Args:
        decoder: the decoder of the type.
        raw: the text.
        where: path of the file, for the error.
        next_step: advice for an invalid text.

    Raises:
        FormatError: the text is not JSON, or not of the type.
    """
    try:
        return decoder.decode(raw)
    except _UNREADABLE as error:
        raise FormatError(f"{where} is not valid: {error}.", where=where, next_step=next_step) from error


def check_seal(path: AnyPath, recorded: str, computed: str, next_step: str) -> None:
    """Check the checksum that a file contains of itself.

    Raises:
        Corrupt: the checksums differ.
    """
    if recorded != computed:
        raise Corrupt(
            f"{path} does not match its own checksum.",
            where=str(path),
            evidence=[f"recorded {recorded}, computed {computed}"],
            next_step=next_step,
        )


class _Extension(msgspec.Struct, frozen=True):
    """The part of an extension that every reader understands."""

    must_understand: bool = True


_extensions = msgspec.json.Decoder(_Extension)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def ignored_extensions(raw: bytes | msgspec.Raw, known: Collection[str], where: str) -> list[str]:
    """Return the unknown fields that a reader may ignore: objects with ``"must_understand": false``.

    Args:
        raw: a valid JSON object.
        known: the fields that this version reads.
        where: path of the file, for the error.

    Raises:
        FormatError: there are other unknown fields, without which a reader could misread the rest.
    """
    fields = decode_typed(_fields, raw, where, RESTORE_FILE)
    unknown = {name: value for name, value in fields.items() if name not in known}
    required = [name for name, value in unknown.items() if not _may_be_ignored(value)]
    if required:
        raise FormatError(
            f"{where} has unknown fields.",
            where=where,
            evidence=[f"unknown field `{name}`" for name in required],
            next_step="Read it with the version of paddleformers_fc that wrote it, or a newer version.",
        )
    return list(unknown)


def _may_be_ignored(value: msgspec.Raw) -> bool:
    try:
        return not _extensions.decode(value).must_understand
    except _UNREADABLE:
        return False


def parse_json(raw: bytes | bytearray) -> Any:
    """Parse JSON in UTF-8.

    Raises:
        ValueError: the JSON is invalid, or exceeds a bound of this module; contains the reason.
    """
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_object, parse_int=_integer)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check_depth(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"it has the key {twice[:100]!r} twice")
    return found


def _integer(text: str) -> int | float:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"it contains an integer of {len(text)} digits")
    # As a float, so that code that expects an integer rejects negative zero.
    return -0.0 if text == "-0" else int(text)


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [one for outer in level if isinstance(outer, (dict, list)) for one in _within(outer)]
        if not level:
            return
    raise ValueError("it is nested too deeply")


def _within(value: dict[str, Any] | list[Any]) -> list[Any]:
    items = value.values() if isinstance(value, dict) else value
    return [one for one in items if isinstance(one, (dict, list))]
