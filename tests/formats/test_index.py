"""The index of a checkpoint: its tensors are those of its shards, and what cannot be is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import pytest

from paddleformers_fc.errors import FormatError
from paddleformers_fc.formats.catalog import gather_shards
from paddleformers_fc.formats.index import Index, decode_index, encode_index, shard_columns
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import Box, shifted, whole
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


def checksums(files: Mapping[str, Sequence[Shard]] = SHARDS) -> list[FileChecksum]:
    """Those of the files, each with a header of 100 bytes, and of a document."""
    sizes = {path: HEADER + sum(one.size * dtype_size(one.dtype) for one in own) for path, own in files.items()}
    return [checksum_of(path, bytes(size)) for path, size in {**sizes, "config.json": 7}.items()]


def decoded(raw: bytes, written: Sequence[FileChecksum]) -> Index:
    """Decode an index under the manifest's records."""
    return decode_index(raw, records_of([*written, checksum_of(INDEX_NAME, raw)]), Path(INDEX_NAME))


HALF, OTHER_HALF = Box((0, 0), (4, 6)), Box((4, 0), (8, 6))
CUTS = {
    "one": [(whole((8, 6)), None)],
    "one range": [(whole((8, 6)), (0, 48))],
    "rows": [(OTHER_HALF, None), (HALF, None)],
    "ranges": [(HALF, (7, 24)), (OTHER_HALF, (0, 24)), (HALF, (0, 7))],
    "hole in a range": [(HALF, (7, 24)), (OTHER_HALF, None), (HALF, (0, 6))],
    "hole before an empty range": [(HALF, (9, 9)), (HALF, (9, 24)), (OTHER_HALF, None), (HALF, (0, 7))],
    "ranges that end early": [(HALF, (0, 7)), (HALF, (7, 23)), (OTHER_HALF, None)],
    "overlap of ranges": [(HALF, (6, 24)), (HALF, (0, 7)), (OTHER_HALF, None)],
    "missing box": [(HALF, (0, 7)), (HALF, (7, 24))],
    "overlap of boxes": [(whole((8, 6)), None), (HALF, (3, 9))],
    "empty ranges": [(HALF, (0, 0)), (HALF, (0, 24)), (OTHER_HALF, (24, 24)), (OTHER_HALF, None)],
}
"""The shards of a tensor of shape [8, 6], in any order, by what is odd about them."""


@pytest.mark.parametrize("odd", ["", "float16", "[9, 6]"])
def test_tensors_of_an_index_are_those_of_its_shards(odd: str) -> None:
    files: dict[str, list[Shard]] = {f"model_state/rank-{rank:05d}.safetensors": [] for rank in range(4)}
    for copy, (name, cuts) in product(("a", "b"), CUTS.items()):
        for own, (box, flat) in zip(files.values(), cuts, strict=False):
            own.append(Shard(f"{copy}.{name}", "float32", (8, 6), box, flat))
    if odd:
        files["model_state/rank-00003.safetensors"].append(
            Shard("b.rows", "float16" if odd == "float16" else "float32", (8 if odd == "float16" else 9, 6), HALF)
        )
    written = checksums(files)
    index = decoded(encode_index(shard_columns(files.items()), written), written)
    expected, contradictions = gather_shards(shard for path in index.files for shard in index.shards(path))
    tensors, faults = index.tensors("model_state")
    assert faults == contradictions
    assert bool(faults) == bool(odd)
    assert list(tensors) == list(expected)
    for name, tensor in tensors.items():
        assert tensor.form.content == expected[name].form.content
        assert tuple(tensor.offsets) == tuple(expected[name].offsets)
        assert tensor.form.faults == expected[name].form.faults
        assert bool(tensor.form.faults) == any(word in name for word in ("hole", "early", "overlap", "missing")), name
        if name != "b.rows" or not odd:
            assert tensor.form is tensors[name.replace("b.", "a.")].form
    assert index.tensors("optimizer_state") == ({}, [])


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
        ("shard_name", 0, 5, "an unknown name or place"),
        ("shard_name", 0, -1, "an unknown name or place"),
        ("shard_place", 0, 6, "an unknown name or place"),
        ("file_shards", 0, 3, "7 shards|6 shards in 3 files"),
        ("file_shards", 0, -2, "shards in 3 files"),
        ("name_stem", 0, 5, "no stem or no ending"),
        ("name_ending", 0, -1, "no stem or no ending"),
        ("dtypes", 0, 255, "not UTF-8"),
        ("dtypes", 0, ord("X"), "Unknown tensor dtype"),
    ],
)
def test_an_index_that_cannot_be_is_refused(column: str, at: int, value: int, message: str) -> None:
    columns = {name: array.copy() for name, array in shard_columns(SHARDS.items()).items()}
    columns[column][at] = value
    raw = encode_index(columns, checksums())
    with pytest.raises(FormatError, match=message):
        decoded(raw, checksums())


