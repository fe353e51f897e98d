"""Carrying out plans: the same bits with any threads, staging and over-read, and nothing left behind by a failure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from paddleformers_fc.execute.reading import ArraySlot, ReadOptions, carry_out
from paddleformers_fc.mapping.boxes import Box
from paddleformers_fc.plan.items import LoadPlan, ReadItem, StoredPart
from paddleformers_fc.plan.report import Report
from paddleformers_fc.storage.dtypes import to_numpy, to_safetensors

ROLE = "model_state"
NAMES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "uint8"]


def dtype_of(name: str) -> np.dtype[Any]:
    return to_numpy(to_safetensors(name))


def plan_of(items: list[ReadItem]) -> LoadPlan:
    ordered = sorted(items, key=lambda item: (item.stored.file, item.stored.begin))
    return LoadPlan(tuple(ordered), (), {}, Report())


def random_bytes(count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


@dataclass(frozen=True)
class Wanted:
    """One shard that is put together from slabs of one stored tensor.

    Args:
        shape: of the stored tensor.
        box: what is wanted of it.
        order: for every wanted axis the stored one.
        dtypes: stored and wanted.
        slabs: in how many pieces along its first axis the tensor is stored.
    """

    shape: tuple[int, ...]
    box: Box
    order: tuple[int, ...]
    dtypes: tuple[str, str]
    slabs: int


@st.composite
def wanted(draw: st.DrawFn) -> Wanted:
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    lo = tuple(draw(st.integers(0, length - 1)) for length in shape)
    hi = tuple(draw(st.integers(low + 1, length)) for low, length in zip(lo, shape, strict=True))
    stored = draw(st.sampled_from(NAMES))
    casts = [stored, "float32", "bfloat16"] if "float" in stored else [stored]
    order = tuple(draw(st.permutations(range(len(shape)))))
    return Wanted(shape, Box(lo, hi), order, (stored, draw(st.sampled_from(casts))), draw(st.integers(1, 3)))


class Stored:
    """Tensors in two files, with the items that read them and what they must become."""

    def __init__(self, root: Path, tensors: list[Wanted]) -> None:
        self.items: list[ReadItem] = []
        self.expected: dict[tuple[str, str], np.ndarray[Any, Any]] = {}
        contents = {"a": bytearray(b"head"), "b": bytearray(b"a longer head")}
        for number, one in enumerate(tensors):
            self._add(str(number), one, contents, number)
        for name, data in contents.items():
            (root / name).write_bytes(data)

    def _add(self, name: str, one: Wanted, contents: dict[str, bytearray], seed: int) -> None:
        dtype = dtype_of(one.dtypes[0])
        values = random_bytes(math.prod(one.shape) * dtype.itemsize, seed).view(dtype).reshape(one.shape)
        part = values[tuple(slice(low, high) for low, high in zip(one.box.lo, one.box.hi, strict=True))]
        target = part.transpose(one.order).astype(dtype_of(one.dtypes[1]))
        self.expected[ROLE, name] = target.ravel()
        edges = np.linspace(0, one.shape[0], one.slabs + 1).astype(int)
        for low, high in zip(edges[:-1], edges[1:], strict=True):
            slab = Box((int(low), *(0 for _ in one.shape[1:])), (int(high), *one.shape[1:]))
            common = slab.intersect(one.box) if low < high else None
            if common is None:
                continue
            file = "a" if low % 2 else "b"
            begin = len(contents[file])
            contents[file] += values[low:high].tobytes()
            filled = common.relative_to(one.box.lo)
            box = Box(tuple(filled.lo[axis] for axis in one.order), tuple(filled.hi[axis] for axis in one.order))
            stored = StoredPart(file, begin, slab.shape, common.relative_to(slab.lo), one.dtypes[0])
            self.items.append(ReadItem(ROLE, name, stored, 0, target.shape, box, one.order))

    def slots(self) -> dict[tuple[str, str], ArraySlot]:
        return {key: ArraySlot(np.zeros(array.size, array.dtype)) for key, array in self.expected.items()}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=200, deadline=None)
@given(
    st.lists(wanted(), min_size=1, max_size=6),
    st.sampled_from([1, 2, 16]),
    st.sampled_from([1, 100, 4096, 64 << 20]),
    st.sampled_from([1.0, 1.05, 2.0, 50.0]),
)
def test_shards_are_the_same_bits_with_any_options(
    tmp_path_factory: pytest.TempPathFactory, tensors: list[Wanted], threads: int, staging: int, over_read: float
) -> None:
    root = tmp_path_factory.getbasetemp()
    stored = Stored(root, tensors)
    slots = stored.slots()
    count = carry_out(plan_of(stored.items), root, slots, ReadOptions(threads, staging, over_read))
    for key, expected in stored.expected.items():
        assert slots[key].array.tobytes() == expected.tobytes()
    needed = sum(item.stored.part.volume * dtype_of(item.stored.dtype).itemsize for item in stored.items)
    assert needed <= count <= over_read * needed
