"""Jobs for ranks: groups that are formed, and messages inside them."""

from __future__ import annotations

from typing import Any

import paddle
import paddle.distributed as dist


def many_groups(count: int) -> list[list[int]]:
    """Form ``count`` rounds of overlapping groups of several sizes, each used at once; the sums seen by this rank."""
    dist.init_parallel_env()
    rank, size = dist.get_rank(), dist.get_world_size()
    families = [list(range(size)), list(range(0, size, 2)), list(range(1, size, 2)), [0, size - 1], [1, 2, 3]]
    sums = []
    for _ in range(count):
        for members in families:
            group = dist.new_group(members)
            if rank in members:
                tensor = paddle.to_tensor([rank, 1])
                dist.all_reduce(tensor, group=group)
                sums.append(tensor.tolist())
    return sums


def an_environment_and_nothing_else() -> int:
    """Initialise, and be done: rank 0 is the first to get there."""
    dist.init_parallel_env()
    return int(dist.get_rank())


def pairs_inside_a_larger_group() -> list[float]:
    """Messages between two of three ranks, more from one sender than from another; what this rank received."""
    dist.init_parallel_env()
    rank = dist.get_rank()
    received = []
    routes = [(0, 1), (0, 1), (1, 2), (2, 0), (0, 1), (2, 1)]
    for number, (source, target) in enumerate(routes):
        if rank == source:
            dist.send(paddle.to_tensor([float(number)]), dst=target)
        if rank == target:
            tensor = paddle.zeros([1])
            dist.recv(tensor, src=source)
            received.append(float(tensor))
    return received


def both_send_first(elements: int) -> bool:
    """Both ranks send a large message before either receives."""
    dist.init_parallel_env()
    peer = 1 - dist.get_rank()
    dist.send(paddle.full([elements], float(dist.get_rank())), dst=peer)
    tensor = paddle.zeros([elements])
    dist.recv(tensor, src=peer)
    return bool((tensor == float(peer)).all())


def a_coalesced_ring(dtype: str) -> list[float]:
    """Each rank receives from the previous one and sends to the next, in this order, in two kinds of blocks."""
    dist.init_parallel_env()
    rank, size = dist.get_rank(), dist.get_world_size()
    out, into = paddle.full([2], float(rank)).astype(dtype), paddle.zeros([2]).astype(dtype)
    operations = [
        dist.P2POp(dist.irecv, into, (rank - 1) % size),
        dist.P2POp(dist.isend, out, (rank + 1) % size),
    ]
    for task in dist.batch_isend_irecv(operations):
        task.wait()

    group = dist.collective._get_default_group().process_group
    group._start_coalescing()
    into_again = paddle.zeros([2]).astype(dtype)
    group.recv_on_calc_stream(into_again, (rank - 1) % size)
    group.send_on_calc_stream((out.astype("float32") + 10).astype(dtype), (rank + 1) % size)
    group._end_coalescing()
    values: list[float] = paddle.concat([into, into_again]).astype("float32").tolist()
    return values


def waits_in_reverse() -> list[float]:
    """Two receives from one sender, of which the second is waited for first."""
    dist.init_parallel_env()
    if dist.get_rank() == 0:
        dist.send(paddle.to_tensor([1.0]), dst=1)
        dist.send(paddle.to_tensor([2.0]), dst=1)
        return []
    first, second = paddle.zeros([1]), paddle.zeros([1])
    tasks = [dist.irecv(first, src=0), dist.irecv(second, src=0)]
    for task in reversed(tasks):
        task.wait()
    return [float(first), float(second)]


def two_groups_do_not_mix() -> list[float]:
    """The same two ranks use two groups, and receive in the other order than they were sent."""
    dist.init_parallel_env()
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    if dist.get_rank() == 0:
        for number, group in enumerate(groups):
            dist.send(paddle.to_tensor([float(number)]), dst=1, group=group)
        return []
    received = []
    for group in reversed(groups):
        tensor = paddle.zeros([1])
        dist.recv(tensor, src=0, group=group)
        received.append(float(tensor))
    return received


def partial_messages() -> list[list[float]]:
    """Each of two tensor parallel ranks carries half of a tensor to its peer; the halves are joined there."""
    dist.init_parallel_env()
    rank = dist.get_rank()
    senders, receivers = dist.new_group([0, 1]), dist.new_group([2, 3])
    world = dist.collective._get_default_group().process_group
    if rank in senders.ranks:
        world.send_partial_on_calc_stream(paddle.arange(6, dtype="float32"), rank + 2, 2, rank)
        return []
    tensor = paddle.zeros([6])
    world.recv_partial_on_calc_stream(tensor, rank - 2, 2, rank - 2)
    half = tensor.tolist()
    receivers.process_group.all_gather_partial_on_calc_stream(tensor, tensor, 2, rank - 2)
    return [half, tensor.tolist()]


def a_message_of_another_size() -> str:
    """Rank 1 receives three elements into a tensor of two; the error it gets."""
    dist.init_parallel_env()
    if dist.get_rank() == 0:
        dist.send(paddle.zeros([3]), dst=1)
        return ""
    try:
        dist.recv(paddle.zeros([2]), src=0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "received"


def a_message_that_never_comes(timeout: str) -> str:
    """Rank 1 waits for a message that rank 0 does not send; the error it gets."""
    import os

    from paddleformers_fc.cpu_runtime import p2p

    dist.init_parallel_env()
    os.environ[p2p.TIMEOUT_VARIABLE] = timeout
    if dist.get_rank() == 0:
        return ""
    try:
        dist.recv(paddle.zeros([2]), src=0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "received"


def inputs_of_the_first_member() -> list[Any]:
    """Tensor parallel ranks start with different batches; what the model gets on each."""
    from paddle.distributed import fleet
    from paddle.distributed.fleet.meta_parallel import tensor_parallel

    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 2, "pp_degree": 1}
    fleet.init(is_collective=True, strategy=strategy)
    rank = dist.get_rank()
    inputs, kwargs = tensor_parallel.broadcast_input_data(
        fleet.get_hybrid_communicate_group(), paddle.full([2], float(rank)), labels=paddle.to_tensor([rank, rank])
    )
    return [inputs[0].tolist(), kwargs["labels"].tolist()]
