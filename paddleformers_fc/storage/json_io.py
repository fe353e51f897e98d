"""JSON from untrusted sources, read within bounds.

Configurations, indices and the Trainer's state come from disks and downloads. Python's reader accepts more than JSON
(other encodings, duplicate keys of which it keeps the last) and fails in many ways (recursion, numbers of thousands of
digits). This module has one reader and one failure: :class:`ValueError` with the reason. NaN and infinity are accepted,
because the Trainer's state and some published configurations contain them.

A document with a recorded checksum is read by :func:`read_recorded` alone. The file is read whole in any case, so its
checksum is compared at every verification level.

Time is linear in the text. Memory: the bytes of the file, which are bounded, and at most thirty times as much while
they are parsed.
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
"""The default bound on the length of a document; a configuration has a few kilobytes."""

MAX_DEPTH = 32
"""Maximum nesting depth of a document."""

MAX_DIGITS = 40
"""Maximum number of characters of an integer: two to the power of 128 has 39 digits."""

_T = TypeVar("_T")


def read_document(path: AnyPath, most: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Return all bytes of a file that is parsed as a whole.

    Args:
        path: the file.
        most: bound on its length in bytes; a longer one is refused before it is read.

    Raises:
        Corrupt: there is no such file.
        FormatError: it is longer, or not a regular file.
        StorageError: it cannot be read.
    """
    with open_regular(path) as file:
        if file.size > most:
            raise FormatError(
                f"{path} is too long to be read: {file.size} bytes.",
                where=str(path),
                evidence=[f"at most {most} bytes are read of such a file"],
                next_step="The file was damaged or is something else. Restore it or use another copy.",
            )
        return read_range(file, 0, file.size)


def read_recorded(directory: AnyPath, checksum: FileRecord, most: int, next_step: str) -> bytes:
    """Return all bytes of a small file after comparing them with its recorded checksum.

    Args:
        directory: the directory that the checksum's path is relative to.
        checksum: the size and checksum recorded when the file was written.
        most: bound on its length in bytes, as for :func:`read_document`.
        next_step: advice for an altered file.

    Raises:
        Corrupt: the file is missing or altered.
        FormatError: it is longer than the bound, or not a regular file.
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
    """Return the typed value of a JSON text.

    Args:
        decoder: of the type.
        raw: the text.
        where: path of the document, for the error.
        next_step: advice for a text that is something else.

    Raises:
        FormatError: it is no JSON text, or has another type.
    """
    try:
        return decoder.decode(raw)
    except _UNREADABLE as error:
        raise FormatError(f"{where} is not valid: {error}.", where=where, next_step=next_step) from error


def require_seal(path: AnyPath, recorded: str, computed: str, next_step: str) -> None:
    """Compare the checksum that a document has of itself.

    Raises:
        Corrupt: it is another one.
    """
    if recorded != computed:
        raise Corrupt(
            f"{path} does not match its own checksum.",
            where=str(path),
            evidence=[f"recorded {recorded}, computed {computed}"],
            next_step=next_step,
        )


class _Extension(msgspec.Struct, frozen=True):
    """The part of an extension that every reader reads."""

    must_understand: bool = True


_extensions = msgspec.json.Decoder(_Extension)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def ignored_extensions(raw: bytes | msgspec.Raw, known: Collection[str], where: str) -> list[str]:
    """Return the fields of a newer writer that a reader ignores: objects with ``"must_understand": false``.

    Args:
        raw: a valid JSON object.
        known: the fields that this version reads.
        where: path of the document, for the error.

    Raises:
        FormatError: with every other unknown field. A reader that ignored one could misread the rest.
    """
    fields = decode_typed(_fields, raw, where, RESTORE_FILE)
    unknown = {name: value for name, value in fields.items() if name not in known}
    required = [name for name, value in unknown.items() if not _may_be_ignored(value)]
    if required:
        raise FormatError(
            f"{where} has fields that this version cannot read.",
            where=where,
            evidence=[f"unknown field `{name}`" for name in required],
            next_step="Read it with the version of paddleformers_fc that wrote it, or a newer one.",
        )
    return list(unknown)


def _may_be_ignored(value: msgspec.Raw) -> bool:
    try:
        return not _extensions.decode(value).must_understand
    except _UNREADABLE:
        return False


def parse_json(raw: bytes | bytearray) -> Any:
    """Return the value of a JSON text in UTF-8.

    Raises:
        ValueError: invalid JSON, or a bound of this module is exceeded; with the reason.
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
        raise ValueError(f"it holds an integer of {len(text)} digits")
    # A count is never negative zero; a reader of integers is told by the type.
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
