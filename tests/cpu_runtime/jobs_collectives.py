"""Jobs for ranks: every collective once, on numbers that numpy can check."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist


def own(rank: int, dtype: str, shape: tuple[int, ...] = (6, 2)) -> np.ndarray[Any, Any]:
    """What a rank contributes: small integers, which every dtype holds exactly, also when summed."""
    return (np.arange(np.prod(shape)).reshape(shape) + 10 * rank).astype("float32" if dtype == "bfloat16" else dtype)


def _tensor(array: np.ndarray[Any, Any], dtype: str) -> Any:
    return paddle.to_tensor(array).astype(dtype)


def _list(tensor: Any) -> Any:
    return tensor.astype("float32").numpy().tolist()


def collectives(dtype: str) -> dict[str, Any]:
    """Every collective on this rank's :func:`own` array; the results by name, as nested lists."""
    dist.init_parallel_env()
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.collective._get_default_group().process_group
    mine = own(rank, dtype)
    result: dict[str, Any] = {}

    tensor = _tensor(mine, dtype)
    dist.all_reduce(tensor)
    result["all_reduce"] = _list(tensor)

    tensor = _tensor(mine, dtype)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    result["all_reduce_max"] = _list(tensor)

    tensor = _tensor(mine, dtype)
    dist.reduce(tensor, dst=1)
    result["reduce"] = _list(tensor)

    tensor = _tensor(mine, dtype)
    dist.broadcast(tensor, src=2)
    result["broadcast"] = _list(tensor)

    gathered: list[Any] = []
    dist.all_gather(gathered, _tensor(mine, dtype))
    result["all_gather"] = [_list(part) for part in gathered]

    out = paddle.zeros([size * 6, 2], dtype)
    group.all_gather_into_tensor_on_calc_stream(out, _tensor(mine, dtype))
    result["all_gather_into_tensor"] = _list(out)

    out = paddle.zeros([6 // size, 2], dtype)
    dist.stream.reduce_scatter(out, _tensor(mine, dtype))
    result["reduce_scatter_tensor"] = _list(out)

    out = paddle.zeros([2, 2], dtype)
    dist.reduce_scatter(out, [_tensor(part, dtype) for part in np.split(mine, size)])
    result["reduce_scatter"] = _list(out)

    outs = [paddle.zeros([2, 2], dtype) for _ in range(size)]
    dist.stream.alltoall(outs, [_tensor(part, dtype) for part in np.split(mine, size)])
    result["all_to_all"] = [_list(part) for part in outs]

    out = paddle.zeros([6, 2], dtype)
    dist.stream.alltoall(out, _tensor(mine, dtype))
    result["all_to_all_tensor"] = _list(out)

    # Rank r sends r + 1 rows to rank 0, one to rank 1, and the rest to rank 2.
    in_sizes = [rank + 1, 1, 4 - rank]
    out_sizes = {0: [1, 2, 3], 1: [1, 1, 1], 2: [4, 3, 2]}[rank]
    out = paddle.zeros([sum(out_sizes), 2], dtype)
    dist.alltoall_single(out, _tensor(mine, dtype), in_split_sizes=in_sizes, out_split_sizes=out_sizes)
    result["all_to_all_single"] = _list(out)

    out = paddle.zeros([2, 2], dtype)
    parts = [_tensor(part, dtype) for part in np.split(own(0, dtype), size)] if rank == 0 else None
    dist.scatter(out, parts, src=0)
    result["scatter"] = _list(out)
    return result


def a_half_sum_beyond_its_range_in_between() -> list[float]:
    """A sum of float16 and one of bfloat16 that only a wider accumulator rounds once."""
    dist.init_parallel_env()
    results = []
    for dtype in ("float16", "bfloat16"):
        # 256 + 1/2 + 1/2: added one by one in eight or eleven bits, the halves may get lost.
        tensor = paddle.to_tensor([256.0 if dist.get_rank() == 0 else 0.5]).astype(dtype)
        dist.all_reduce(tensor)
        results.append(float(tensor.astype("float32")))
    return results
