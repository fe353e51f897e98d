"""A validating header reader and a streaming writer for the safetensors format.

The file: 8 bytes of little-endian header length, a JSON object, the tensors' bytes. This module never touches the
tensors' bytes when it reads: it returns where they are, and ``ranges`` reads them. A header is validated before it is
returned, at least as strictly as by the safetensors library: an undetected fault would become wrong numbers in a model.
The checks prove that every tensor is inside the file, no two overlap, no byte is unaccounted for, and no name occurs
twice.

Nearly every header is formatted as common writers format it. Such a header is decoded in bulk by types: the decoded
entries, encoded again, must give the same text, so that nothing was skipped. Every other header is decoded entry by
entry, so that an error names the entry. What the entries say is checked in one place.

The writer takes names, dtypes and shapes first, and then the bytes straight from the caller's memory, in any order and
from many threads. It hashes long pieces in a thread of its own while they are written. The tensors start at a whole
page: a copy between a page of the file and memory of the same alignment is a tenth faster. The format allows no gaps
between tensors, so a caller that declares wide dtypes first keeps all of them aligned.

Memory: the header (at most 100 MB, as in the library, about ten times that while it is parsed). Time: linear in the
header for reading, one pass over the bytes for writing.
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
from paddleformers_fc.storage.files import (
    RandomAccessWriter,
    byte_view,
    open_regular,
    read_into,
    read_range,
)
from paddleformers_fc.storage.json_io import parse_json
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.storage.remote_writes import RemoteFileWriter
from paddleformers_fc.text import count_text, numbers_text

MAX_HEADER_BYTES = 100_000_000
"""The longest header that is read or written, in bytes; the safetensors library has the same bound."""

MAX_AXES = 32
"""The most axes of a tensor that is read: numpy's bound, above Paddle's."""

MAX_EMPTY_SHAPES = 1024
"""The most shapes without an element in a file. Their extents can be chosen so that look-ups take long."""

METADATA_KEY = "__metadata__"
"""The one header key that is not a tensor."""

_LENGTH_BYTES = 8
# Read at once: most headers are shorter, and every read of a remote file costs a request.
_FIRST_BYTES = 32 * 1024
_ALIGNMENT = 4096
# Few enough that one thread finds them in the processor's cache after another one has read them.
_WRITE_BYTES = 4 * 1024 * 1024
# Shorter pieces are hashed sooner than a thread has been woken.
_LEAST_BESIDE_BYTES = 1024 * 1024
_MAX_COUNT = 2**64 - 1
_FIELDS = frozenset({"dtype", "shape", "data_offsets"})


class _RawEntry(msgspec.Struct, frozen=True, gc=False):
    """The unchecked header entry of one tensor, its fields in the order of all writers."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


class _Head(msgspec.Struct, frozen=True, gc=False):
    """The one key of a header that is not a tensor."""

    metadata: dict[str, str] = msgspec.field(name=METADATA_KEY, default_factory=dict)


_claims = msgspec.json.Decoder(dict[str, _RawEntry])
_head = msgspec.json.Decoder(_Head)


class TensorEntry(msgspec.Struct, frozen=True, gc=False):
    """The position of one tensor.

    Attributes:
        dtype: safetensors code, ``"F32"``, ``"BF16"``, ...
        shape: extents, outermost first; ``()`` for a scalar.
        begin: offset of the first byte, from the start of the *file*.
        end: offset behind the last byte, from the start of the *file*.
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
        FormatError: the header does not follow the format; the message names the file and the tensor.
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
    """Return the header of a file that was read whole; arguments and errors are those of :func:`read_header`."""
    data_begin = _header_end(path, data, len(data))
    return _parse(path, bytearray(data[_LENGTH_BYTES:data_begin]), data_begin, len(data))


def _header_end(path: AnyPath, first: bytes, size: int) -> int:
    """Return the offset behind the header of a file, by its first bytes and its size."""
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
    """A file that is to be written, up to its numbers.

    Attributes:
        header: its first bytes, length field and padding included.
        sizes: of every tensor, in bytes, in the order of their bytes.
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
        FormatError: a name twice, an unknown dtype, an impossible shape, a header over 100 MB.
    """
    document: dict[str, Any] = {METADATA_KEY: _metadata(path, metadata)} if metadata else {}
    sizes: list[int] = []
    begin = 0
    for name, dtype, shape in entries:
        if name in document or name == METADATA_KEY:
            _reject_write(path, f"the tensor name {name!r} is taken")
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
    """Writes a file of tensors in pieces that come in any order and from several threads, and hashes them.

    The header is written at once. The file is complete, and synced if it is local, when :meth:`close` has returned.

    Args:
        file: the new file, which this object closes.
        layout: its future content, from :func:`layout_file`.

    Raises:
        StorageError: the header cannot be written.
    """

    def __init__(self, file: RandomAccessWriter | RemoteFileWriter, layout: FileLayout) -> None:
        self._file, self._layout = file, layout
        self._size = self._left = sum(layout.sizes)
        self._hasher = BlockHasher()
        self._lock = threading.Lock()
        self._beside = ThreadPoolExecutor(1, "flex-hash")
        try:
            self._put(0, memoryview(layout.header))
        except BaseException:
            self.abandon()
            raise

    def write(self, begin: int, buffer: Any) -> bool:
        """Write some bytes of the tensors; each byte may be written once.

        Args:
            begin: where they are among the bytes of all tensors, in the order of the layout.
            buffer: the bytes, little-endian and C-contiguous: memoryview, bytes or numpy array. The dtype of an array
                is not compared: bfloat16 may come as uint16.
        Returns:
            whether every byte is written now; true for the call that wrote the last of them.

        Raises:
            FormatError: there are not so many bytes.
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
            if chunk.nbytes < _LEAST_BESIDE_BYTES:
                self._hasher.update(chunk, begin + start)
                self._file.write(begin + start, chunk)
                continue
            hashed = self._beside.submit(self._hasher.update, chunk, begin + start)
            try:
                self._file.write(begin + start, chunk)
            finally:
                hashed.result()  # The caller may change the memory afterwards.

    def close(self) -> FileChecksum:
        """Complete and close the file; its checksum.

        Raises:
            FormatError: there are bytes that were not written, or some were written twice.
            StorageError: the operating system or the store refused, or the file is closed already.
        """
        if self._left:
            self.abandon()
            _reject_write(self._file.path, f"{self._size - self._left} of {self._size} bytes were given")
        self._put(len(self._layout.header) + self._size, memoryview(self._layout.trailer))
        self._beside.shutdown()
        self._file.close()
        return self._hasher.file_checksum(self._file.name)

    def abandon(self) -> None:
        """Give up a file that is not complete; harmless after :meth:`close`."""
        self._beside.shutdown()
        self._file.abandon()


