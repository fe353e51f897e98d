"""Pieces of large shards: together they are the shard, bit for bit, and each fits or is one row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from paddleformers_fc.execute.reading import cut_large_shards, execute_reads
from paddleformers_fc.mapping.boxes import whole
from paddleformers_fc.plan.items import ReadItem, StoredPart
from paddleformers_fc.storage.operations import Memory
from tests.execute.test_reading import ROLE, Stored, Wanted, plan_of, wanted
from tests.harness.sampling import thorough


@dataclass
class DivisibleArray:
    """A slot that stands for memory of a device, without a device."""

    array: np.ndarray[Any, Any]

    @property
    def host_bytes(self) -> int:
        return self.array.nbytes

    @property
    def elements(self) -> int:
        return self.array.size

    def part(self, start: int, stop: int) -> DivisibleArray:
        return DivisibleArray(self.array[start:stop])

    def open(self) -> Memory:
        return Memory.of(self.array)

    def close(self) -> None:
        pass

    def finish_copy(self) -> None:
        pass


def matrix(order: tuple[int, ...]) -> list[ReadItem]:
    """The item of a matrix of 100 rows of 8 numbers, read in an order of its axes."""
    shape = tuple((100, 8)[axis] for axis in order)
    stored = StoredPart("a", 0, (100, 8), whole((100, 8)), "float32")
    return [ReadItem(ROLE, "w", stored, 0, shape, whole(shape), order)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@thorough(200)
@given(st.lists(wanted(), min_size=1, max_size=6), st.sampled_from([1, 40, 300]))
def test_pieces_of_a_shard_of_many_tensors_are_the_shard(
    tmp_path_factory: pytest.TempPathFactory, tensors: list[Wanted], most: int
) -> None:
    root = tmp_path_factory.getbasetemp()
    stored = Stored(root, [replace(one, dtypes=("float32", "float32")) for one in tensors])
    starts = dict(zip(stored.expected, np.cumsum([0, *(one.size for one in stored.expected.values())]), strict=False))
    expected = np.concatenate(list(stored.expected.values()))
    fused = [msgspec.structs.replace(item, name="w", start=int(starts[item.role, item.name])) for item in stored.items]
    filled = np.zeros(expected.size, expected.dtype)
    items, slots = cut_large_shards(plan_of(fused).items, {(ROLE, "w"): DivisibleArray(filled)}, most)
    execute_reads(plan_of(list(items)), root, slots)
    assert filled.tobytes() == expected.tobytes()


@pytest.mark.parametrize(("most", "sizes"), [(3200, [3200]), (1000, [992, 992, 992, 224]), (1, [32] * 100)])
def test_a_piece_has_whole_rows_and_fits_if_a_row_does(most: int, sizes: list[int]) -> None:
    slot = DivisibleArray(np.zeros(800, np.float32))
    items, slots = cut_large_shards(tuple(matrix((0, 1))), {(ROLE, "w"): slot}, most)
    assert [slots[item.role, item.name].host_bytes for item in items] == sizes


def test_a_transposed_shard_is_not_cut() -> None:
    slots = {(ROLE, "w"): DivisibleArray(np.zeros(800, np.float32))}
    assert cut_large_shards(tuple(matrix((1, 0))), slots, 1000)[0] == tuple(matrix((1, 0)))
