"""How bytes get from some ranks to others: between threads, and between real ranks over Paddle's own groups."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paddleformers_fc.execute.channel import ALONE, spread
from paddleformers_fc.runtime.forkserver import ForkServer
from tests.execute.simulated import canonical, succeed
from tests.execute.test_save_and_load import save

JOBS = "tests.execute.channel_jobs"


@pytest.mark.parametrize("ranks_of_the_job", [1, 2, 3, 8])
@pytest.mark.parametrize("first", [0, 2])
def test_one_ranks_bytes_reach_the_others_that_are_named(ranks_of_the_job: int, first: int) -> None:
    members = [rank for rank in range(ranks_of_the_job) if rank != 1]
    first = first if first in members else 0
    members = [first, *(rank for rank in members if rank != first)]

    def work(channel: object) -> bytes:
        mine = b"what all shall know" if channel.rank == first else b""
        return spread(channel, mine, 19, members)

    known = succeed(ranks_of_the_job, work)
    assert known == [b"what all shall know" if rank in members else b"" for rank in range(ranks_of_the_job)]


def test_a_process_alone_passes_on_to_itself() -> None:
    array = np.arange(3, dtype=np.uint8)
    assert ALONE.pass_on({0: array}, {0: 3}) == {0: array}
    assert ALONE.pass_on({}, {}) == {}


@pytest.mark.parametrize("nbytes", [1, 1 << 20])
def test_bytes_pass_between_real_ranks_some_of_which_give_or_get_nothing(ranks: ForkServer, nbytes: int) -> None:
    values = ranks.run(f"{JOBS}:pass_on_in_a_ring", 3, {"nbytes": nbytes}).values
    assert values == ([], [0, nbytes, 1], [1, nbytes, 2])


def test_bytes_spread_between_real_ranks(ranks: ForkServer) -> None:
    values = ranks.run(f"{JOBS}:spread_among", 4, {"members": [1, 0, 3], "text": "hear"}).values
    assert values == ("hear", "hear", "", "hear")


def test_real_ranks_read_replicas_once(ranks: ForkServer, tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-3", canonical(), 1, 2)
    first, second = ranks.run(f"{JOBS}:load_once", 2, {"source": str(tmp_path / "checkpoint-3")}).values
    total = sum(4 * array.size * 3 for array in canonical().values())
    assert first[0] + second[0] == pytest.approx(total, rel=0.01)
    assert first[1] + second[1] == first[0] + second[0]
    assert first[2] == second[2] == 0
