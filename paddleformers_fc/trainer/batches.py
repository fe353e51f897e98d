"""A data loader that starts in the middle of an epoch, and the position of the training loop in its data.

PaddleFormers' loop runs as if it started from the beginning. The wrapped loader starts the first epoch where the
checkpoint ended, and sets the sampler's epoch instead of the loop.

Time: PaddleFormers' samplers skip by index. Streams, which have no index, and custom loaders are read up to the
position.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import paddle
from paddle.io import BatchSampler

from paddleformers_fc.trainer.library import (
    DistributedBatchSampler,
    MappingBatchSampler,
    MappingDistributedBatchSampler,
)
from paddleformers_fc.trainer.position import BatchSizes, Position, SampleOrder, Start, batch_sizes_of, passes_of

_SKIPPING = (MappingBatchSampler, MappingDistributedBatchSampler, DistributedBatchSampler)
_NOTHING = object()


def order_of(loader: Any) -> SampleOrder:
    """Return the order in which a data loader reads samples.

    Args:
        loader: the result of ``Trainer.get_train_dataloader``.
    """
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, MappingDistributedBatchSampler):
        seed = sampler.base_seed if sampler.shuffle else 0
        return SampleOrder(True, sampler.total_size, bool(sampler.shuffle), seed, len(sampler.dataset))
    if isinstance(sampler, MappingBatchSampler):
        source = sampler.sampler
        shuffled, length = hasattr(source, "base_seed"), len(source.data_source)
        return SampleOrder(True, length, shuffled, source.base_seed if shuffled else 0, length)
    if isinstance(sampler, DistributedBatchSampler):
        return SampleOrder(True, sampler.total_size, False, 0)
    return SampleOrder(False, 0, False, 0)


def passes_of_epoch(loader: Any, length: int | None) -> int | None:
    """Return the number of forward passes of this rank in an epoch; None if it is unknown.

    The length of PaddleFormers' distributed sampler also counts a sample that its order leaves out.

    Args:
        loader: the result of ``Trainer.get_train_dataloader``.
        length: its length.
    """
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, MappingDistributedBatchSampler):
        return length
    return passes_of(sampler.total_size, BatchSizes(sampler.batch_size, 1, sampler.nranks), sampler.drop_last)


def receives_batches(loader: Any) -> bool:
    """Return whether a data loader receives its batches from another rank, under ``distributed_dataloader``.

    Args:
        loader: the result of ``Trainer.get_train_dataloader``.
    """
    return not getattr(loader, "_need_data", True)


class ResumedBatches:
    """The data loader of a resumed run, whose first epoch begins where the checkpoint ended.

    Args:
        loader: the data loader.
        start: the position at which the run continues.
        indexed: whether samples are skipped by index, on this rank or on the rank that sends its batches.
        on_first_batch: restores the global random generators, from which shuffling draws. In the middle of an epoch it
            is called between reading and training the first batch. At the start of an epoch, which the saved run had
            not shuffled yet, it is called before the first batch is read.
        on_epoch_over: called if the first epoch has no batch left and the next epoch replaces it, which is known of a
            stream only after reading it.
        keep_waiting: receives each batch that waits in a pipeline, before the first batch.
    """

    def __init__(
        self,
        loader: Any,
        start: Start,
        indexed: bool,
        on_first_batch: Callable[[], None],
        on_epoch_over: Callable[[], None],
        keep_waiting: Callable[[Any], None],
    ) -> None:
        self._loader = loader
        self._indexed = indexed
        self._epoch = start.position.epoch
        self._samples = start.position.samples
        self._passes = start.passes
        self._waiting = start.position.waiting
        self._order = start.order
        self._on_first_batch = on_first_batch
        self._is_first = True
        self._is_begun = False
        self._on_epoch_over = on_epoch_over
        self._keep_waiting = keep_waiting

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        skips = self._passes > 0
        iterator = self._begin_epoch()
        first = next(iterator, _NOTHING)
        if first is _NOTHING and skips:
            self._on_epoch_over()
            iterator = self._begin_epoch()
            first = next(iterator, _NOTHING)
        for batch in () if first is _NOTHING else itertools.chain([first], iterator):
            self._restore_once()
            yield batch

    def expect_first(self) -> None:
        """Treat the next batch as the first one, because the saved run had trained on all batches before it."""
        self._is_first = True

    def _restore_once(self) -> None:
        if self._is_first:
            self._on_first_batch()
            self._is_first = False

    def _begin_epoch(self) -> Iterator[Any]:
        epoch, samples, passes, waiting = self._epoch, self._samples, self._passes, self._waiting
        order, self._order = self._order, None
        self._epoch, self._samples, self._passes, self._waiting = epoch + 1, 0, 0, 0
        is_at_begin = passes == 0
        if waiting:
            samples -= waiting * (samples // passes)
            passes -= waiting
        sampler = getattr(self._loader, "batch_sampler", None)
        if isinstance(sampler, _SKIPPING):
            sampler.set_epoch(epoch, samples)
        elif isinstance(sampler, BatchSampler) and not self._is_begun:
            _replay_epochs(self._loader, sampler, epoch)
        if is_at_begin:
            self._restore_once()
        if order is not None and isinstance(sampler, MappingBatchSampler | MappingDistributedBatchSampler):
            iterator = _iterate_with(self._loader, _RemainingBatches(sampler, order, epoch, samples))
        else:
            iterator = _iterate(self._loader, epoch > 0 and not self._is_begun)
        self._is_begun = True
        for _ in range(0 if self._indexed else passes):
            next(iterator, None)
        for batch in itertools.islice(iterator, waiting):
            self._keep_waiting(batch)
        return iterator


def _replay_epochs(loader: Any, sampler: BatchSampler, epochs: int) -> None:
    """Iterate a sampler over finished epochs without reading data, so that it shuffles the next epoch as before.

    Args:
        loader: the sampler's loader.
        sampler: a sampler that counts its epochs or draws from the global random generators.
        epochs: number of finished epochs.
    """
    for epoch in range(epochs):
        if getattr(loader, "num_workers", 0) and not (epoch and _has_persistent_workers(loader)):
            np.random.randint(sys.maxsize)  # A loader draws a seed when it starts worker processes.
        for _ in sampler:
            pass


def _has_persistent_workers(loader: Any) -> bool:
    return bool(getattr(loader, "num_workers", 0) and getattr(loader, "_persistent_workers", False))


def _iterate(loader: Any, had_workers: bool) -> Iterator[Any]:
    """Return an iterator over an epoch of a loader.

    Args:
        loader: the data loader.
        had_workers: whether the saved run had started worker processes before this epoch, unlike this run.
    """
    sampler = getattr(loader, "batch_sampler", None)
    if not (had_workers and _has_persistent_workers(loader) and isinstance(sampler, BatchSampler)):
        # The loader of semi-automatic parallelism is its own iterator, and calling iter() on it restarts it.
        return (batch for batch in loader)
    loader.batch_sampler = _SeedUndoingSampler(sampler)
    try:
        return (batch for batch in loader)
    finally:
        loader.batch_sampler = sampler


class _SeedUndoingSampler:
    """A sampler that shuffles as if the loader had not just drawn a seed for worker processes.

    The loader of a resumed run starts persistent workers in a later epoch than the saved run did.
    """

    def __init__(self, sampler: BatchSampler) -> None:
        self._sampler = sampler
        self._state: Any = np.random.get_state()

    def __iter__(self) -> Iterator[Any]:
        state, self._state = self._state, None
        if state is not None:
            np.random.set_state(state)
        yield from self._sampler


def _iterate_with(loader: Any, sampler: Any) -> Iterator[Any]:
    """Return an iterator of a loader that uses another sampler; later iterators use the loader's own."""
    # Under distributed_dataloader the loader sends batches of an inner loader, and creates its iterator lazily.
    reader = getattr(loader, "_dataloader", loader)
    own, keeps = reader.batch_sampler, reader._persistent_workers
    # With persistent workers the next epochs would reuse this iterator and its sampler.
    reader.batch_sampler, reader._persistent_workers = sampler, False
    try:
        iterator: Iterator[Any] = iter(reader)
    finally:
        reader.batch_sampler, reader._persistent_workers = own, keeps
    if reader is loader:
        return iterator
    loader._lazy_dataloader_iter = iterator
    return iter(loader)


