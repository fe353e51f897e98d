"""What one rank does must not grow with the number of ranks: counted at 16, 64 and 256 ranks of a tiny model."""

from __future__ import annotations

from itertools import pairwise

import pytest

from verification.scale.counting import LISTINGS, MEMORY, OPENS, PROCESSOR, READ, STATS, Meter
from verification.scale.operations import (
    ASYNCHRONOUS,
    FIRST_SAVE,
    LATER_SAVE,
    OPENING,
    PLANNING,
    RESUME,
    ROTATION,
    Counts,
    count_operations,
    running_ranks,
)
from verification.scale.ranks import AGREEMENTS, BLOCKED, EXCHANGES, LARGEST, LATENCY, RECEIVED, REQUESTS, SENT, WAITING

TIMED = {PROCESSOR, MEMORY, WAITING, BLOCKED, LATENCY}
SIZES = (16, 64, 256)
"""Each size has four times the ranks of the one before, so a count per rank of the job grows four times."""
LIMIT = 1.3
FRAME_BYTES = 12
"""What each rank sends to all in every exchange: 48 KiB at 4,096 ranks."""
TODAY = {
    # The coordinator reads the manifests of finished checkpoints.
    (ROTATION, READ): 3.9,
}
"""The counts that grow today, each of which is to fall below :data:`LIMIT`, with the growth that they may have."""
SHARED = {
    # The coordinator tells all ranks who writes replicas: a few bytes of every rank.
    (FIRST_SAVE, RECEIVED): 2.0,
    # The coordinator reads the manifest and the index, which list all files, and sends them to all ranks.
    **{(operation, count): 2.3 for operation in (RESUME, OPENING) for count in (READ, SENT, RECEIVED, LARGEST)},
    # Up to 64 ranks tell each other the blocks that they read, a bit each; more do not.
    **{(PLANNING, count): 1.4 for count in (SENT, RECEIVED)},
    # A rank opens the files that it reads: under a larger grid of the tiny model, more of them have its tensors.
    **{(PLANNING, count): 2.9 for count in (OPENS, STATS, READ)},
}
"""The counts that grow with the files of a checkpoint, with those that a rank reads or with replicas, and how much."""
SAVES = {FIRST_SAVE: 5, LATER_SAVE: 4}
"""The exchanges of a save."""
RESUMES = {RESUME: 2, OPENING: 2, PLANNING: 1}
"""The exchanges of a resume: the one that looks for the newest checkpoint carries its metadata."""
FILES = 5
"""Files of each rank: three with tensors, one with random states, and sometimes one of the few that a job has once."""


@pytest.fixture(
    scope="module", params=[SIZES[:2], pytest.param(SIZES, marks=pytest.mark.slow)], ids=["up to 64", "up to 256"]
)
def counts(request: pytest.FixtureRequest) -> list[Counts]:
    """The counts of some sizes; what is imported at the first use is imported before."""
    count_operations("tiny", 8, [0, 7])
    return [count_operations("tiny", world, running_ranks(world)) for world in request.param]


def _compared(world: int, rank: int, meter: Meter) -> dict[str, float]:
    """Return the counts of a rank that do not depend on time, without messages that the coordinator receives.

    Of what a rank receives, the frames of all ranks are left out: :data:`FRAME_BYTES` for each exchange.
    """
    left_out = TIMED | ({RECEIVED, LARGEST} if rank == 0 else set())
    if AGREEMENTS in meter:
        left_out = left_out | {REQUESTS}  # At every step end while a save is under way.
    frames = {RECEIVED: FRAME_BYTES * world * meter.get(EXCHANGES, 0), LARGEST: FRAME_BYTES * world}
    return {name: max(count - frames.get(name, 0), 0) for name, count in meter.items() if name not in left_out}


def _growth(counts: list[Counts]) -> dict[tuple[str, str], float]:
    """Return the highest growth of each count of an operation from one size to the next, over the ranks that ran."""
    found: dict[tuple[str, str], float] = {}
    for (few, smaller), (many, larger) in pairwise(zip(SIZES, counts, strict=False)):
        for operation in smaller:
            pairs = zip(smaller[operation].items(), larger[operation].items(), strict=True)
            for (rank, before), (other, after) in pairs:
                known = _compared(few, rank, before)
                for name, count in _compared(many, other, after).items():
                    growth = count / max(known.get(name, 0), 1)
                    found[operation, name] = max(growth, found.get((operation, name), 0))
    return found


def test_an_asynchronous_save_takes_three_agreements_and_is_committed_after_the_first(counts: list[Counts]) -> None:
    for of_size in counts:
        found = of_size[ASYNCHRONOUS]
        # Deleting old checkpoints is one exchange more than a save in a step.
        expected = {rank: (3, meter[EXCHANGES] + 1) for rank, meter in of_size[LATER_SAVE].items()}
        assert {rank: (meter[AGREEMENTS], meter[EXCHANGES]) for rank, meter in found.items()} == expected
        assert [rank for rank, meter in found.items() if LATENCY in meter] == [0]
        assert all(meter[BLOCKED] > 0 for meter in found.values())


def test_no_count_of_a_rank_grows_with_the_number_of_ranks(counts: list[Counts]) -> None:
    growth = _growth(counts)
    assert {key: found for key, found in growth.items() if found > (TODAY | SHARED).get(key, LIMIT)} == {}
    # A count that has become flat leaves the table.
    assert [key for key in TODAY if growth.get(key, 0) <= LIMIT] == []


def test_a_save_makes_few_exchanges_and_only_the_coordinator_gets_messages_of_all_ranks(counts: list[Counts]) -> None:
    for world, found in zip(SIZES, counts, strict=False):
        for operation, exchanges in SAVES.items():
            assert {meter[EXCHANGES] for meter in found[operation].values()} == {exchanges}
            for rank, meter in found[operation].items():
                assert rank == 0 or meter[LARGEST] < FRAME_BYTES * world + 1000


@pytest.mark.slow
def test_ranks_that_do_not_run_send_what_they_would() -> None:
    # Lazy imports run before the measurement.
    _, some, everyone = (count_operations("tiny", 8, running) for running in ([0, 7], [0, 3, 7], range(8)))
    for operation, meters in some.items():
        for rank, meter in meters.items():
            timeless = {name: count for name, count in meter.items() if name not in TIMED}
            expected = {name: everyone[operation][rank].get(name) for name in timeless}
            for name in {RECEIVED, LARGEST} & timeless.keys() if operation == PLANNING else ():
                # Ranks that run read different blocks; the messages of the others are equal, and sent once.
                assert timeless[name] <= expected.pop(name)
            assert {name: timeless[name] for name in expected} == expected, (operation, rank)


def test_a_resume_receives_the_metadata_once_and_each_rank_looks_at_its_share_alone(counts: list[Counts]) -> None:
    for found in counts:
        for operation, exchanges in RESUMES.items():
            assert {meter[EXCHANGES] for meter in found[operation].values()} == {exchanges}
        for rank, meter in found[RESUME].items():
            # Looking for the checkpoint carries its name, and the runs of all checkpoints.
            assert meter[RECEIVED] < found[OPENING][rank][RECEIVED] + 400
            if rank:
                assert (meter.get(LISTINGS, 0), meter[OPENS]) == (0, 1)
                assert meter[STATS] <= 8 + FILES
            else:
                assert meter[OPENS] <= 12
                assert meter[STATS] <= 20
