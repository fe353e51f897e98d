"""The sampler that begins in the middle of an epoch has the batches of Paddle's own."""

from __future__ import annotations

import pytest
from paddle.io import BatchSampler, DistributedBatchSampler, RandomSampler

from paddleformers_fc.trainer.nlp_models import MappingDistributedBatchSampler, resumable


class Numbers:
    """A dataset."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("length", "ranks", "size"), [(16, 1, 4), (17, 1, 4), (23, 2, 4), (5, 4, 2), (3, 4, 1)])
def test_the_batches_are_those_of_paddle(length: int, ranks: int, size: int, shuffle: bool, drop_last: bool) -> None:
    for rank in range(ranks):
        for epoch in range(2):
            theirs = DistributedBatchSampler(Numbers(length), size, ranks, rank, shuffle, drop_last)
            ours = resumable(theirs, Numbers(length))
            theirs.set_epoch(epoch)
            ours.set_epoch(epoch)
            assert isinstance(ours, MappingDistributedBatchSampler)
            assert list(ours) == list(theirs)
            assert len(ours) == len(theirs)


def test_consumed_samples_are_left_out_on_any_number_of_ranks() -> None:
    whole = DistributedBatchSampler(Numbers(24), 4, 1, 0, True)
    whole.set_epoch(1)
    order = [index for batch in whole for index in batch]
    left: list[int] = []
    samplers = [resumable(DistributedBatchSampler(Numbers(24), 2, 2, rank, True), Numbers(24)) for rank in range(2)]
    for sampler in samplers:
        sampler.set_epoch(1, 8)
    for batches in zip(*samplers, strict=True):
        left += [index for batch in batches for index in batch]
    assert left == order[8:]


def test_one_process_reads_the_order_of_several() -> None:
    sampler = BatchSampler(sampler=RandomSampler(Numbers(16)), batch_size=4)
    expected = DistributedBatchSampler(Numbers(16), 4, 1, 0, True)
    assert list(resumable(sampler, Numbers(16))) == list(expected)


def test_samplers_of_a_user_are_not_replaced() -> None:
    class Mine(BatchSampler):
        pass

    mine = Mine(Numbers(4), batch_size=2)
    assert resumable(mine, Numbers(4)) is mine
