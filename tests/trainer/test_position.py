"""The position in the data of a resumed run, counted in samples or refused; and the batches that follow it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from paddle.io import BatchSampler, DataLoader, Dataset, DistributedBatchSampler, IterableDataset, RandomSampler
from paddleformers.utils.batch_sampler import MappingDistributedBatchSampler

from paddleformers_fc.errors import FormatError, OptionError
from paddleformers_fc.trainer.batches import ResumedBatches, order_of
from paddleformers_fc.trainer.loading import _rereads
from paddleformers_fc.trainer.position import (
    BatchSizes,
    Position,
    SampleOrder,
    Start,
    covered,
    from_document,
    start_after,
    to_document,
)

SHUFFLED = SampleOrder(indexed=True, length=64, shuffled=True, seed=42)
STREAM = SampleOrder(indexed=False, length=0, shuffled=False, seed=0)
DP2 = BatchSizes(micro_batch=4, accumulation=1, ranks=2)
HALFWAY = Position(epoch=1, samples=24, consumed=88)
WAITING = replace(HALFWAY, waiting=2)
USED_UP = Position(epoch=1, samples=64, consumed=128)
ORDERED = SampleOrder(indexed=True, length=64, shuffled=False, seed=0)
INDEXED = replace(SHUFFLED, samples=64, corpus="of 64")


def start(
    position: Position, pace: BatchSizes, order: SampleOrder, now: SampleOrder | None = None, pipeline: bool = False
) -> Start:
    """Where a run continues whose checkpoint has this position and order; its own order may be another one."""
    now = order if now is None else now
    passes = now.length // pace.per_pass if now.length else None
    return start_after((position, DP2, order), pace, now, passes, pipeline=pipeline)


@pytest.mark.parametrize("position", [HALFWAY, WAITING, replace(HALFWAY, ended=True)])
def test_a_position_survives_its_document(position: Position) -> None:
    assert from_document(to_document(position, DP2, SHUFFLED), "data.json") == (position, DP2, SHUFFLED)


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ({}, "Invalid position"),
        ({"position": {"epoch": 1}}, "Invalid position"),
        ({"position": {"weeks": 1}}, "Invalid position"),
        ({"position": 3, "pace": 4, "order": 5}, "Invalid position"),
        (to_document(replace(WAITING, waiting=4), DP2, SHUFFLED), "more samples wait than were read"),
        (to_document(HALFWAY, DP2, replace(INDEXED, parts=(70,))), "parts overlap"),
    ],
)
def test_a_damaged_document_is_named(document: dict[str, object], fault: str) -> None:
    with pytest.raises(FormatError, match=fault) as caught:
        from_document(document, "checkpoint-3/trainer/data.json")
    assert caught.value.where == "checkpoint-3/trainer/data.json"


def test_passes_of_a_stream_and_those_that_are_too_few_for_a_step_are_counted() -> None:
    assert start(HALFWAY, BatchSizes(1, 1, 2), STREAM) == Start(HALFWAY, 12)
    last = replace(USED_UP, samples=56)
    assert start(last, BatchSizes(4, 2, 2), SHUFFLED) == Start(last, 7)


def test_an_epoch_without_a_pass_left_is_over_and_the_beginning_of_one_is_resumed_with_anything() -> None:
    begin = Start(Position(epoch=2, samples=0, consumed=128), 0)
    assert start(USED_UP, DP2, SHUFFLED) == start(begin.position, BatchSizes(5, 1, 3), SHUFFLED, STREAM) == begin


@pytest.mark.parametrize(
    ("pace", "pipeline", "position", "passes"),
    [
        (DP2, True, WAITING, 3),
        (DP2, False, Position(epoch=1, samples=8, consumed=72), 1),
        (BatchSizes(2, 1, 2), True, Position(epoch=1, samples=8, consumed=72), 2),
    ],
    ids=["a pipeline with the same batches", "no pipeline", "other batches"],
)
def test_batches_wait_again_or_the_run_resumes_at_the_first_of_them(
    pace: BatchSizes, pipeline: bool, position: Position, passes: int
) -> None:
    assert start(WAITING, pace, SHUFFLED, pipeline=pipeline) == Start(position, passes)


def test_batches_that_wait_at_the_end_of_an_epoch_are_not_lost_with_it() -> None:
    last = replace(USED_UP, waiting=1)
    assert start(last, DP2, SHUFFLED, pipeline=True) == Start(last, 8)


ODD = replace(SHUFFLED, length=66, samples=67)


def test_the_rest_of_an_epoch_is_read_in_the_saved_order_if_other_ranks_round_its_length_otherwise() -> None:
    alone, four = BatchSizes(8, 1, 1), BatchSizes(2, 1, 4)
    now = replace(ODD, length=67)
    start = start_after((HALFWAY, DP2, ODD), alone, now, 9)
    assert start == Start(HALFWAY, 3, replace(now, parts=(66,)))
    # A third layout resumes the same epoch.
    assert start.order is not None
    saved = from_document(to_document(HALFWAY, alone, start.order), "data.json")
    assert start_after(saved, four, replace(ODD, length=64), 8) == start
    # The first one may have had every sample.
    saved = from_document(to_document(HALFWAY, DP2, now), "data.json")
    assert start_after(saved, four, replace(ODD, length=64), 8) == Start(HALFWAY, 3, now)


def test_an_epoch_in_the_saved_order_is_over_when_no_rank_has_a_pass_left() -> None:
    last = Position(epoch=1, samples=64, consumed=128)
    saved = (last, BatchSizes(8, 1, 1), replace(ODD, length=67))
    assert start_after(saved, BatchSizes(32, 1, 2), ODD, 3).passes == 1
    assert start_after(saved, BatchSizes(64, 1, 1), replace(ODD, length=66), 1) == Start(
        last, 1, replace(ODD, length=67)
    )
    assert start_after(saved, BatchSizes(1, 1, 64), replace(ODD, length=64), 1) == Start(Position(2, 0, 128), 0)


def test_data_that_was_lengthened_is_trained_behind_the_rest_of_what_was_permuted() -> None:
    longer = replace(INDEXED, length=100, samples=100)
    start = start_after((HALFWAY, DP2, INDEXED), DP2, longer, 13)
    assert start == Start(HALFWAY, 3, replace(longer, parts=(64,)))
    # All of them may have been trained.
    last = Position(epoch=0, samples=64, consumed=64)
    assert start_after((last, DP2, INDEXED), DP2, longer, 13) == Start(last, 8, replace(longer, parts=(64,)))
    assert start.order is not None
    saved = from_document(to_document(HALFWAY, DP2, start.order), "data.json")
    longest = replace(longer, length=120, samples=120)
    again = start_after(saved, DP2, longest, 15)
    assert again == Start(HALFWAY, 3, replace(longest, parts=(64, 100)))


OTHER_CORPUS = "number of passes over it that max_steps and the global batch need"


@pytest.mark.parametrize(
    ("pace", "before", "now", "reason"),
    [
        (BatchSizes(5, 1, 1), SHUFFLED, {}, "read 5 per pass"),
        (BatchSizes(1, 1, 5), SHUFFLED, {}, "read 5 per pass"),
        (DP2, SHUFFLED, {"seed": 43}, "seed was 42 and is 43"),
        (DP2, SHUFFLED, {"length": 63}, "64 samples were shuffled and 63 are now"),
        (DP2, SHUFFLED, {"shuffled": False}, "dataloader_shuffle was true and is false"),
        (DP2, SHUFFLED, vars(STREAM), "was a map and is a stream now"),
        *(
            (DP2, replace(INDEXED, shuffled=shuffled), {"length": end, "samples": end, "corpus": "other"}, OTHER_CORPUS)
            for shuffled in (True, False)
            for end in (64, 100)
        ),
        # A forged length is not permuted.
        (BatchSizes(2, 1, 4), replace(ODD, length=2**60), {"length": 64}, "do not fit"),
        # Another size, though the length is rounded to the same.
        *((BatchSizes(2, 1, 4), ODD, {"length": 64, "samples": samples}, "do not fit") for samples in (0, 68, 69)),
    ],
)
def test_data_that_comes_otherwise_is_refused(
    pace: BatchSizes, before: SampleOrder, now: dict[str, Any], reason: str
) -> None:
    with pytest.raises(OptionError) as caught:
        start(HALFWAY, pace, before, replace(before, **now))
    assert reason in caught.value.render()
    assert "ignore_data_skip: true" in caught.value.next_step


def test_unshuffled_data_may_have_grown() -> None:
    assert start(HALFWAY, DP2, ORDERED, replace(ORDERED, length=80)) == Start(HALFWAY, 3)


def test_unshuffled_data_needs_the_identity_of_what_was_trained_and_shuffled_data_of_all() -> None:
    assert covered(HALFWAY, INDEXED) == 64
    assert covered(HALFWAY, replace(INDEXED, shuffled=False)) == HALFWAY.samples


def in_steps(steps: int, pace: BatchSizes) -> Any:
    """The position that a checkpoint of another format has."""
    document = {"steps": steps, "consumed": steps * pace.per_step, "pace": asdict(pace)}
    return from_document(document, "data.json")


@pytest.mark.parametrize(("drop_last", "position"), [(True, Position(1, 4, 16)), (False, Position(1, 0, 16))])
def test_steps_of_another_batch_size_leave_out_the_last_batch_as_the_saved_run_did(
    drop_last: bool, position: Position
) -> None:
    order = SampleOrder(True, 15, True, 42, samples=15)
    assert in_steps(4, BatchSizes(4, 1, 1)).under(BatchSizes(2, 1, 1), order, 8, drop_last)[0] == position


def test_the_rest_of_an_epoch_of_steps_has_the_order_of_the_ranks_that_saved_them() -> None:
    alone, two = BatchSizes(2, 1, 1), BatchSizes(2, 1, 2)
    order = SampleOrder(True, 13, True, 42, samples=13)
    start = start_after(in_steps(2, two).under(alone, order, 7), alone, order, 7)
    assert (start.position, start.order) == (Position(0, 8, 8), replace(order, parts=(12,)))
    rounded = replace(order, length=12)
    start = start_after(in_steps(4, alone).under(two, rounded, 3), two, rounded, 3)
    assert (start.position, start.order) == (Position(0, 8, 8), order)


@given(
    old=st.builds(BatchSizes, st.integers(1, 6), st.integers(1, 3), st.integers(1, 4)),
    new=st.builds(BatchSizes, st.integers(1, 6), st.integers(1, 3), st.integers(1, 4)),
    steps=st.integers(1, 10),
)
def test_no_sample_is_repeated_or_lost(old: BatchSizes, new: BatchSizes, steps: int) -> None:
    trained = steps * old.per_step
    order = SampleOrder(True, trained + 1000, True, 1)
    saved = (Position(0, trained, trained), old, order)
    for passes in (None, order.length // new.per_pass):
        if trained % new.per_pass:
            with pytest.raises(OptionError):
                start_after(saved, new, order, passes)
        else:
            assert start_after(saved, new, order, passes) == Start(saved[0], trained // new.per_pass)


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


class Reshuffled(IterableDataset):  # type: ignore[misc]
    """A stream of the samples, in every epoch in another order, by its number or by numpy's generator."""

    def __init__(self, counts: bool) -> None:
        self._epochs = count() if counts else None

    def __iter__(self) -> Iterator[int]:
        random = np.random if self._epochs is None else np.random.RandomState(next(self._epochs))
        return iter(random.permutation(SAMPLES).tolist())


