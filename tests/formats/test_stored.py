"""Tensors from the shards of files: alike ones share their form, and no other one does."""

from __future__ import annotations

from itertools import product

import pytest

from paddleformers_fc.errors import FormatError
from paddleformers_fc.formats.catalog import StoredFragment, gather_shards
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import Box, whole

FIELDS = ("dtype", "global_shape", "box", "flat")
SHARDS = {
    "whole": Shard("whole", "float32", (4, 6), whole((4, 6))),
    "dtype": Shard("dtype", "int32", (4, 6), whole((4, 6))),
    "shape": Shard("shape", "float32", (8, 6), whole((4, 6))),
    "box": Shard("box", "float32", (4, 6), Box((2, 0), (4, 6))),
    "range": Shard("range", "float32", (4, 6), whole((4, 6)), (3, 20)),
    "other range": Shard("other range", "float32", (4, 6), whole((4, 6)), (4, 20)),
    "nothing": Shard("nothing", "float32", (4, 6), whole((4, 6)), (4, 4)),
}


def test_tensors_share_a_form_where_nothing_but_their_names_and_places_differs() -> None:
    twice = [(shard, name) for name, shard in SHARDS.items()]
    twice += [(Shard(f"{name} again", *map(shard.__getattribute__, FIELDS)), name) for name, shard in SHARDS.items()]
    tensors, faults = gather_shards((shard, "file", 100 * place, 4) for place, (shard, _) in enumerate(twice))
    assert not faults
    for place, (shard, name) in enumerate(twice):
        tensor = tensors[shard.name]
        assert (tensor.dtype, tensor.shape) == (shard.dtype, shard.global_shape)
        assert tensor.fragments == tuple(
            StoredFragment("file", 100 * place + 4 * fragment.start, fragment.box) for fragment in shard.fragments
        )
        assert tensor.form is tensors[name].form
    assert len({id(tensor.form) for tensor in tensors.values()}) == len(SHARDS)


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
