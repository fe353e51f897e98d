"""Collectives over gloo, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from tests.harness.on_ranks import on_ranks

SIZE = 3
Array = np.ndarray[Any, Any]


def own(rank: int) -> Array:
    """What a rank contributes: small integers, which every dtype holds exactly, also when summed."""
    return (np.arange(12).reshape(6, 2) + 10 * rank).astype("float32")


ALL = [own(rank) for rank in range(SIZE)]
SUM = np.sum(ALL, axis=0)
PARTS = [np.split(array, SIZE) for array in ALL]
RECEIVED = [[PARTS[source][rank] for source in range(SIZE)] for rank in range(SIZE)]
CUTS = [np.split(array, [rank + 1, rank + 2]) for rank, array in enumerate(ALL)]


def are(found: Any, expected: Any) -> None:
    """Compare a tensor, or a list of tensors, with numpy's."""
    found = [one.astype("float32").numpy() for one in found] if isinstance(found, list) else found.astype("float32")
    np.testing.assert_array_equal(np.array(found), np.array(expected))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64"])
@on_ranks(SIZE)
def test_every_collective_gives_every_rank_what_numpy_does(dtype: str) -> None:
    dist.init_parallel_env()
    rank = dist.get_rank()
    group = dist.collective._get_default_group().process_group

    def tensor(array: Array = ALL[rank]) -> Any:
        return paddle.to_tensor(array).astype(dtype)

    def empty(rows: int) -> Any:
        return paddle.zeros([rows, 2], dtype)

    dist.all_reduce(one := tensor())
    are(one, SUM)
    dist.all_reduce(one := tensor(), op=dist.ReduceOp.MAX)
    are(one, ALL[-1])
    dist.reduce(one := tensor(), dst=1)
    if rank == 1:
        are(one, SUM)
    dist.broadcast(one := tensor(), src=2)
    are(one, ALL[2])
    gathered: list[Any] = []
    dist.all_gather(gathered, tensor())
    are(gathered, ALL)
    group.all_gather_into_tensor_on_calc_stream(one := empty(6 * SIZE), tensor())
    are(one, np.concatenate(ALL))
    dist.stream.reduce_scatter(one := empty(2), tensor())
    are(one, np.split(SUM, SIZE)[rank])
    dist.reduce_scatter(one := empty(2), [tensor(part) for part in PARTS[rank]])
    are(one, np.split(SUM, SIZE)[rank])
    dist.stream.alltoall(several := [empty(2) for _ in range(SIZE)], [tensor(part) for part in PARTS[rank]])
    are(several, RECEIVED[rank])
    dist.stream.alltoall(one := empty(6), tensor())
    are(one, np.concatenate(RECEIVED[rank]))
    # Rank r sends r + 1 rows to rank 0, one to rank 1, and the rest to rank 2.
    sent, arrived = [len(part) for part in CUTS[rank]], [len(cuts[rank]) for cuts in CUTS]
    dist.alltoall_single(one := empty(sum(arrived)), tensor(), in_split_sizes=sent, out_split_sizes=arrived)
    are(one, np.concatenate([cuts[rank] for cuts in CUTS]))
    dist.scatter(one := empty(2), [tensor(part) for part in PARTS[0]] if rank == 0 else None, src=0)
    are(one, PARTS[0][rank])


@pytest.mark.parametrize(("dtype", "total"), [("float16", 257.0), ("bfloat16", 256.0)])
@on_ranks(SIZE)
def test_sums_of_halves_are_rounded_once(dtype: str, total: float) -> None:
    """257 needs nine bits: float16 holds it, bfloat16 rounds it to the even 256 once."""
    dist.init_parallel_env()
    # 256 + 1/2 + 1/2: added one by one in eight or eleven bits, the halves may get lost.
    one = paddle.to_tensor([256.0 if dist.get_rank() == 0 else 0.5]).astype(dtype)
    dist.all_reduce(one)
    assert float(one.astype("float32")) == total
