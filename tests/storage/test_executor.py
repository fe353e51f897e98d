"""Operations: any boxes of a file, into any strides and dtypes, hashed or not, are what numpy gives, read once."""

from __future__ import annotations

import math
import os
import threading
from collections import namedtuple
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st

from paddleformers_fc.storage import operations
from paddleformers_fc.storage.checksum import BlockHasher, FileChecksum
from paddleformers_fc.storage.dtypes import FP4, ScaledTensor, Scheme
from paddleformers_fc.storage.executor import IMAGE_BYTES, OwnedBlocks, ReadOptions, ReadPool, run_workers
from paddleformers_fc.storage.operations import (
    Memory,
    Operation,
    bytes_read,
    row_major,
    scaled,
    strided,
)
from tests.harness.limits import LIMIT
from tests.harness.sampling import thorough
from tests.harness.waiting import pause

DTYPES = [
    np.dtype(one)
    for one in (
        *(np.float32, np.float16, np.float64, np.int64, np.int8, np.uint8, np.bool_),
        *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
    )
]
FLOATS = [one for one in DTYPES if one.kind in "fV"]
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module", autouse=True)
def short_stripes() -> Iterator[None]:
    """Casts of numbers of eight bits are cut in small boxes too."""
    with mock.patch.object(operations, "_CAST_NUMBERS", 5):
        yield


def over_reading(ratio: float) -> Any:
    """Another bound on the bytes that are read along."""
    return mock.patch.object(operations, "MAX_OVER_READ", ratio)


