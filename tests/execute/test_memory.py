"""The memory of live tensors: filled in place, or through a host tensor where it has no view."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddleformers_fc.execute.memory import host_view, slot_of
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
def test_a_contiguous_tensor_is_filled_where_it_lies(tmp_path: Path, dtype: str) -> None:
    tensor = paddle.zeros([3, 5], dtype=dtype)
    place = tensor.data_ptr()
    assert slot_of(tensor).host_bytes == 0
    data = load(tmp_path, tensor, dtype)
    assert memory_of(tensor).tobytes() == data
    assert tensor.data_ptr() == place


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_without_a_view_is_filled_through_a_host_tensor(tmp_path: Path, dtype: str) -> None:
    base = paddle.zeros([3, 5], dtype=dtype)
    tensor = base.transpose([1, 0])
    width = to_numpy(to_safetensors(dtype)).itemsize
    assert host_view(tensor) is None
    assert slot_of(tensor).host_bytes == 15 * width
    data = load(tmp_path, tensor, dtype)
    filled = memory_of(base).view(f"u{width}").reshape(3, 5)
    assert filled.T.tobytes() == data, "the memory that both share is filled"
    assert not tensor.is_contiguous()


def test_an_empty_tensor_has_an_empty_view() -> None:
    assert memory_of(paddle.empty([0, 4], dtype="bfloat16")).size == 0


def test_paddle_has_the_functions_of_a_copy_to_a_gpu() -> None:
    """The copy itself needs a GPU; a name that Paddle drops is seen without one."""
    for name in ("Stream", "stream_guard", "current_stream"):
        assert callable(getattr(paddle.device, name))
    for name in ("wait_stream", "record_event"):
        assert callable(getattr(paddle.device.Stream, name))
    assert callable(paddle.device.Event.synchronize)
    assert callable(paddle.device.Event.query)
    assert callable(paddle.CUDAPlace)
    assert callable(paddle.zeros([1]).pin_memory)