def sampled(sampler: BatchSampler) -> dict[str, Any]:
    return {"dataset": Numbers(), "batch_sampler": sampler}


DATA: dict[str, Callable[[], dict[str, Any]]] = {
    "distributed": lambda: sampled(DistributedBatchSampler(Numbers(), 2, 1, 0, shuffle=True)),
    "random": lambda: sampled(BatchSampler(sampler=RandomSampler(Numbers()), batch_size=2)),
    "sequential": lambda: sampled(BatchSampler(Numbers(), batch_size=2)),
}
STREAMS: dict[str, Callable[[], dict[str, Any]]] = {
    "counting stream": lambda: {"dataset": Reshuffled(counts=True), "batch_size": 2},
    "drawing stream": lambda: {"dataset": Reshuffled(counts=False), "batch_size": 2},
}


LOADERS = [
    *((kind, *workers) for kind in DATA for workers in ((0, False), (1, False), (1, True))),
    *((kind, 0, False) for kind in STREAMS),
]


def loader_of(kind: str, workers: int, persistent: bool) -> DataLoader:
    np.random.seed(42)  # The Trainer does the same.
    return DataLoader(**{**DATA, **STREAMS}[kind](), num_workers=workers, persistent_workers=persistent)


def indices_of(batches: Any) -> list[int]:
    return [int(index) for batch in batches for index in batch]


