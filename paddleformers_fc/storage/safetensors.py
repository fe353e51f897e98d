"""A validating header reader and a streaming writer for the safetensors format.

A header is validated at least as strictly as by the safetensors library: every tensor is inside the file, tensors
neither overlap nor leave gaps, and no name occurs twice. A header in the usual formatting is decoded in bulk, and must
give the same text when encoded again; any other header is decoded entry by entry, so that errors name the entry.

The writer gets names, dtypes and shapes first, then the bytes in any order and from several threads. It hashes long
pieces in a thread while they are written. Tensors start at a page, which makes copies a tenth faster; a caller that
declares wide dtypes first keeps all tensors aligned. Time: linear in the header for reading; one pass over the bytes
for writing. Memory: the header, at most 100 MB as in the library, and about ten times as much to parse it.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from paddleformers_fc.errors import Corrupt, FormatError
from paddleformers_fc.storage.checksum import BlockHasher, FileChecksum
from paddleformers_fc.storage.dtypes import CODES, item_size
from paddleformers_fc.storage.files import RandomAccessWriter, byte_view, open_regular, read_into, read_range
from paddleformers_fc.storage.json_io import parse_json
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.storage.remote_writes import RemoteFileWriter
from paddleformers_fc.text import count_text, numbers_text

MAX_HEADER_BYTES = 100_000_000
"""Maximum length of a header in bytes, as in the safetensors library."""

MAX_AXES = 32
"""Maximum number of axes: numpy's bound, above Paddle's."""

MAX_EMPTY_SHAPES = 1024
"""Maximum number of empty shapes in a file, because their extents could be chosen to make look-ups slow."""

METADATA_KEY = "__metadata__"
"""The header key that is not a tensor."""

_LENGTH_BYTES = 8
# Bytes of the first read: most headers are shorter, and every read of a remote file is a request.
_FIRST_BYTES = 32 * 1024
_ALIGNMENT = 4096
# Small enough to stay in the processor's cache while one thread writes and another hashes.
_WRITE_BYTES = 4 * 1024 * 1024
# Shorter pieces are hashed in less time than it takes to wake a thread.
_MIN_THREADED_BYTES = 1024 * 1024
_MAX_COUNT = 2**64 - 1
_FIELDS = frozenset({"dtype", "shape", "data_offsets"})


class _RawEntry(msgspec.Struct, frozen=True, gc=False):
    """The unchecked header entry of one tensor, with its fields in the usual order."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


class _Head(msgspec.Struct, frozen=True, gc=False):
    """The key of a header that is not a tensor."""

    metadata: dict[str, str] = msgspec.field(name=METADATA_KEY, default_factory=dict)


_claims = msgspec.json.Decoder(dict[str, _RawEntry])
_head = msgspec.json.Decoder(_Head)


