"""Process groups and the messages inside them."""

from __future__ import annotations

import paddle
import paddle.distributed as dist
import pytest

from paddleformers_fc.cpu_runtime import p2p
from paddleformers_fc.errors import PeerError
from tests.harness.on_ranks import on_ranks


def started() -> tuple[int, int]:
    """Let the ranks find each other; this rank, and how many there are."""
    dist.init_parallel_env()
    return dist.get_rank(), dist.get_world_size()


def received(shape: list[int], source: int, group: object = None) -> list[float]:
    """The next message from a rank."""
    tensor = paddle.zeros(shape)
    dist.recv(tensor, src=source, group=group)
    values: list[float] = tensor.tolist()
    return values


@on_ranks(4)
def test_groups_find_each_other_every_time() -> None:
    rank, size = started()
    families = [list(range(size)), list(range(0, size, 2)), list(range(1, size, 2)), [0, size - 1], [1, 2, 3]]
    for _ in range(5):
        for members in families:
            group = dist.new_group(members)
            if rank in members:
                tensor = paddle.to_tensor([rank, 1])
                dist.all_reduce(tensor, group=group)
                assert tensor.tolist() == [sum(members), len(members)]


@pytest.mark.parametrize("attempt", range(3))
@on_ranks(6)
def test_ranks_that_are_done_stay_until_the_others_are(attempt: int) -> None:
    started()


@on_ranks(2)
def test_a_send_does_not_wait_for_its_receiver() -> None:
    elements = 2_000_000  # More than the buffers of a loopback connection hold.
    peer = 1 - started()[0]
    dist.send(paddle.full([elements], 1.0 - peer), dst=peer)
    assert set(received([elements], peer)) == {float(peer)}


@on_ranks(2)
def test_messages_of_two_groups_do_not_mix() -> None:
    rank, _ = started()
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    if rank == 0:
        for number, group in enumerate(groups):
            dist.send(paddle.to_tensor([float(number)]), dst=1, group=group)
        return
    assert [received([1], 0, group) for group in reversed(groups)] == [[1.0], [0.0]]


@on_ranks(2)
def test_a_message_of_another_size_is_refused() -> None:
    rank, _ = started()
    if rank == 0:
        dist.send(paddle.zeros([3]), dst=1)
        return
    with pytest.raises(PeerError, match="A message from group rank 0 has 3 elements, expected 2"):
        received([2], 0)


@on_ranks(2)
def test_a_message_that_never_comes_is_named() -> None:
    rank, _ = started()
    if rank == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(p2p.TIMEOUT_VARIABLE, "0.2")
            with pytest.raises(PeerError, match=r"Rank 1 waited 0\.2 s for a message from rank 0 that never came"):
                received([2], 0)