_RESTORE = "Restore the file from its source, or use another checkpoint."


def _reject(path: AnyPath, fault: str) -> NoReturn:
    raise FormatError(
        f"{path} is not a valid safetensors file: {fault}.",
        where=str(path),
        next_step="Fetch or save the file again; nothing of it was read.",
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
    """Return metadata and entries of a header that is formatted as writers format it; None of any other header."""
    try:
        metadata, claims = _head.decode(raw).metadata, _claims.decode(raw)
        # This key was decoded as if it were a tensor's.
        claims.pop(METADATA_KEY, None)
        spelled = msgspec.json.encode({METADATA_KEY: metadata, **claims} if metadata else claims)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    # Equal texts: no key is there twice, none is missing or unknown, and no number is spelled in another way.
    is_equal = raw.startswith(spelled) and not raw[len(spelled) :].strip(b" ")
    return (metadata, claims) if is_equal else None


def _decode_any(path: AnyPath, raw: bytearray) -> tuple[dict[str, str], dict[str, _RawEntry]]:
    """Return metadata and entries of a header, decoded one by one, so that an error can name the fault."""
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
    """Return the bytes of a tensor."""
    if dtype not in CODES:
        _reject(path, f"tensor {name!r} has the dtype {dtype!r}; known are {', '.join(sorted(CODES))}")
    if not all(map(_is_count, shape)):
        _reject(path, f"tensor {name!r} has a shape that is not a list of integers from 0 to 2^64-1")
    if len(shape) > MAX_AXES:
        _reject(path, f"tensor {name!r} has {len(shape)} axes, and at most {MAX_AXES} are allowed")
    size = item_size(dtype)
    for extent in shape:
        size *= extent
        # Stopping here bounds the numbers; as in the library, a later extent of zero does not excuse it.
        if not _is_count(size):
            _reject(path, f"tensor {name!r} of shape {numbers_text(shape)} has more bytes than can be counted")
    return size


def _misplaced(claim: _RawEntry, size: int, due: int, previous: str) -> str:
    begin, end = claim.data_offsets
    if not (_is_count(begin) and _is_count(end)):
        return "has data_offsets that are not two integers from 0 to 2^64-1"
    if end - begin != size:
        shape = numbers_text(claim.shape)
        return f"takes the bytes {begin} to {end}, but {claim.dtype} of shape {shape} has {size} bytes"
    relation = "overlaps" if begin < due else "leaves a gap behind"
    return f"{relation} {previous} (begins at byte {begin} of the tensors, {due} is due)"


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
        _reject(path, f"tensor {name!r} is not described as it should be: {error}")


def _is_count(value: int) -> bool:
    return 0 <= value <= _MAX_COUNT


def _cut_tensors(ordered: dict[str, TensorEntry], file_size: int) -> list[str]:
    cut = [name for name, entry in ordered.items() if entry.end > file_size]
    return [f"{count_text(len(cut), 'tensor')} cut off, {cut[0]!r} first"] if cut else []


def _text(path: AnyPath, document: dict[str, Any]) -> bytes:
    """Return a header as JSON, which contains Unicode text only."""
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError as error:
        _reject(path, f"its header is not Unicode text: {error}, in {error.object[:100]!r}")