def test_boxes_of_one_hash_are_refused() -> None:
    prime = 2**61 - 1
    shapes = [(0, prime), (prime, 0), (0, 0)]
    assert len(set(map(hash, shapes))) == 1
    shards = [Shard(f"a{number}", "float32", shape, whole(shape)) for number, shape in enumerate(shapes)]
    raw = encode_index(shard_columns([(path, shards if own else []) for path, own in SHARDS.items()]), checksums())
    with pytest.raises(FormatError, match="colliding hash"):
        decoded(raw, checksums())


def test_files_that_are_shorter_than_their_shards_are_refused() -> None:
    few = [checksum_of(one.path, bytes(8)) if one.path in SHARDS else one for one in checksums()]
    raw = encode_index(shard_columns(SHARDS.items()), few)
    with pytest.raises(FormatError, match="shorter than its shards"):
        decoded(raw, few)


@pytest.mark.parametrize("count", [-1, 1])
def test_blocks_that_are_not_those_of_the_manifest_are_refused(count: int) -> None:
    raw = encode_index(shard_columns(SHARDS.items()), checksums())
    other = encode_index(
        shard_columns(SHARDS.items()), checksums()[:count] if count < 0 else [*checksums(), *checksums()[:1]]
    )
    assert columns_of(raw).keys() == columns_of(other).keys()
    with pytest.raises(FormatError, match=r"digest in the manifest|bytes of block checksums"):
        decoded(other, checksums())


def test_a_name_that_cannot_be_stored_is_refused() -> None:
    with pytest.raises(FormatError, match="null character"):
        shard_columns([("x", [Shard("a\0b", "float32", (), whole(()))])])


# ---- Tensors from the shards of files.


@pytest.mark.parametrize(
    ("dtype", "shape"), [("float32", (16, 4)), ("bfloat16", (8, 4)), ("float32", (8, 4, 1))], ids=str
)
def test_files_that_contradict_each_other_are_named_though_their_boxes_tile_a_tensor(
    dtype: str, shape: tuple[int, ...]
) -> None:
    one = Shard("w", "float32", (8, 4), Box((0, 0), (4, 4)))
    other = Shard("w", dtype, shape, Box((4, 0), (8, 4)))
    _, faults = gather_shards((shard, f"file {place}", 100, 4) for place, shard in enumerate((one, other)))
    assert faults == [f"w: file 1 has {dtype} {list(shape)}, another file float32 [8, 4]"]


class Counted(int):
    """A number that counts how often numbers are compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return int(self) == other

    def __hash__(self) -> int:
        return int.__hash__(self)


@pytest.mark.parametrize("names", [1, 1024], ids=["in one tensor", "in a tensor each"])
def test_boxes_of_one_hash_are_refused_before_they_are_compared_with_each_other(names: int) -> None:
    places = [tuple((2**61 - 1) * digit for digit in digits) for digits in product(range(4), repeat=5)]
    boxes = [Box(tuple(map(Counted, place)), tuple(Counted(one + 1) for one in place)) for place in places]
    shards = [Shard(f"a{number % names}", "float32", (2**63 - 1,) * 5, box) for number, box in enumerate(boxes)]
    assert len({hash(shard.box) for shard in shards}) == 1
    Counted.compared = 0
    with pytest.raises(FormatError, match="colliding hash") as caught:
        gather_shards((shard, "0_0.distcp", 0, 4) for shard in shards)
    assert caught.value.next_step
    assert Counted.compared < 10 * len(shards)
