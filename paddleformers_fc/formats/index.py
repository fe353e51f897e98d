"""``flex_index.safetensors``: the locations of all tensors of a checkpoint, and the checksums of all blocks.

The coordinator of a save writes the index, so that a reader opens only the files that it reads. It is a safetensors
file of integer arrays. Files have the order of the manifest, which contains the digest of the index; the shards of a
file are in byte order. Layers repeat, so each distinct *place* (dtype, global shape, box, range) is stored once, and a
shard consists of the number of a name and the number of a place. :class:`IndexedFiles` compares the header of a file
with the index before its first read.

Encoding and decoding are linear; a checkpoint with 2 million blocks takes a third of a second. Memory consists of the
arrays, the names, and one object per place and per file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np

from paddleformers_fc.errors import Corrupt, FormatError
from paddleformers_fc.formats.catalog import Array, ShardTable, StoredTensor, damaged, malformed
from paddleformers_fc.formats.checkpoint import StoredShard
from paddleformers_fc.layout.shards import Shard, shard_bytes
from paddleformers_fc.mapping.boxes import MAX_AXES, MAX_LENGTH, have_own_hashes, shifted
from paddleformers_fc.storage.checksum import (
    BLOCK_DIGEST_BYTES,
    DEFAULT_BLOCK_BYTES,
    INDEX_NAME,
    FileChecksum,
    FileRecord,
    checksum_of,
    digest_of_blocks,
    is_document,
)
from paddleformers_fc.storage.dtypes import dtype_size, from_safetensors, to_numpy, to_safetensors
from paddleformers_fc.storage.files import map_paths
from paddleformers_fc.storage.identities import Identities, Identity, identities_of, identity_of, replaced
from paddleformers_fc.storage.manifest import RESTORE, Surroundings
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.storage.safetensors import TensorEntry, layout_file, parse_header, read_header

Columns = Mapping[str, Array]
"""The arrays of an index, without the array of blocks."""

HEADER = {"format": "flex"}
"""The metadata in the header of every file with tensors."""

_FORMAT = "flex_index"
_BLOCK_BYTES = "block_bytes"
_BLOCKS = "blocks"
_TEXTS = ("stems", "endings", "dtypes")
_VECTORS = {
    "places": "I64",
    **dict.fromkeys(("file_shards", "shard_name", "shard_place", "name_stem", "name_ending"), "I32"),
    **dict.fromkeys((*_TEXTS, _BLOCKS), "U8"),
}
_WHOLE = (-1, -1)
"""The encoding of a place without a range."""


def shard_columns(files: Iterable[tuple[str, Sequence[Shard]]]) -> Columns:
    """Return the columns of an index that describe tensors.

    Args:
        files: path and shards of every file with tensors; the shards are in byte order.
    """
    names: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    places: dict[tuple[Any, ...], int] = {}
    numbered: dict[str, Array] = {}
    for path, shards in files:
        named = [names.setdefault(one.name, len(names)) for one in shards]
        placed = [places.setdefault((one.dtype, one.global_shape, one.box, one.flat), len(places)) for one in shards]
        numbered[path] = np.array([named, placed], np.int32)
    ordered = [rows for _, rows in sorted(numbered.items())]
    shard_name, shard_place = np.hstack(ordered) if ordered else np.empty((2, 0), np.int32)
    numbers = (
        number
        for dtype, shape, box, flat in places
        for number in (
            dtypes.setdefault(to_safetensors(dtype), len(dtypes)),
            *(len(shape), *(flat or _WHOLE), *shape, *box.lo, *box.shape),
        )
    )
    places_column = np.fromiter(numbers, np.int64)  # This also fills ``dtypes``.
    for name in names:
        if "\0" in name:
            raise FormatError(f"The name {name!r} contains a null character and cannot be stored.")
    # States are named after their parameter, so a name is stored as the numbers of its stem and of its ending.
    stems: dict[str, int] = {}
    endings: dict[str, int] = {}
    cuts = [(name[: name.rfind(".") + 1], name[name.rfind(".") + 1 :]) for name in names]
    vectors = {
        "file_shards": [rows.shape[1] for rows in ordered],
        "shard_name": shard_name,
        "shard_place": shard_place,
        "name_stem": [stems.setdefault(stem, len(stems)) for stem, _ in cuts],
        "name_ending": [endings.setdefault(ending, len(endings)) for _, ending in cuts],
    }
    return {
        "places": places_column,
        **{name: np.array(vector, np.int32) for name, vector in vectors.items()},
        **{
            name: np.frombuffer("\0".join(texts).encode(), np.uint8)
            for name, texts in zip(_TEXTS, (stems, endings, dtypes), strict=True)
        },
    }


def encode_index(columns: Columns, checksums: Sequence[FileChecksum]) -> bytes:
    """Return the bytes of an index.

    Args:
        columns: the tensors, from :func:`shard_columns`.
        checksums: the checksums of all files of the manifest except the index, in any order.
    """
    ordered = sorted(checksums, key=lambda one: one.path)
    blocks = np.frombuffer(b"".join(one.blocks for one in ordered), np.uint8)
    (length,) = {one.block_bytes for one in ordered if not is_document(one.path)} or {DEFAULT_BLOCK_BYTES}
    arrays = {name: columns.get(name, blocks) for name in _VECTORS}
    entries = [(name, code, arrays[name].shape) for name, code in _VECTORS.items()]
    layout = layout_file(Path(INDEX_NAME), entries, {"format": _FORMAT, _BLOCK_BYTES: str(length)})
    return layout.header + b"".join(array.tobytes() for array in arrays.values())


class Index(msgspec.Struct, frozen=True):
    """A decoded index.

    Args:
        recorded: the checksums of all files of the manifest, by path.
        table: the shards.
        files: the numbers of the files with tensors, by path.
        bounds: the number of the first shard of every file, and the total number of shards.
    """

    recorded: dict[str, FileChecksum]
    table: ShardTable
    files: dict[str, int]
    bounds: Array

    def tensors(self, role: str) -> tuple[dict[str, StoredTensor], list[str]]:
        """Return the tensors of a role by name, and the contradictions between files as text."""
        files = [number for path, number in self.files.items() if path.startswith(f"{role}/")]
        ranges = [np.arange(self.bounds[one], self.bounds[one + 1]) for one in files]
        return self.table.tensors(np.concatenate(ranges)) if ranges else ({}, [])

    def shards(self, path: str) -> Iterator[StoredShard]:
        """Yield the shards of a file, in byte order."""
        for name, like, begin in self._rows(path):
            shard = Shard(name, like.dtype, like.global_shape, like.box, like.flat)
            yield shard, path, begin, dtype_size(like.dtype)

    def entries(self, path: str) -> dict[str, TensorEntry]:
        """Return the tensors of a file as its header must list them."""
        found: dict[str, TensorEntry] = {}
        for name, like, begin in self._rows(path):
            shape = like.box.shape if like.flat is None else (like.size,)
            found[name] = TensorEntry(to_safetensors(like.dtype), shape, begin, begin + shard_bytes(like))
        return found

    def _rows(self, path: str) -> Iterator[tuple[str, Shard, int]]:
        """Yield name, place and offset of the shards of a file."""
        table, own = self.table, slice(*self.bounds[self.files[path] :][:2])
        rows = (column[own].tolist() for column in (table.name, table.place, table.offset))
        return ((table.names[name], table.places[place], begin) for name, place, begin in zip(*rows, strict=True))


def decode_index(raw: bytes, records: Sequence[FileRecord], where: AnyPath) -> Index:
    """Decode an index, and compare it with the manifest.

    Args:
        raw: the bytes of the file.
        records: the files that the manifest lists.
        where: path of the file, for errors.
    Raises:
        FormatError: the index is malformed, or contradicts the manifest.
    """
    header = parse_header(where, raw)
    metadata, found = header.metadata, header.tensors
    length = metadata.get(_BLOCK_BYTES, "")
    if metadata.get("format") != _FORMAT or not (length.isdecimal() and 0 < int(length) <= MAX_LENGTH):
        _reject(where, "its metadata is not the metadata of an index")
    kinds = {name: (one.dtype, len(one.shape)) for name, one in found.items()}
    if kinds != {name: (code, 1) for name, code in _VECTORS.items()}:
        _reject(where, "it does not have the arrays of an index")
    arrays = {name: np.frombuffer(raw, to_numpy(one.dtype), one.shape[0], one.begin) for name, one in found.items()}
    try:
        stems, endings, codes = (arrays[name].tobytes().decode().split("\0") for name in _TEXTS)
    except UnicodeDecodeError as error:
        _reject(where, f"its names are not UTF-8 ({error.reason})")
    first, last = arrays["name_stem"], arrays["name_ending"]
    if len(first) != len(last) or not (_within(first, len(stems)) and _within(last, len(endings))):
        _reject(where, "a name has no stem or no ending")
    names = [stems[stem] + endings[ending] for stem, ending in zip(first.tolist(), last.tolist(), strict=True)]
    recorded = _recorded(raw, arrays[_BLOCKS].tobytes(), int(length), records, where)
    places = list(_places(arrays["places"].tolist(), codes, where))
    files = [one for one in recorded.values() if not is_document(one.path)]
    counts, named, placed = (arrays[name].astype(np.int64) for name in ("file_shards", "shard_name", "shard_place"))
    ends = counts.cumsum()
    if len(counts) != len(files) or (counts < 0).any() or {len(named), len(placed)} != {int(counts.sum())}:
        _reject(where, f"it has {len(named)} shards in {len(counts)} files, the manifest has {len(files)} files")
    if not (_within(named, len(names)) and _within(placed, len(places))):
        _reject(where, "a shard refers to an unknown name or place")
    largest = max((one.size for one in files), default=0)
    if largest > MAX_LENGTH // (len(placed) + 1):
        _reject(where, f"a file has {largest} bytes")
    lengths = [min(shard_bytes(one), largest + 1) for one in places]
    # A file ends with its last shard, so offsets are computed backwards from its size.
    past = np.concatenate([[0], np.array(lengths, np.int64)[placed].cumsum()])
    begins = np.repeat(np.array([one.size for one in files], np.int64) - past[ends], counts) + past[:-1]
    first = ends - counts
    if (begins[first[counts > 0]] < 0).any():
        _reject(where, "a file is shorter than its shards")
    numbers = {one.path: number for number, one in enumerate(files)}
    file = np.repeat(np.arange(len(files), dtype=np.int32), counts)
    widths = [dtype_size(one.dtype) for one in places]
    table = ShardTable(names, places, widths, list(numbers), named, placed, file, begins)
    return Index(recorded, table, numbers, np.append(first, len(placed)))


def _recorded(
    raw: bytes, blocks: bytes, length: int, records: Sequence[FileRecord], where: AnyPath
) -> dict[str, FileChecksum]:
    """Return the checksums of all files, after comparing their block checksums with the digests in the manifest."""
    found: dict[str, FileChecksum] = {}
    at = 0
    for one in records:
        if one.path == INDEX_NAME:
            found[one.path] = checksum_of(one.path, raw)
            continue
        step = DEFAULT_BLOCK_BYTES if is_document(one.path) else length
        own = blocks[at : at + -(-one.size // step) * BLOCK_DIGEST_BYTES]
        at += len(own)
        if digest_of_blocks(own) != one.digest:
            _reject(where, f"the blocks of {one.path} do not have the digest in the manifest")
        found[one.path] = FileChecksum(one.path, one.size, one.digest, step, own)
    if at != len(blocks):
        _reject(where, f"it has {len(blocks)} bytes of block checksums, the files have {at}")
    return found


def _places(numbers: list[int], codes: Sequence[str], where: AnyPath) -> Iterator[Shard]:
    """Yield the places as shards without names. Ranges of the same box, one per rank, share it."""
    known: dict[tuple[int, ...], tuple[Shard, int]] = {}
    hashes: dict[int, object] = {}
    at = 0
    while at < len(numbers):
        code, axes, begin, end = (*numbers[at : at + 4], -1, -1, -1)[:4]
        at += 4
        if not (0 <= code < len(codes) and 0 <= axes <= MAX_AXES and at + 3 * axes <= len(numbers)):
            _reject(where, "a place has no dtype, too many axes or an incomplete box")
        key = (code, *numbers[at : at + 3 * axes])
        at += 3 * axes
        box = known.get(key)
        if box is None:
            box = known[key] = _box_of(codes[code], key[1:], axes, where)
            if not have_own_hashes(hashes, (key, box[0].box)):
                _reject(where, "its boxes have colliding hashes")
        place, volume = box
        if (begin, end) != _WHOLE:
            if not 0 <= begin <= end <= volume:
                _reject(where, f"{place.name}: range {begin}:{end} is outside its {volume} elements")
            place = Shard(place.name, place.dtype, place.global_shape, place.box, (begin, end))
        yield place


def _box_of(code: str, numbers: tuple[int, ...], axes: int, where: AnyPath) -> tuple[Shard, int]:
    """Return a place without a range, and the number of its elements."""
    shape, offset, local = numbers[:axes], numbers[axes : 2 * axes], numbers[2 * axes :]
    place = Shard("a place", from_safetensors(code), shape, shifted(local, offset))
    if min(numbers, default=0) < 0:
        _reject(where, "a box has a negative length")
    for fault in place.faults():
        _reject(where, fault)
    return place, place.size


def _within(numbers: Array, count: int) -> bool:
    return bool(((numbers >= 0) & (numbers < count)).all())


def _reject(where: AnyPath, fault: str) -> NoReturn:
    raise malformed(where, f"{where} is not a valid index: {fault}.", (), RESTORE)


class IndexedFiles(Mapping[AnyPath, Identity]):
    """The identities of a checkpoint's files. The first access to a file compares its header with the index.

    Iteration yields only the manifest, whose identity stands for the complete checkpoint.

    Args:
        directory: ``checkpoint-N``.
        index: its index.
        manifest: the identity of the manifest; empty if it is not visible to this rank.
        around: the checkpoint's files that were already checked, which must not be replaced later.
    """

    def __init__(self, directory: AnyPath, index: Index, manifest: Identities, around: Surroundings) -> None:
        self.index = index
        self._directory, self._manifest = directory, manifest
        self._known: dict[AnyPath, Identity] = dict(manifest)
        self._around = around

    def check(self, paths: Iterable[str]) -> None:
        """Compare the headers of files with the index, before the files are read.

        Args:
            paths: paths of the files, relative to the directory.
        Raises:
            Corrupt: a file is missing or does not match the index.
            FormatError: a link leads out of the directory, or a header is malformed.
            StorageError: a file cannot be read.
        """
        for path, identity in self._manifest.items():
            if identities_of([path]) != {path: identity}:
                raise replaced(path)
        for _ in map_paths(self.__getitem__, [self._directory / path for path in paths], self._directory):
            pass

    def __getitem__(self, path: AnyPath) -> Identity:
        if path not in self._known:
            name = f"{path.parent.name}/{path.name}"
            if name not in self.index.files or self._directory / name != path:
                raise KeyError(path)
            self._known[path] = self._checked(path, name)
        return self._known[path]

    def __iter__(self) -> Iterator[AnyPath]:
        return iter(self._manifest)

    def __len__(self) -> int:
        return len(self._manifest)

    def _checked(self, path: AnyPath, name: str) -> Identity:
        before = self._around.seen.get(name)
        status, fault = self._around.look_at(self.index.recorded[name])
        if status is None or fault:
            raise Corrupt(f"{path} {fault}.", where=str(path), next_step=RESTORE)
        if before is not None and identity_of(before) != identity_of(status):
            raise replaced(path)
        header, expected = read_header(path), self.index.entries(name)
        if (header.tensors, header.metadata) != (expected, HEADER):
            found = header.tensors
            differing = [name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)]
            raise damaged(path, f"The header of {path} differs from {INDEX_NAME}.", sorted(differing), RESTORE)
        return identity_of(status)