class _RemainingBatches:
    """The rest of a resumed epoch, in an order that differs from the sampler's own.

    Args:
        sampler: the sampler of this rank.
        order: the order; each of its parts is permuted as PaddleFormers' samplers permute an epoch.
        epoch: added to the seed.
        samples: number of samples of the epoch, over all ranks, to leave out.
    """

    def __init__(self, sampler: Any, order: SampleOrder, epoch: int, samples: int) -> None:
        ranks, rank = getattr(sampler, "nranks", 1), getattr(sampler, "local_rank", 0)
        indices: list[int] = []
        for end in order.ends:
            paddle.seed(order.seed + epoch)
            begin = len(indices)
            indices += [begin + index for index in paddle.randperm(end - begin).tolist()]
        mine = indices[: len(indices) // ranks * ranks][rank::ranks][samples // ranks :]
        self.batch_size = sampler.batch_size
        full = len(mine) // self.batch_size * self.batch_size
        stop = full if sampler.drop_last else len(mine)
        self._batches = [mine[start : start + self.batch_size] for start in range(0, stop, self.batch_size)]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches)


class PositionTracker:
    """Tracks the position of the training loop in its data; :mod:`.events` calls it.

    It also corrects two values of the Trainer's state that the loop derives from steps: the consumed samples, and the
    epoch of a run that was resumed in the middle of an epoch.

    Args:
        waiting: returns the number of batches that wait in a pipeline.
    """

    def __init__(self, waiting: Callable[[], int]) -> None:
        self._waiting = waiting
        self.begin(SampleOrder(False, 0, False, 0), None, Start(Position(), 0), False, 0)

    def begin(
        self,
        order: SampleOrder,
        passes: int | None,
        start: Start,
        resumed: bool,
        epochs: int,
        on_epoch_replayed: Callable[[], None] | None = None,
    ) -> None:
        """Start to track a run.

        Args:
            order: the order of the data.
            passes: forward passes per rank in an epoch; None if unknown, as for a stream.
            start: the position at which the run starts.
            resumed: whether the run was resumed.
            epochs: number of epochs of the run, including those before the resume.
            on_epoch_replayed: called at the end of a resumed epoch whose remaining passes the saved run had made.
        """
        self._own_order, self._passes, self._resumed, self._epochs = order, passes, resumed, epochs
        self.order = start.order or order
        self._on_epoch_replayed = on_epoch_replayed
        self._epochs_begun = self._step_at_epoch_begin = 0
        self._counted = sys.maxsize  # The last step that the position includes; no step is counted before an epoch.
        self.position = self._epoch_begin = start.position

    def begin_next_epoch(self) -> None:
        """Replace the resumed epoch, which has no batch left, by the next one."""
        self.order = self._own_order
        self.position = self._epoch_begin = Position(self._epoch_begin.epoch + 1, 0, self.position.consumed)

    def catch_up(self, args: Any, state: Any) -> None:
        """Count all steps so far: a callback may save before its step is counted, and skipped steps have no event."""
        if state.global_step > self._counted:
            self._count(args, state, self._waiting())
        state.consumed_samples = self.position.consumed

    def on_train_begin(self, args: Any, state: Any) -> None:
        """Set the number of epochs of the run; the loop counts only the remaining ones."""
        state.num_train_epochs = self._epochs
        state.consumed_samples = self.position.consumed
        self._set_epoch(args, state)

    def on_epoch_begin(self, state: Any) -> None:
        """Set the position to the first sample of an epoch, or to the start of the resumed epoch."""
        if self._epochs_begun > 0:
            self.order = self._own_order
            self._epoch_begin = Position(self._epoch_begin.epoch + 1, 0, self.position.consumed)
        self._epochs_begun += 1
        self._step_at_epoch_begin = self._counted = state.global_step
        self.position = self._epoch_begin

    def on_step_end(self, args: Any, state: Any) -> None:
        """Count the samples of a step."""
        self._count(args, state, self._waiting())

    def on_epoch_end(self, args: Any, state: Any, control: Any) -> None:
        """Count the samples of skipped steps (``skip_data_intervals``), for which there is no event."""
        # A run that resumes here reads the batches after the last step once more.
        self._count(args, state, self.position.waiting)
        self.position = replace(self.position, ended=True)
        if self._epoch_begin.ended and state.global_step == self._step_at_epoch_begin:
            # The saved run already evaluated and saved at the end of this epoch.
            control.should_evaluate = control.should_save = False
            if self._on_epoch_replayed is not None:
                self._on_epoch_replayed()

    def _count(self, args: Any, state: Any, waiting: int) -> None:
        begin = self._epoch_begin
        trained = (state.global_step - self._step_at_epoch_begin) * batch_sizes_of(args).per_step
        self.position = Position(begin.epoch, begin.samples + trained, begin.consumed + trained, waiting)
        self._counted = state.global_step
        state.consumed_samples = self.position.consumed
        self._set_epoch(args, state)

    def _set_epoch(self, args: Any, state: Any) -> None:
        """Set the epoch of a resumed run; the loop assumes that the run started at the first batch of an epoch."""
        if self._resumed:
            pace = batch_sizes_of(args)
            # PaddleFormers assumes that an epoch of unknown length is as long as the run.
            passes = self._passes or state.max_steps * pace.accumulation
            length = passes * pace.per_pass if self.order == self._own_order else self.order.length
            state.epoch = self.position.epoch + min(1.0, self.position.samples / length)