class TensorEntry(msgspec.Struct, frozen=True, gc=False):
    """The position of one tensor.

    Attributes:
        dtype: safetensors code, ``"F32"``, ``"BF16"``, ...
        shape: extents, outermost first; ``()`` for a scalar.
        begin: offset of the first byte, from the start of the *file*.
        end: offset after the last byte, from the start of the *file*.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(msgspec.Struct, frozen=True):
    """The header of a safetensors file.

    Attributes:
        tensors: every tensor by name, in the order of their bytes.
        metadata: the free text map, empty if the file has none.
        file_size: length of the file in bytes.
    """

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    file_size: int


def read_header(path: AnyPath) -> Header:
    """Read and validate the header of a safetensors file.

    Args:
        path: the file; a link is followed.

    Raises:
        Corrupt: the file is missing, truncated, or longer than its header describes.
        FormatError: the header is invalid; the error names the file and the tensor.
        StorageError: the operating system refused to open or read it.
    """
    with open_regular(path) as file:
        first = read_range(file, 0, min(file.size, _FIRST_BYTES))
        data_begin = _header_end(path, first, file.size)
        known = first[_LENGTH_BYTES:data_begin]
        raw = bytearray(data_begin - _LENGTH_BYTES)
        raw[: len(known)] = known
        if len(known) < len(raw):
            read_into(file, len(first), memoryview(raw)[len(known) :])
        return _parse(path, raw, data_begin, file.size)


def parse_header(path: AnyPath, data: bytes) -> Header:
    """Return the header of a file from its complete content; see :func:`read_header` for the errors."""
    data_begin = _header_end(path, data, len(data))
    return _parse(path, bytearray(data[_LENGTH_BYTES:data_begin]), data_begin, len(data))


def _header_end(path: AnyPath, first: bytes, size: int) -> int:
    """Return the offset after the header of a file."""
    if size < _LENGTH_BYTES:
        raise Corrupt(
            f"{path} is truncated: {size} bytes cannot hold a safetensors header.",
            where=str(path),
            next_step=_RESTORE,
        )
    (length,) = struct.unpack_from("<Q", first)
    if length > MAX_HEADER_BYTES:
        _reject(path, f"its header claims {length} bytes, and at most {MAX_HEADER_BYTES} are allowed")
    end: int = _LENGTH_BYTES + length
    if end > size:
        raise Corrupt(
            f"{path} is truncated inside its header.",
            where=str(path),
            evidence=[f"header ends at byte {end}, file ends at byte {size}"],
            next_step=_RESTORE,
        )
    return end


class FileLayout(msgspec.Struct, frozen=True):
    """The layout of a file before its tensors are written.

    Attributes:
        header: the first bytes, including length field and padding.
        sizes: size of every tensor in bytes, in file order.
        trailer: the bytes after the tensors; empty in a safetensors file.
    """

    header: bytes
    sizes: tuple[int, ...]
    trailer: bytes = b""


def layout_file(path: Path, entries: Sequence[tuple[str, str, Sequence[int]]], metadata: dict[str, str]) -> FileLayout:
    """Return the layout of a safetensors file.

    Args:
        path: the file, for errors; nothing is created.
        entries: ``(name, dtype code, shape)`` of every tensor, in the order they will be written.
        metadata: the free text map of the header; empty for none.

    Raises:
        FormatError: a name occurs twice, a dtype is unknown, a shape is invalid, or the header is too long.
    """
    document: dict[str, Any] = {METADATA_KEY: _metadata(path, metadata)} if metadata else {}
    sizes: list[int] = []
    begin = 0
    for name, dtype, shape in entries:
        if name in document or name == METADATA_KEY:
            _reject_write(path, f"the tensor name {name!r} is already in use")
        if any(extent < 0 for extent in shape):
            _reject_write(path, f"{name!r} has the shape {numbers_text(shape)}")
        extents = tuple(map(int, shape))
        sizes.append(item_size(dtype) * math.prod(extents))
        document[name] = _RawEntry(dtype, extents, (begin, begin + sizes[-1]))
        begin += sizes[-1]
    text = _text(path, document)
    padding = -(_LENGTH_BYTES + len(text)) % _ALIGNMENT
    length = len(text) + padding
    if length > MAX_HEADER_BYTES:
        _reject_write(path, f"its header would have {length} bytes, and at most {MAX_HEADER_BYTES} can be read back")
    return FileLayout(struct.pack("<Q", length) + text + b" " * padding, tuple(sizes))


class TensorWriter:
    """Writes and hashes a file of tensors, in any order and from several threads.

    The header is written at once. When :meth:`close` returns, the file is complete, and synced if it is local.

    Args:
        file: the new file, which this object closes.
        layout: the result of :func:`layout_file`.

    Raises:
        StorageError: the header cannot be written.
    """

    def __init__(self, file: RandomAccessWriter | RemoteFileWriter, layout: FileLayout) -> None:
        self._file, self._layout = file, layout
        self._size = self._left = sum(layout.sizes)
        self._hasher = BlockHasher()
        self._lock = threading.Lock()
        self._hash_thread = ThreadPoolExecutor(1, "flex-hash")
        try:
            self._put(0, memoryview(layout.header))
        except BaseException:
            self.abandon()
            raise

    def write(self, begin: int, buffer: Any) -> bool:
        """Write some bytes of the tensors; each byte may be written once.

        Args:
            begin: their offset in the concatenated bytes of all tensors, in the order of the layout.
            buffer: the bytes, little-endian and C-contiguous: memoryview, bytes or numpy array. The dtype of an array
                is not checked: bfloat16 may come as uint16.
        Returns:
            whether all bytes are written now.

        Raises:
            FormatError: the bytes exceed the layout.
            StorageError: the operating system or the store refused.
        """
        view = byte_view(buffer)
        if begin < 0 or begin + view.nbytes > self._size:
            given = f"the bytes from {begin} to {begin + view.nbytes} were given"
            _reject_write(self._file.path, f"{given}, and its tensors have {self._size}")
        self._put(len(self._layout.header) + begin, view)
        with self._lock:
            self._left -= view.nbytes
            return self._left == 0

    def _put(self, begin: int, view: memoryview) -> None:
        for start in range(0, view.nbytes, _WRITE_BYTES):
            chunk = view[start : start + _WRITE_BYTES]
            if chunk.nbytes < _MIN_THREADED_BYTES:
                self._hasher.update(chunk, begin + start)
                self._file.write(begin + start, chunk)
                continue
            hashed = self._hash_thread.submit(self._hasher.update, chunk, begin + start)
            try:
                self._file.write(begin + start, chunk)
            finally:
                hashed.result()  # The caller may change the memory afterwards.

    def close(self) -> FileChecksum:
        """Complete and close the file, and return its checksum.

        Raises:
            FormatError: bytes are missing, or were written twice.
            StorageError: the operating system or the store refused, or the file is already closed.
        """
        if self._left:
            self.abandon()
            _reject_write(self._file.path, f"{self._size - self._left} of {self._size} bytes were given")
        self._put(len(self._layout.header) + self._size, memoryview(self._layout.trailer))
        self._hash_thread.shutdown()
        self._file.close()
        return self._hasher.file_checksum(self._file.name)

    def abandon(self) -> None:
        """Abandon an incomplete file; does nothing after :meth:`close`."""
        self._hash_thread.shutdown()
        self._file.abandon()


_RESTORE = "Restore the file from its source, or use another checkpoint."


def _reject(path: AnyPath, fault: str) -> NoReturn:
    raise FormatError(
        f"{path} is not a valid safetensors file: {fault}.",
        where=str(path),
        next_step="Download or save the file again; no tensor was read.",
    )


def _reject_write(path: AnyPath, fault: str) -> NoReturn:
    raise FormatError(f"{path} cannot be written: {fault}.", where=str(path))


def _parse(path: AnyPath, raw: bytearray, data_begin: int, file_size: int) -> Header:
    metadata, claims = _decode_usual(raw) or _decode_any(path, raw)
    tensors: dict[str, TensorEntry] = {}
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}
    due, previous, empty = 0, "the header", 0
    for name, claim in sorted(claims.items(), key=lambda item: item[1].data_offsets):
        kind = (claim.dtype, claim.shape)
        if kind not in sizes:
            sizes[kind] = _size(path, name, *kind)
            empty += sizes[kind] == 0
            if empty > MAX_EMPTY_SHAPES:
                _reject(path, f"it has tensors of more than {MAX_EMPTY_SHAPES} shapes without an element")
        begin, end = claim.data_offsets
        if begin != due or end != due + sizes[kind]:
            _reject(path, f"tensor {name!r} {_misplaced(claim, sizes[kind], due, previous)}")
        tensors[name] = TensorEntry(claim.dtype, claim.shape, data_begin + begin, data_begin + end)
        due, previous = end, repr(name)
    if data_begin + due != file_size:
        fault = "truncated" if data_begin + due > file_size else "longer than its header says"
        described = f"the header describes {data_begin + due} bytes, the file has {file_size}"
        raise Corrupt(
            f"{path} is {fault}.",
            where=str(path),
            evidence=[described, *_cut_tensors(tensors, file_size)],
            next_step=_RESTORE,
        )
    return Header(tensors, metadata, file_size)


def _decode_usual(raw: bytearray) -> tuple[dict[str, str], dict[str, _RawEntry]] | None:
    """Return metadata and entries of a header in the usual formatting; None for any other header."""
    try:
        metadata, claims = _head.decode(raw).metadata, _claims.decode(raw)
        # The second decoder treats this key as a tensor.
        claims.pop(METADATA_KEY, None)
        spelled = msgspec.json.encode({METADATA_KEY: metadata, **claims} if metadata else claims)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    # If the texts are equal, no key is duplicate, missing or unknown, and all numbers are formatted as usual.
    is_equal = raw.startswith(spelled) and not raw[len(spelled) :].strip(b" ")
    return (metadata, claims) if is_equal else None


def _decode_any(path: AnyPath, raw: bytearray) -> tuple[dict[str, str], dict[str, _RawEntry]]:
    """Return metadata and entries of a header, decoded one by one, so that errors can name the entry."""
    if not raw.startswith(b"{"):
        _reject(path, "its header does not start with '{'")
    try:
        document = parse_json(raw)
    except ValueError as error:
        _reject(path, f"its header is not valid JSON: {error}")
    _text(path, document)
    metadata = _metadata(path, document.pop(METADATA_KEY, {}))
    return metadata, {name: _entry(path, name, claim) for name, claim in document.items()}


def _size(path: AnyPath, name: str, dtype: str, shape: tuple[int, ...]) -> int:
    if dtype not in CODES:
        raise FormatError(
            f"{path} contains a dtype that is not supported: tensor {name!r} has the dtype {dtype!r}.",
            where=str(path),
            evidence=[f"supported: {', '.join(sorted(CODES))}"],
            next_step="Save the tensor in another dtype; no tensor was read.",
        )
    if not all(map(_is_count, shape)):
        _reject(path, f"tensor {name!r} has a shape that is not a list of integers from 0 to 2^64-1")
    if len(shape) > MAX_AXES:
        _reject(path, f"tensor {name!r} has {len(shape)} axes, and at most {MAX_AXES} are allowed")
    size = item_size(dtype)
    for extent in shape:
        size *= extent
        # Checked for every extent, so that numbers stay small; as in the library, a later extent of zero does not help.
        if not _is_count(size):
            _reject(path, f"tensor {name!r} of shape {numbers_text(shape)} has more than 2^64-1 bytes")
    return size


def _misplaced(claim: _RawEntry, size: int, due: int, previous: str) -> str:
    begin, end = claim.data_offsets
    if not (_is_count(begin) and _is_count(end)):
        return "has data_offsets that are not two integers from 0 to 2^64-1"
    if end - begin != size:
        shape = numbers_text(claim.shape)
        return f"takes the bytes {begin} to {end}, but {claim.dtype} of shape {shape} has {size} bytes"
    relation = "overlaps" if begin < due else "leaves a gap behind"
    return f"{relation} {previous} (begins at byte {begin} of the tensors, not {due})"


def _metadata(path: AnyPath, claim: Any) -> dict[str, str]:
    if not isinstance(claim, dict):
        _reject(path, f"{METADATA_KEY} is not an object")
    for key, value in claim.items():
        if not isinstance(value, str):
            _reject(path, f"{METADATA_KEY}[{key!r}] is not a string")
    return claim


def _entry(path: AnyPath, name: str, claim: Any) -> _RawEntry:
    if not isinstance(claim, dict) or claim.keys() != _FIELDS:
        _reject(path, f"tensor {name!r} does not have exactly the fields {', '.join(sorted(_FIELDS))}")
    try:
        return msgspec.convert(claim, _RawEntry)
    except msgspec.ValidationError as error:
        _reject(path, f"tensor {name!r} has an invalid entry: {error}")


def _is_count(value: int) -> bool:
    return 0 <= value <= _MAX_COUNT


def _cut_tensors(ordered: dict[str, TensorEntry], file_size: int) -> list[str]:
    cut = [name for name, entry in ordered.items() if entry.end > file_size]
    return [f"{count_text(len(cut), 'tensor')} cut off, {cut[0]!r} first"] if cut else []


def _text(path: AnyPath, document: dict[str, Any]) -> bytes:
    """Encode a header as JSON, and check that it contains only valid Unicode."""
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError as error:
        _reject(path, f"its header is not valid Unicode: {error}, in {error.object[:100]!r}")
