"""Process groups and the messages inside them."""

from __future__ import annotations

import pytest

from verification.forkserver import ForkServer

JOBS = "tests.cpu_runtime.jobs_messages"


@pytest.mark.parametrize("attempt", range(2))
def test_groups_find_each_other_every_time(ranks: ForkServer, attempt: int) -> None:
    rounds = 5
    families = [[0, 1, 2, 3], [0, 2], [1, 3], [0, 3], [1, 2, 3]]
    values = ranks.run(f"{JOBS}:many_groups", 4, {"count": rounds}).values
    for rank, sums in enumerate(values):
        seen = [[sum(members), len(members)] for members in families if rank in members]
        assert sums == seen * rounds


def test_ranks_that_are_done_stay_until_the_others_are(ranks: ForkServer) -> None:
    for _ in range(3):
        assert ranks.run(f"{JOBS}:an_environment_and_nothing_else", 6).values == (0, 1, 2, 3, 4, 5)


def test_two_of_three_ranks_exchange_messages(ranks: ForkServer) -> None:
    assert ranks.run(f"{JOBS}:pairs_inside_a_larger_group", 3).values == ([3.0], [0.0, 1.0, 4.0, 5.0], [2.0])


def test_a_send_does_not_wait_for_its_receiver(ranks: ForkServer) -> None:
    # 8 MB: more than the buffers of a loopback connection hold.
    assert ranks.run(f"{JOBS}:both_send_first", 2, {"elements": 2_000_000}).values == (True, True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_a_coalescing_block_sends_leave_before_receives_wait(ranks: ForkServer, dtype: str) -> None:
    values = ranks.run(f"{JOBS}:a_coalesced_ring", 3, {"dtype": dtype}).values
    assert values == tuple([before, before, before + 10, before + 10] for before in (2.0, 0.0, 1.0))


def test_messages_arrive_in_the_order_in_which_they_were_requested(ranks: ForkServer) -> None:
    assert ranks.run(f"{JOBS}:waits_in_reverse", 2).values[1] == [1.0, 2.0]


def test_messages_of_two_groups_do_not_mix(ranks: ForkServer) -> None:
    assert ranks.run(f"{JOBS}:two_groups_do_not_mix", 2).values[1] == [1.0, 0.0]


def test_halves_of_a_tensor_travel_apart_and_are_joined(ranks: ForkServer) -> None:
    values = ranks.run(f"{JOBS}:partial_messages", 4).values
    whole = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert values[2] == [[0.0, 1.0, 2.0, 0.0, 0.0, 0.0], whole]
    assert values[3] == [[0.0, 0.0, 0.0, 3.0, 4.0, 5.0], whole]


def test_a_message_of_another_size_is_refused(ranks: ForkServer) -> None:
    error = ranks.run(f"{JOBS}:a_message_of_another_size", 2).values[1]
    assert error.startswith("PeerError: A message from group rank 0 holds 3 elements where 2 are wanted.")


def test_a_message_that_never_comes_is_named(ranks: ForkServer) -> None:
    error = ranks.run(f"{JOBS}:a_message_that_never_comes", 2, {"timeout": "0.2"}).values[1]
    assert error.startswith("PeerError: Rank 1 waited 0.2 s for a message from rank 0 that never came.")


def test_every_tensor_parallel_rank_gets_the_first_ones_inputs(ranks: ForkServer) -> None:
    assert ranks.run(f"{JOBS}:inputs_of_the_first_member", 2).values == ([[0.0, 0.0], [0, 0]],) * 2
