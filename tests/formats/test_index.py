"""The index of a checkpoint: what it returns is what was written, and what cannot be is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddleformers_fc.errors import FormatError
from paddleformers_fc.formats.index import Index, decode_index, encode_index, shard_columns
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import shifted, whole
from paddleformers_fc.storage.checksum import INDEX_NAME, FileChecksum, checksum_of, records_of
from paddleformers_fc.storage.dtypes import dtype_size
from tests.harness.sealing import columns_of

SHARDS = {
    "model_state/rank-00000.safetensors": [
        Shard("b.w_0", "float32", (), whole(())),
        Shard("a", "bfloat16", (4, 8), shifted((4, 2), (0, 6)), (1, 5)),
    ],
    "model_state/rank-00001.safetensors": [
        Shard("c", "bfloat16", (4, 8), shifted((4, 2), (0, 4)), (1, 5)),
        Shard("d", "bfloat16", (4, 8), shifted((4, 2), (0, 4)), (4, 8)),
        Shard("a", "bfloat16", (4, 8), shifted((4, 2), (0, 6)), (5, 8)),
        Shard("é", "bfloat16", (8, 8), shifted((4, 2), (0, 4)), (4, 8)),
    ],
    "optimizer_state/rank-00000.safetensors": [],
}
HEADER = 100


def checksums() -> list[FileChecksum]:
    """Those of the files, each with a header of 100 bytes, and of a document."""
    sizes = {path: HEADER + sum(one.size * dtype_size(one.dtype) for one in own) for path, own in SHARDS.items()}
    return [checksum_of(path, bytes(size)) for path, size in {**sizes, "config.json": 7}.items()]


def decoded(raw: bytes, **unlike: Any) -> Index:
    """Decode an index under the manifest's records, of which some differ."""
    records = records_of([*checksums(), checksum_of(INDEX_NAME, raw)])
    return decode_index(raw, [unlike.get(one.path, one) for one in records], Path(INDEX_NAME))


def test_shards_and_checksums_survive_an_index() -> None:
    raw = encode_index(shard_columns(SHARDS), checksums())
    index = decoded(raw)
    for path, shards in SHARDS.items():
        widths = [dtype_size(one.dtype) for one in shards]
        ends = np.cumsum([HEADER, *(one.size * width for one, width in zip(shards, widths, strict=True))]).tolist()
        assert list(index.shards(path)) == list(zip(shards, [path] * len(shards), ends, widths, strict=False))
        entries = index.entries(path)
        assert [(name, one.begin, one.end) for name, one in entries.items()] == list(
            zip((one.name for one in shards), ends, ends[1:], strict=False)
        )
    assert index.recorded == {one.path: one for one in [*checksums(), checksum_of(INDEX_NAME, raw)]}


@pytest.mark.parametrize(
    ("column", "at", "value", "message"),
    [
        # The first place has four numbers, the second one ten.
        ("places", 4 + 1, 33, "too many axes"),
        ("places", 4 + 1, -1, "too many axes"),
        ("places", 4 + 1, 32, "incomplete"),
        ("places", 4 + 6, -1, "negative"),
        ("places", 4 + 7, 7, r"outside shape \[4, 8\]"),
        ("places", 4 + 8, 5, r"outside shape \[4, 8\]"),
        ("places", 4 + 3, 9, "range 1:9 is outside its 8 elements"),
        ("places", 4 + 2, -2, "range -2:5 is outside"),
        ("places", 0, 2, "no dtype"),
        ("places", 4 + 8, 2**62, "outside shape"),
        ("places", 4 + 8, -1, "negative"),
        ("shard_name", 0, 5, "the number of no name or place"),
        ("shard_name", 0, -1, "the number of no name or place"),
        ("shard_place", 0, 6, "the number of no name or place"),
        ("file_shards", 0, 3, "7 shards|6 shards in 3 files"),
        ("file_shards", 0, -2, "shards in 3 files"),
        ("name_stem", 0, 5, "no stem or no ending"),
        ("name_ending", 0, -1, "no stem or no ending"),
        ("dtypes", 0, 255, "not UTF-8"),
        ("dtypes", 0, ord("X"), "unknown tensor dtype"),
    ],
)
def test_an_index_that_cannot_be_is_refused(column: str, at: int, value: int, message: str) -> None:
    columns = {name: array.copy() for name, array in shard_columns(SHARDS).items()}
    columns[column][at] = value
    raw = encode_index(columns, checksums())
    with pytest.raises(FormatError, match=message):
        decoded(raw)


def test_files_that_are_shorter_than_their_shards_are_refused() -> None:
    few = [checksum_of(one.path, bytes(8)) if one.path in SHARDS else one for one in checksums()]
    raw = encode_index(shard_columns(SHARDS), few)
    with pytest.raises(FormatError, match="shorter than its shards"):
        decode_index(raw, records_of(few), Path(INDEX_NAME))


@pytest.mark.parametrize("count", [-1, 1])
def test_blocks_that_are_not_those_of_the_manifest_are_refused(count: int) -> None:
    raw = encode_index(shard_columns(SHARDS), checksums())
    other = encode_index(shard_columns(SHARDS), checksums()[:count] if count < 0 else [*checksums(), *checksums()[:1]])
    assert columns_of(raw).keys() == columns_of(other).keys()
    with pytest.raises(FormatError, match=r"digest in the manifest|bytes of block checksums"):
        decoded(other)


def test_a_name_that_cannot_be_stored_is_refused() -> None:
    with pytest.raises(FormatError, match="null character"):
        shard_columns({"x": [Shard("a\0b", "float32", (), whole(()))]})
