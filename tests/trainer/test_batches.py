"""The rest of an epoch in the saved order: read by worker processes, and by one rank for others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from paddle.io import BatchSampler, DataLoader, Dataset, DistributedBatchSampler, RandomSampler
from paddleformers.utils.batch_sampler import MappingDistributedBatchSampler

from paddleformers_fc.trainer.batches import ResumedBatches, order_of
from paddleformers_fc.trainer.position import BatchSizes, Position, SampleOrder, start_after

SAMPLES = 10


class Numbers(Dataset):  # type: ignore[misc]
    """Samples that are their own indices."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_the_epochs_after_a_resumed_one_have_all_samples_though_workers_persist(workers: int) -> None:
    sampler = MappingDistributedBatchSampler(Numbers(), 1, num_replicas=1, rank=0, shuffle=True, data_seed=7)
    loader = DataLoader(Numbers(), batch_sampler=sampler, num_workers=workers, persistent_workers=workers > 0)
    # Three ranks have permuted 9 of the samples, and trained 6.
    saved = (Position(0, 6, 6), BatchSizes(1, 1, 3), SampleOrder(True, 9, True, 7, SAMPLES))
    start = start_after(saved, BatchSizes(1, 1, 1), order_of(loader), SAMPLES)
    assert start.order is not None
    batches = ResumedBatches(loader, start, True, lambda: None, lambda: None, lambda _: None)
    rest, *epochs = ([int(batch[0]) for batch in batches] for _ in range(3))
    assert len(set(rest)) == 4
    assert [sorted(epoch) for epoch in epochs] == [list(range(SAMPLES))] * 2


SAMPLERS: dict[str, Callable[[], Any]] = {
    "distributed": lambda: DistributedBatchSampler(Numbers(), 2, 1, 0, shuffle=True),
    "random": lambda: BatchSampler(sampler=RandomSampler(Numbers()), batch_size=2),
    "sequential": lambda: BatchSampler(Numbers(), batch_size=2),
}


WORKERS = pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (1, True)])


def loader_of(kind: str, workers: int, persistent: bool) -> DataLoader:
    np.random.seed(42)  # The Trainer does the same.
    return DataLoader(Numbers(), batch_sampler=SAMPLERS[kind](), num_workers=workers, persistent_workers=persistent)


def indices_of(batches: Any) -> list[int]:
    return [int(index) for batch in batches for index in batch]


def resumed_at(position: Position, loader: DataLoader, restore: Callable[[], None] = lambda: None) -> ResumedBatches:
    start = start_after((position, BatchSizes(2, 1, 1), order_of(loader)), BatchSizes(2, 1, 1), order_of(loader), 5)
    return ResumedBatches(loader, start, False, restore, lambda: None, lambda _: None)


@WORKERS
@pytest.mark.parametrize("kind", SAMPLERS)
def test_the_loader_of_a_user_is_resumed_in_the_order_of_its_epoch(kind: str, workers: int, persistent: bool) -> None:
    uninterrupted = loader_of(kind, workers, persistent)
    epochs = [indices_of(uninterrupted) for _ in range(4)]
    assert kind == "sequential" or epochs[0] != epochs[2] != epochs[3]
    batches = resumed_at(Position(2, 4, 24), loader_of(kind, workers, persistent))
    assert [indices_of(batches) for _ in range(2)] == [epochs[2][4:], epochs[3]]


@WORKERS
@pytest.mark.parametrize("kind", SAMPLERS)
def test_an_epoch_that_begins_is_shuffled_by_the_saved_generators(kind: str, workers: int, persistent: bool) -> None:
    uninterrupted = loader_of(kind, workers, persistent)
    for _ in range(2):
        indices_of(uninterrupted)
        np.random.rand()  # An evaluation may do the same.
    state = np.random.get_state()
    epochs = [indices_of(uninterrupted) for _ in range(2)]
    resumed = loader_of(kind, workers, persistent)
    batches = resumed_at(Position(1, 10, 20), resumed, lambda: np.random.set_state(state))
    assert [indices_of(batches) for _ in range(2)] == epochs
