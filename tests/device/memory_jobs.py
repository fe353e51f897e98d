"""Jobs of one rank: the executors and the memory of single tensors."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

from tests.device.counting import copied
from tests.device.running import device

_SHAPE = (6, 4, 5)
_CASTS = [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32"), ("int64", "int64")]


def read_every_way(root: str, staging_bytes: int) -> dict[str, Any]:
    """Fill device tensors by plans that read whole, strided, transposed, cast and in slabs; what came out wrong.

    Args:
        root: an empty directory.
        staging_bytes: bound of the host memory.
    """
    import paddle

    from paddleformers_fc.execute.device import in_host_memory
    from paddleformers_fc.execute.memory import slot_of
    from paddleformers_fc.execute.read_pool import ReadOptions
    from paddleformers_fc.execute.reading import execute_reads
    from paddleformers_fc.mapping.boxes import Box, whole
    from tests.execute.test_reading import Stored, Wanted, plan_of

    paddle.set_device(device())
    cases = [
        Wanted(_SHAPE, box, order, dtypes, slabs)
        for box in (whole(_SHAPE), Box((1, 0, 2), (6, 3, 5)))
        for order in permutations(range(3))
        for dtypes in _CASTS
        for slabs in (1, 3)
    ]
    stored = Stored(Path(root), cases)
    shapes = {(item.role, item.name): item.shape for item in stored.items}
    tensors = {}
    for number, (key, expected) in enumerate(stored.expected.items()):
        shape = shapes[key]
        tensor = paddle.zeros(list(shape if number % 4 else shape[::-1]), dtype=str(expected.dtype))
        tensors[key] = tensor if number % 4 else tensor.transpose([2, 1, 0])
    plan = plan_of(stored.items)
    before = copied()
    slots = {key: slot_of(tensor) for key, tensor in tensors.items()}
    execute_reads(plan, Path(root), slots, ReadOptions(staging_memory_bytes=staging_bytes))
    after = copied() - before
    wrong = [
        name
        for (role, name), expected in stored.expected.items()
        if tensors[role, name].contiguous().cpu().numpy().tobytes() != expected.tobytes()
    ]
    return {
        "tensors": len(tensors),
        "wrong": wrong,
        "on the host": sum(in_host_memory(tensor.place) for tensor in tensors.values()),
        "copied": after.to_device,
        "wanted": sum(array.nbytes for array in stored.expected.values()),
        "late": after.late_to_device,
        "strided": sum(array.nbytes for array in list(stored.expected.values())[::4]),
    }


def save_in_pieces(strided: bool) -> dict[str, Any]:
    """Take a range of a tensor of 20 MiB to the host, in pieces; what came, and what was copied."""
    import numpy as np
    import paddle

    from paddleformers_fc.execute.memory import host_pieces

    paddle.set_device(device())
    rows, row = 5 * 1024, 1024
    numbers = np.arange(rows * row, dtype="float32").reshape(rows, row)
    tensor = paddle.to_tensor(numbers)
    if strided:
        tensor = paddle.to_tensor(np.ascontiguousarray(numbers.T)).transpose([1, 0])
    before = copied()
    start, stop = 3 * row, (rows - 7) * row
    pieces = [piece.copy() for piece in host_pieces(tensor, start, stop)]
    after = copied() - before
    return {
        "pieces": [piece.nbytes for piece in pieces],
        "right": np.concatenate(pieces).tobytes() == numbers.reshape(-1)[start:stop].tobytes(),
        "copied": after.to_host,
    }


def fill_while_computing() -> list[float]:
    """Load into a tensor that the computation has not finished writing, and read it in the computation's order."""
    import numpy as np
    import paddle

    from paddleformers_fc.execute.memory import slot_of

    paddle.set_device(device())
    tensor = paddle.zeros([8], dtype="float32")
    tensor.fill_(5.0)
    slot = slot_of(tensor)
    slot.open().array()[:] = np.arange(8)
    slot.close()
    slot.settle()
    paddle.device.synchronize(device())
    found: list[float] = tensor.numpy().tolist()
    return found
