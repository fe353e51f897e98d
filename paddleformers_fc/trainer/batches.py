"""The data of a run: the position of the loop in it, and a loader that starts in the middle of an epoch.

PaddleFormers' loop runs as if from the beginning; its loader starts the first epoch where the checkpoint ended, and
does to its sampler what the loop would do.

Cost: a sampler skips by index. A stream (no index) is read and dropped up to the position.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from paddleformers.trainer import TrainerCallback
from paddleformers.utils.batch_sampler import (
    DistributedBatchSampler,
    MappingBatchSampler,
    MappingDistributedBatchSampler,
)

from paddleformers_fc.trainer.position import Position, SampleOrder, Start, pace_of

_SKIPPING = (MappingBatchSampler, MappingDistributedBatchSampler, DistributedBatchSampler)
_NOTHING = object()


def order_of(loader: Any) -> SampleOrder:
    """The order in which a data loader takes samples.

    Args:
        loader: what ``Trainer.get_train_dataloader`` returned.
    """
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, MappingDistributedBatchSampler):
        return SampleOrder(True, sampler.total_size, bool(sampler.shuffle), sampler.base_seed if sampler.shuffle else 0)
    if isinstance(sampler, MappingBatchSampler):
        source = sampler.sampler
        shuffled = hasattr(source, "base_seed")
        return SampleOrder(True, len(source.data_source), shuffled, source.base_seed if shuffled else 0)
    if isinstance(sampler, DistributedBatchSampler):
        return SampleOrder(True, sampler.total_size, False, 0)
    return SampleOrder(False, 0, False, 0)


def is_handed_its_batches(loader: Any) -> bool:
    """Whether a data loader reads nothing: under ``distributed_dataloader`` another rank hands it the batches.

    Args:
        loader: what ``Trainer.get_train_dataloader`` returned.
    """
    return not getattr(loader, "_need_data", True)


class ResumedBatches:
    """Stands in for the data loader of a resumed run: its first epoch begins where the checkpoint ended.

    The Trainer's loop does not know that anything was skipped; what it knows of a data loader's sampler is done here.

    Args:
        loader: the data loader.
        start: where to begin.
        indexed: whether the samples are skipped by index, be it by the rank that hands this one its batches.
        on_first_batch: called when the first batch has been taken from the loader and before it is trained.
            Shuffling draws from the global random generators, so they are restored here and not earlier.
        on_epoch_over: called where nothing is left of the first epoch, and the next one is begun in its place. Where
            a stream ends is not known before it has been read.
        keep_waiting: takes each batch that the run had taken and not trained, before the first one is.
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
        self._on_first_batch = on_first_batch
        self._is_first = True
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
            if self._is_first:
                self._on_first_batch()
                self._is_first = False
            yield batch

    def expect_first(self) -> None:
        """The next batch is another first one: those before it had been trained before the checkpoint was saved."""
        self._is_first = True

    def _begin_epoch(self) -> Iterator[Any]:
        epoch, samples, passes, waiting = self._epoch, self._samples, self._passes, self._waiting
        self._epoch, self._samples, self._passes, self._waiting = epoch + 1, 0, 0, 0
        if waiting:
            samples -= waiting * (samples // passes)
            passes -= waiting
        sampler = getattr(self._loader, "batch_sampler", None)
        if isinstance(sampler, _SKIPPING):
            sampler.set_epoch(epoch, samples)
        iterator: Iterator[Any] = iter(self._loader)
        for _ in range(0 if self._indexed else passes):
            next(iterator, None)
        for batch in itertools.islice(iterator, waiting):
            self._keep_waiting(batch)
        return iterator


class PositionTracker(TrainerCallback):
    """Follows the training loop and always knows the position.

    It also corrects the two numbers of the Trainer's state that the loop derives from steps: the samples consumed, and
    the epoch of a run that was resumed in the middle of one.

    Args:
        waiting: returns how many batches wait in a pipeline.
    """

    def __init__(self, waiting: Callable[[], int]) -> None:
        self._waiting = waiting
        self.order = SampleOrder(False, 0, False, 0)
        self._passes: int | None = None
        self._resumed = False
        self._epochs = 0
        self._epochs_begun = 0
        self._on_made_up: Callable[[], None] | None = None
        self._epoch_begin = Position()
        self._step_at_epoch_begin = 0
        self.position = Position()

    def begin(
        self,
        order: SampleOrder,
        passes: int | None,
        start: Start,
        resumed: bool,
        epochs: int,
        on_made_up: Callable[[], None] | None = None,
    ) -> None:
        """Forget the last run.

        Args:
            order: of the data loader.
            passes: forward passes per rank in an epoch; None if that is not known, as for a stream.
            start: where this run starts.
            resumed: whether it was resumed.
            epochs: how many epochs the whole run has.
            on_made_up: called where passes have been made that a checkpoint of an epoch's end had behind it.
        """
        self.order = order
        self._passes = passes
        self._resumed = resumed
        self._epochs = epochs
        self._epochs_begun = 0
        self._on_made_up = on_made_up
        self.position = self._epoch_begin = start.position

    def begin_next_epoch(self) -> None:
        """The epoch that was resumed turned out to be over, and its successor takes its place."""
        self.position = self._epoch_begin = Position(self._epoch_begin.epoch + 1, 0, self.position.consumed)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The loop counts only the epochs that are left."""
        state.num_train_epochs = self._epochs
        state.consumed_samples = self.position.consumed
        self._tell_epoch(args, state)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A resumed epoch has a part that is done; every other begins with its first sample."""
        if self._epochs_begun > 0:
            self._epoch_begin = Position(self._epoch_begin.epoch + 1, 0, self.position.consumed)
        self._epochs_begun += 1
        self._step_at_epoch_begin = state.global_step
        self.position = self._epoch_begin

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the samples of the step that was just made."""
        self._count(args, state, self._waiting())

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the samples of steps that were left out (``skip_data_intervals``), for which there is no event."""
        # What an epoch leaves over after its last step is taken once more when a run resumes there.
        self._count(args, state, self.position.waiting)
        self.position = replace(self.position, ended=True)
        if self._epoch_begin.ended and state.global_step == self._step_at_epoch_begin:
            # The end of this epoch was evaluated and saved by the run that saved the checkpoint.
            control.should_evaluate = control.should_save = False
            if self._on_made_up is not None:
                self._on_made_up()

    def _count(self, args: Any, state: Any, waiting: int) -> None:
        begin = self._epoch_begin
        trained = (state.global_step - self._step_at_epoch_begin) * pace_of(args).per_step
        self.position = Position(begin.epoch, begin.samples + trained, begin.consumed + trained, waiting)
        state.consumed_samples = self.position.consumed
        self._tell_epoch(args, state)

    def _tell_epoch(self, args: Any, state: Any) -> None:
        """The epoch of a resumed run, which the loop takes to begin with its first batch."""
        if self._resumed:
            pace = pace_of(args)
            # PaddleFormers takes an epoch of unknown length to be as long as the run.
            passes = self._passes or state.max_steps * pace.accumulation
            length = self.order.length or passes * pace.per_pass
            state.epoch = self.position.epoch + min(1.0, self.position.samples / length)
