"""Samplers of PaddleNLP's Trainer that can begin in the middle of an epoch.

On several processes PaddleNLP uses the order of Paddle's ``DistributedBatchSampler``. It is shuffled by the number of
the epoch and always begins with its first sample. :class:`EpochSampler` has the same batches. On one process PaddleNLP
draws an order from a global generator, which a resumed run cannot repeat: it gets the order of several processes as
well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from paddle.io import BatchSampler, DistributedBatchSampler, RandomSampler


class NoSampler:
    """In the place of a class of PaddleFormers that PaddleNLP does not have; nothing is an instance of it."""

    sampler: Any

    def set_epoch(self, epoch: int, consumed_samples: int = 0) -> None:
        """Set the epoch."""


class EpochSampler(DistributedBatchSampler):
    """The batches of Paddle's ``DistributedBatchSampler``, without the samples that were consumed in this epoch."""

    base_seed = 0
    consumed_samples = 0

    def set_epoch(self, epoch: int, consumed_samples: int = 0) -> None:
        """Set the epoch, and the samples of it that all ranks together have consumed."""
        self.epoch, self.consumed_samples = epoch, consumed_samples

    def __iter__(self) -> Iterator[list[int]]:
        order = np.resize(np.arange(len(self.dataset)), self.total_size).tolist()
        if self.shuffle:
            np.random.RandomState(self.epoch).shuffle(order)
            self.epoch += 1
        left = order[self.consumed_samples :]
        step = self.batch_size * self.nranks
        for begin in range(0, len(left), step):
            batch = left[begin : begin + step]
            size = len(batch) // self.nranks
            if size < self.batch_size and self.drop_last:
                return
            if size:
                yield batch[self.local_rank * size : (self.local_rank + 1) * size]


def resumable(sampler: Any, dataset: Any) -> Any:
    """Return the sampler that a run with flex checkpoints reads its data by.

    Args:
        sampler: the result of ``Trainer._get_train_sampler``.
        dataset: the training data.
    Returns:
        an :class:`EpochSampler` in the place of Paddle's own shuffling samplers; every other sampler itself.
    """
    if type(sampler) is DistributedBatchSampler:
        ranks, rank, shuffle = sampler.nranks, sampler.local_rank, sampler.shuffle
    elif type(sampler) is BatchSampler and isinstance(sampler.sampler, RandomSampler):
        ranks, rank, shuffle = 1, 0, True
    else:
        return sampler
    return EpochSampler(dataset, sampler.batch_size, ranks, rank, shuffle, sampler.drop_last)