Stored = namedtuple("Stored", "shape dtype gap")
"""A row-major box in the file: its lengths, the type of its elements, and the bytes before it."""
Wanted = namedtuple("Wanted", "number lo size dtype order margins skew")
"""A part of the stored box of a number, from a first coordinate on, and the target that it goes into: its type, its
axes, the elements beside the part in the target, and the bytes before the target."""
Case = namedtuple("Case", "stored wanted options over_read block_bytes owned")
"""Boxes of one file, and how they are read."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    stored = tuple(
        Stored(
            tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=4))),
            draw(st.sampled_from(DTYPES)),
            draw(st.sampled_from([0, 0, 3, 40])),
        )
        for _ in range(draw(st.integers(1, 3)))
    )
    wanted = tuple(draw(wanted_of(stored)) for _ in range(draw(st.integers(1, 4))))
    threads, scratch = draw(st.sampled_from([1, 1, 3])), draw(st.sampled_from([64, 200, 1 << 20]))
    over_read = draw(st.sampled_from([1.0, 1.5, 2.0, 100.0]))
    options = ReadOptions(threads, 2 * threads * scratch)
    block_bytes, owned = draw(st.sampled_from([16, 100, 4096])), draw(st.frozensets(st.integers(0, 60)))
    return Case(stored, wanted, options, over_read, block_bytes, owned)


@st.composite
def wanted_of(draw: st.DrawFn, stored: tuple[Stored, ...]) -> Wanted:
    number = draw(st.integers(0, len(stored) - 1))
    one = stored[number]
    bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in one.shape]
    dtype = draw(st.sampled_from(FLOATS)) if one.dtype in FLOATS and draw(st.booleans()) else one.dtype
    return Wanted(
        number,
        tuple(low for low, _ in bounds),
        tuple(high - low for low, high in bounds),
        dtype,
        tuple(draw(st.permutations(range(len(one.shape))))),
        tuple(draw(st.sampled_from([0, 0, 1, 3])) for _ in one.shape),
        draw(st.sampled_from([0, 0, 1, 2, 4])),
    )


def numbers_of(one: Stored, is_cast_to_float16: bool) -> Array:
    """Every bit pattern, NaNs and infinities among them, but finite ones that float16 cannot hold if it must."""
    count = math.prod(one.shape) * one.dtype.itemsize
    bits = np.random.default_rng(count).integers(0, 256, count, dtype=np.uint8)
    if one.dtype == np.bool_:
        bits &= 1
    found = bits.view(one.dtype).reshape(one.shape)
    if is_cast_to_float16 and one.dtype != np.float16:
        found = np.where(np.isfinite(found) & (abs(found) > 65000), found.dtype.type(1), found)
    return found


def target_of(one: Wanted) -> Array:
    """A part of a larger array, its axes in another order, at any address."""
    around = [one.size[axis] + one.margins[axis] for axis in one.order]
    memory = np.zeros(one.skew + math.prod(around) * one.dtype.itemsize, np.uint8)[one.skew :]
    array = memory.view(one.dtype).reshape(around)[(..., *(slice(0, one.size[axis]) for axis in one.order))]
    return array.transpose(np.argsort(one.order))


def part_of(values: Array, one: Wanted) -> Array:
    return values[(..., *(slice(low, low + length) for low, length in zip(one.lo, one.size, strict=True)))]


def operation_of(path: Path, begin: int, values: Array, one: Wanted, out: Array) -> Operation | None:
    strides = row_major(values.shape, values.itemsize)
    begin += sum(low * stride for low, stride in zip(one.lo, strides, strict=True))
    address = out.__array_interface__["data"][0]
    return strided(path, begin, one.size, (strides, out.strides), (values.dtype, out.dtype), address, out)


def written(path: Path, pieces: list[tuple[int, bytes]], block_bytes: int) -> FileChecksum:
    data = b"".join(b"~" * gap + piece for gap, piece in pieces) + b"tail"
    path.write_bytes(data)
    hasher = BlockHasher(block_bytes)
    hasher.update(data)
    return hasher.file_checksum(path.name)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@thorough(300)
@given(cases())
def test_operations_fill_what_indexing_gives_and_hash_what_is_stored(
    tmp_path_factory: pytest.TempPathFactory, case: Case
) -> None:
    path = tmp_path_factory.getbasetemp() / "operations.bin"
    halves = {one.number for one in case.wanted if one.dtype == np.float16}
    values = [numbers_of(one, number in halves) for number, one in enumerate(case.stored)]
    pieces = [(one.gap, array.tobytes()) for one, array in zip(case.stored, values, strict=True)]
    checksum = written(path, pieces, case.block_bytes)
    begins, at = [], 0
    for gap, piece in pieces:
        begins.append(at + gap)
        at += gap + len(piece)
    outs = [target_of(one) for one in case.wanted]
    found = [
        operation_of(path, begins[one.number], values[one.number], one, out)
        for one, out in zip(case.wanted, outs, strict=True)
    ]
    operations = [one for one in found if one is not None]
    blocks = {path: OwnedBlocks(checksum, frozenset(n for n in case.owned if n < checksum.count))}
    with over_reading(case.over_read), ReadPool(case.options) as pool:
        count = pool.run(operations, blocks if case.owned else {})
        rest = pool.hash_rest(blocks)
    for one, out in zip(case.wanted, outs, strict=True):
        wanted = part_of(values[one.number], one).astype(one.dtype)
        assert out.shape == wanted.shape
        assert out.tobytes() == wanted.tobytes()
    assert not blocks[path].differing
    assert blocks[path].hashed == blocks[path].numbers
    if not case.owned:
        assert rest == 0
        needed = sum(one.needed for one in operations)
        assert count <= case.over_read * needed + 8 * len(operations)
        if len(operations) == 1:
            ((one, array),) = [
                (one, values[one.number]) for one, made in zip(case.wanted, found, strict=True) if made is not None
            ]
            strides = row_major(array.shape, array.itemsize)
            with over_reading(case.over_read):
                assert needed <= count <= bytes_read(one.size, strides, array.itemsize)


@pytest.mark.parametrize("rows", [1024, 1000])
@pytest.mark.parametrize("is_hashed", [False, True])
def test_a_transpose_with_rows_at_a_power_of_two_is_the_same_numbers(
    tmp_path: Path, rows: int, is_hashed: bool
) -> None:
    path, values = tmp_path / "matrix", np.arange(rows * 2048, dtype=np.float32).reshape(rows, 2048)
    checksum = written(path, [(5, values.tobytes())], 1 << 20)
    out = np.zeros((2048, rows), np.float32)
    whole = Wanted(0, (0, 0), values.shape, values.dtype, (), (), 0)
    made = operation_of(path, 5, values, whole, out.T)
    assert made is not None
    blocks = {path: OwnedBlocks(checksum, frozenset(range(checksum.count)))} if is_hashed else {}
    with ReadPool() as pool:
        pool.run([made], blocks)
    assert out.tobytes() == values.T.tobytes()


@thorough(100)
@given(st.data())
def test_numbers_with_scales_are_multiplied_and_cast_once(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "scaled.bin"
    numbers = data.draw(st.sampled_from(["float8_e4m3fn", FP4]))
    count, rows, half = (data.draw(st.integers(1, most)) for most in (3, 40, 20))
    width, block = 2 * half, (data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9)))
    random = np.random.default_rng(rows * width)
    scales = random.normal(size=(count, -(-rows // block[0]), -(-width // block[1]))).astype(np.float32)
    if numbers == FP4:
        matrix = random.integers(0, 256, (count, rows, half), np.uint8)
        pairs = np.stack([matrix & 15, matrix >> 4], -1).reshape(count, rows, width)
        values = pairs.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    else:
        matrix = random.normal(size=(count, rows, width)).astype(FP8)
        values = matrix.astype(np.float32)
    kind = data.draw(st.sampled_from(["float32", "float8_e8m0fnu"]))
    scales = scales if kind == "float32" else abs(scales).astype(ml_dtypes.float8_e8m0fnu)
    path.write_bytes(b"abc" + matrix.tobytes() + scales.tobytes())
    dtype = data.draw(st.sampled_from(["float32", "bfloat16"]))
    factors = scales.astype(np.float32).repeat(block[0], 1)[:, :rows].repeat(block[1], 2)[..., :width]
    products = (values * factors).astype(operations.numpy_dtype(dtype))
    shape, scheme, transposed = (count, rows, width), Scheme(numbers, kind, block), data.draw(st.booleans())
    tensor = ScaledTensor("", shape, scheme, path, 3, path, 3 + matrix.nbytes, transposed)
    products = products.transpose(0, 2, 1) if transposed else products
    bounds = [sorted(data.draw(st.permutations(range(length + 1)))[:2]) for length in products.shape]
    box = tuple(low for low, _ in bounds), tuple(high for _, high in bounds)
    wanted = products[tuple(slice(*one) for one in bounds)]
    to = data.draw(st.sampled_from([np.dtype(np.float32), wanted.dtype]))
    flat = np.zeros(wanted.size, to)
    order = data.draw(st.permutations(range(3)))
    out = flat.reshape([wanted.shape[axis] for axis in order]).transpose(np.argsort(order))
    memory = Memory.of(flat)
    with ReadPool(ReadOptions(1, data.draw(st.sampled_from([128, 1000, 1 << 20])))) as pool:
        pool.run(scaled(tensor, dtype, box, out.strides, memory, memory.address))
    assert out.tobytes() == wanted.astype(to).tobytes()


def test_short_rows_with_gaps_take_few_requests_and_long_or_far_ones_read_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[int] = []
    preadv = os.preadv

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        requests.append(sum(len(one) for one in buffers))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    for row, run, is_joined in [(8192, 2048, True), (32 << 10, 16 << 10, False), (64 << 10, 4 << 10, False)]:
        values = np.random.default_rng(0).integers(0, 256, (256, row), np.uint8)
        (tmp_path / "matrix").write_bytes(values.tobytes())
        target = np.zeros((256, run), np.uint8)
        byte = np.dtype(np.uint8)
        strides = (row_major((256, row), 1), row_major((256, run), 1))
        one = strided(tmp_path / "matrix", 0, (256, run), strides, (byte, byte), target.ctypes.data, target)
        assert one is not None
        requests.clear()
        with ReadPool(ReadOptions(threads=1)) as pool:
            pool.run([one])
        assert target.tobytes() == values[:, :run].tobytes()
        if is_joined:
            assert len(requests) <= -(-values.nbytes // IMAGE_BYTES) + 1
        else:
            assert sum(requests) == target.nbytes


def test_a_thread_keeps_at_most_two_files_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    preadv = os.preadv

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        found = (os.path.realpath(one) for one in Path("/proc/self/fd").iterdir())
        counts.append(sum(path.startswith(str(tmp_path.resolve())) for path in found))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    values, reads = np.arange(100, dtype=np.float32), []
    targets = [np.zeros_like(values) for _ in range(4)]
    for number, target in enumerate(targets):
        (tmp_path / f"{number}").write_bytes(values.tobytes())
        whole = Wanted(0, (0,), values.shape, values.dtype, (), (), 0)
        reads.append(operation_of(tmp_path / f"{number}", 0, values, whole, target))
    with ReadPool(ReadOptions(threads=1)) as pool:
        pool.run([one for one in reads if one is not None])
    assert all(np.array_equal(target, values) for target in targets)
    assert max(counts) == 2


class HidingPool(ThreadPoolExecutor):
    """A pool that an interrupt meets after a thread has begun to work and before the pool knows it."""

    def __init__(self, has_begun: threading.Event) -> None:
        super().__init__(1)
        self.has_begun = has_begun

    def submit(self, work: Any, *given: Any) -> Any:
        threading.Thread(target=work, args=given).start()
        assert self.has_begun.wait(LIMIT)
        raise KeyboardInterrupt


def test_no_thread_works_after_an_interrupt_even_if_its_pool_does_not_know_it() -> None:
    has_begun, processed = threading.Event(), list[int]()

    def work(take: Any) -> int:
        while (item := take()) is not None:
            has_begun.set()
            pause()
            processed.append(item)
        return 0

    with HidingPool(has_begun) as pool:
        with pytest.raises(KeyboardInterrupt):
            run_workers(pool, 2, iter(range(5)), work)
        assert processed == [0]
