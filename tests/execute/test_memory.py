"""The memory of live tensors: filled in place or through a host tensor, and averaged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given, settings, strategies as st

from paddleformers_fc.execute import memory
from paddleformers_fc.execute.memory import AveragedTensor, HostPieces, host_view, slot_of, update_averages
from paddleformers_fc.execute.reading import execute_reads
from paddleformers_fc.mapping.boxes import whole
from paddleformers_fc.plan.items import LoadPlan, ReadItem, StoredPart
from paddleformers_fc.plan.report import Report
from paddleformers_fc.storage.dtypes import to_numpy, to_safetensors

DTYPES = ["float32", "bfloat16", "float16", "int64", "bool"]


def load(root: Path, tensor: Any, dtype: str) -> bytes:
    """Fill a tensor with stored numbers; their bytes."""
    shape = tuple(tensor.shape)
    count = int(np.prod(shape)) * to_numpy(to_safetensors(dtype)).itemsize
    data = np.random.default_rng(0).integers(0, 2, count, dtype=np.uint8).tobytes()
    (root / "file").write_bytes(data)
    axes = tuple(range(len(shape)))
    item = ReadItem("model_state", "w", StoredPart("file", 0, shape, whole(shape), dtype), 0, shape, whole(shape), axes)
    execute_reads(LoadPlan((item,), (), {}, Report()), root, {("model_state", "w"): slot_of(tensor)})
    return data


def memory_of(tensor: Any) -> np.ndarray[Any, Any]:
    """The numbers of a contiguous tensor, in its own memory."""
    view = host_view(tensor)
    assert view is not None
    return view


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_contiguous_tensor_is_filled_where_it_lies_and_another_through_a_host_tensor(
    tmp_path: Path, dtype: str
) -> None:
    base, width = paddle.zeros([3, 5], dtype=dtype), to_numpy(to_safetensors(dtype)).itemsize
    place, turned = base.data_ptr(), base.transpose([1, 0])
    assert host_view(turned) is None
    assert [slot_of(tensor).host_bytes for tensor in (base, turned)] == [0, 15 * width]
    assert load(tmp_path, base, dtype) == memory_of(base).tobytes()
    data = load(tmp_path, turned, dtype)
    assert memory_of(base).view(f"u{width}").reshape(3, 5).T.tobytes() == data, "the memory that both share is filled"
    assert not turned.is_contiguous()
    assert base.data_ptr() == place


def test_paddle_has_what_only_a_gpu_needs() -> None:
    assert callable(paddle.CUDAPlace)
    assert callable(paddle.zeros([1]).pin_memory)


# ---- Moving averages, against one expression of numpy.


def in_pieces(values: np.ndarray, size: int) -> HostPieces:
    """The elements of an array in pieces, as of the memory of a device."""

    def pieces(start: int, stop: int) -> Iterator[np.ndarray]:
        return (values[low : min(low + size, stop)] for low in range(start, stop, size))

    return pieces


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.lists(st.integers(0, 200), min_size=1, max_size=4),
    block=st.integers(1, 64),
    piece=st.integers(1, 64),
    threads=st.integers(1, 3),
    first=st.integers(0, 5),
)
def test_the_bits_depend_on_no_bound_of_a_block_or_a_thread(
    sizes: list[int], block: int, piece: int, threads: int, first: int
) -> None:
    random = np.random.default_rng(sum(sizes))
    sources = [random.normal(size=first + size).astype(np.float32) for size in sizes]
    before = [random.normal(size=size).astype(np.float32) for size in sizes]
    wanted = [old + (new[first:] - old) * np.float32(0.1) for old, new in zip(before, sources, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "THREADS", threads)
        patch.setattr(memory, "BLOCK_ELEMENTS", block)
        patch.setattr(memory, "_CHUNK_ELEMENTS", 3 * block)
        averages = [AveragedTensor(old, in_pieces(new, piece), first) for old, new in zip(before, sources, strict=True)]
        update_averages(averages, 0.1)
    for found, expected in zip(before, wanted, strict=True):
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def test_a_copy_forgets_what_was_there() -> None:
    average = np.array([np.nan, np.inf, 3], np.float32)
    update_averages([AveragedTensor(average, in_pieces(np.array([1, 2, 3], np.float32), 2))], 1.0)
    assert average.tolist() == [1, 2, 3]


def test_an_error_in_a_thread_is_raised() -> None:
    def broken(start: int, stop: int) -> Iterator[np.ndarray]:
        raise KeyError("gone")

    average = np.zeros(1 << 20, np.float32)
    with pytest.raises(KeyError):
        update_averages([AveragedTensor(average, broken)], 0.5)