def resumed_at(position: Position, loader: DataLoader, restore: Callable[[], None] = lambda: None) -> ResumedBatches:
    start = start_after((position, BatchSizes(2, 1, 1), order_of(loader)), BatchSizes(2, 1, 1), order_of(loader), 5)
    return ResumedBatches(loader, start, False, restore, lambda: None, lambda _: None)


@pytest.mark.parametrize(("kind", "workers", "persistent"), LOADERS)
def test_the_loader_of_a_user_is_resumed_in_the_order_of_its_epoch(kind: str, workers: int, persistent: bool) -> None:
    uninterrupted = loader_of(kind, workers, persistent)
    epochs = [indices_of(uninterrupted) for _ in range(4)]
    assert kind == "sequential" or epochs[0] != epochs[2] != epochs[3]
    batches = resumed_at(Position(2, 4, 24), loader_of(kind, workers, persistent))
    assert [indices_of(batches) for _ in range(2)] == [epochs[2][4:], epochs[3]]


@pytest.mark.parametrize(
    ("kind", "workers", "skips", "rereads", "warns"),
    [
        ("counting stream", 0, True, True, False),
        ("counting stream", 1, True, False, True),
        ("counting stream", 0, False, False, False),
        ("random", 1, True, False, False),
    ],
)
def test_finished_epochs_of_a_stream_are_read_again_unless_workers_read_it(
    kind: str, workers: int, skips: bool, rereads: bool, warns: bool
) -> None:
    warnings: list[str] = []
    session = SimpleNamespace(args=SimpleNamespace(ignore_data_skip=not skips), warn=warnings.append)
    loader, start = loader_of(kind, workers, False), Start(Position(2, 4, 24), 2)
    assert _rereads(session, loader, start, order_of(loader)) == rereads  # type: ignore[arg-type]
    assert any("set dataloader_num_workers: 0" in text for text in warnings) == warns


@pytest.mark.parametrize(("kind", "workers", "persistent"), LOADERS)
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
