"""Collectives over gloo, and operators that the CPU build lacks, against numpy and what they stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
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


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.RandomState(seed).standard_normal(shape).astype("float32")


def tensor(seed: int, *shape: int) -> Any:
    return paddle.to_tensor(numbers(seed, *shape))


def leaf(one: Any) -> Any:
    """A copy whose gradient is computed."""
    copy = one.clone().detach()
    copy.stop_gradient = False
    return copy


@on_ranks(1)
def test_bfloat16_operands_are_multiplied_in_float32() -> None:
    x, weight = (leaf(tensor(seed, *shape).astype("bfloat16")) for seed, shape in ((1, (4, 8)), (2, (8, 3))))
    out = F.linear(x, weight)
    out.sum().backward()
    assert (out.dtype, weight.grad.dtype) == (paddle.float32, paddle.bfloat16)
    assert (out == paddle.matmul(x.astype("float32"), weight.astype("float32"))).all()
    # A gradient of the order of 4 is rounded to bfloat16 once: 2 ** -9 of it.
    gradient = x.astype("float32").sum(0, keepdim=True).T
    assert float((weight.grad.astype("float32") - gradient).abs().max()) < 8 * 2**-9


@on_ranks(1)
def test_adamw_moves_the_master_weight_and_rounds_it() -> None:
    """As a float32 parameter is moved by the same gradients."""

    def trained(dtype: str) -> tuple[Any, Any]:
        parameter = paddle.create_parameter([4, 4], dtype, default_initializer=paddle.nn.initializer.Constant(0.0))
        parameter.set_value(tensor(1, 4, 4).astype("bfloat16").astype(dtype))
        optimizer = paddle.optimizer.AdamW(0.1, parameters=[parameter], weight_decay=0.1, multi_precision=True)
        for step in range(3):
            gradient = tensor(10 + step, 4, 4).astype("bfloat16").astype("float32")
            (parameter.astype("float32") * gradient).sum().backward()
            optimizer.step()
            optimizer.clear_grad()
        return parameter, optimizer._master_weights.get(parameter.name)

    (half, master), (single, _) = trained("bfloat16"), trained("float32")
    assert (half.dtype, master.dtype) == (paddle.bfloat16, paddle.float32)
    assert float((master - single).abs().max()) < 1e-6
    assert (half.astype("float32") == master.astype("bfloat16").astype("float32")).all()
    assert float((single - tensor(1, 4, 4)).abs().max()) > 0.1
