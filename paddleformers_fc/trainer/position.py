"""The position of a run in its data, in samples: saved, restored and tracked.

PaddleFormers counts optimizer steps, and so repeats or loses samples if the global batch changes on resume. Here the
position is ``(epoch, samples of the epoch)``. It is exact because all samplers of PaddleFormers take batches from the
front of one order: after k batches, the first ``k * micro batch * data ranks`` samples are trained. A resumed run reads
the rest of the epoch in the saved order, also if the order is rounded to another number of ranks or the data is longer.
If seed or data differ, the trained samples are unknown, and resuming raises an error. :mod:`.batches` reads the data.

Time and memory: constant; no sample is read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import msgspec

from paddleformers_fc.errors import FormatError, OptionError
from paddleformers_fc.layout.batch_sizes import BatchSizes as BatchSizes
from paddleformers_fc.storage.manifest import RESTORE
from paddleformers_fc.trainer import documents

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
SAME_SAMPLES = (
    "Resume under settings with the same samples in the same order, or set ignore_data_skip: true to start the epoch "
    "from its beginning."
)


@dataclass(frozen=True)
class SampleOrder:
    """The order of the samples of an epoch.

    Args:
        indexed: whether samples have indices, so that a sampler can skip them.
        length: number of ordered samples, which the number of data ranks divides; 0 for a stream.
        shuffled: whether they are permuted.
        seed: seed of the permutation, to which the epoch is added; 0 without a permutation.
        samples: number of samples of the data, before it is rounded; 0 if unknown.
        parts: earlier lengths, if the data was extended within the epoch; each part has its own permutation.
        corpus: digest of the first :func:`covered` samples of the data; empty if unknown.
    """

    indexed: bool
    length: _Count
    shuffled: bool
    seed: int
    samples: _Count = 0
    parts: tuple[_Count, ...] = ()
    corpus: str = ""

    @property
    def ends(self) -> tuple[int, ...]:
        """The end index of each separately permuted part."""
        return (*self.parts, self.length)


@dataclass(frozen=True)
class Position:
    """The position of a run in its data.

    Args:
        epoch: number of finished epochs.
        samples: samples of the current epoch that were read, on all ranks together.
        consumed: samples that were read since the first step.
        waiting: forward passes among them whose batches a pipeline has read and not trained yet. PaddleFormers keeps
            the remainder of an epoch for the next one, and trains every later batch with this delay.
        ended: whether the loop is at the end of the epoch, after passes beyond the last step that ``samples`` does not
            count.
    """

    epoch: _Count = 0
    samples: _Count = 0
    consumed: _Count = 0
    waiting: _Count = 0
    ended: bool = False


def batch_sizes_of(args: Any, passes: int | None = None) -> BatchSizes:
    """Return the batch sizes of a run.

    Args:
        args: PaddleFormers' training arguments.
        passes: forward passes per rank in an epoch, to which PaddleFormers limits the accumulation; None if unknown.
    """
    accumulation = args.gradient_accumulation_steps
    if passes:
        accumulation = min(accumulation, passes)
    return BatchSizes(args.per_device_train_batch_size, accumulation, args.dataset_world_size)


def to_document(position: Position, pace: BatchSizes, order: SampleOrder) -> dict[str, Any]:
    """Encode a position for a checkpoint; :func:`from_document` reads it."""
    return {"position": asdict(position), "pace": asdict(pace), "order": {**asdict(order), "parts": list(order.parts)}}


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    """The type of the result of :func:`to_document`."""

    position: Position
    pace: BatchSizes
    order: SampleOrder


SavedData = tuple[Position, BatchSizes, SampleOrder]
"""A position, with the batch sizes and the order of the run that saved it."""


class StepPosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The position in a checkpoint of another format, which does not contain the order of the data.

    Attributes:
        steps: completed optimizer steps.
        consumed: trained samples.
        pace: the batch sizes; None if unknown.
    """

    steps: _Count
    consumed: _Count
    pace: BatchSizes | None

    def under(self, pace: BatchSizes, order: SampleOrder, passes: int | None, drop_last: bool = False) -> SavedData:
        """Return the position in the data of this run, as PaddleFormers computes it from steps.

        Args:
            pace: batch sizes of this run; also used for the saved run if its own are unknown.
            order: order of this run. The saved run must have had the same order, except for rounding to its ranks.
            passes: forward passes per rank in an epoch of this run; None if unknown, as for a stream.
            drop_last: whether both runs drop a last batch that is not full.
        """
        old = self.pace or pace
        if not order.indexed or passes is None:
            return Position(0, self.steps * old.per_step, self.consumed), old, order
        if old.ranks != pace.ranks and order.samples:
            order = replace(order, length=order.samples // old.ranks * old.ranks)
        own = passes if old == pace else passes_of(order.length, old, drop_last)
        epoch, steps = divmod(self.steps, max(own // max(min(old.accumulation, own), 1), 1))
        return Position(epoch, steps * old.per_step, self.consumed), old, order


def from_document(document: dict[str, Any], where: str) -> SavedData | StepPosition:
    """Decode the result of :func:`to_document`, or the position in a checkpoint of another format.

    Raises:
        FormatError: the document is damaged.
    """
    what = "Invalid position in the data."
    if "steps" in document:
        return documents.typed(document, StepPosition, what, where)
    read = documents.typed(document, _Document, what, where)
    position, ends = read.position, read.order.ends
    fault = ""
    if list(ends) != sorted(set(ends)):
        fault = "Invalid order of the data: parts overlap."
    elif position.waiting * read.pace.per_pass > position.samples:
        fault = "Invalid position in the data: more samples wait than were read."
    if fault:
        raise FormatError(fault, where=where, evidence=[str(read)], next_step=RESTORE)
    return position, read.pace, read.order


@dataclass(frozen=True)
class Start:
    """The position at which a resumed run continues.

    Args:
        position: the position; ``samples`` is 0 if the saved epoch is finished.
        passes: forward passes of the epoch before it; the last ``position.waiting`` of them are still to be trained.
        order: the order of the rest of the epoch; None for the order of this run.
    """

    position: Position
    passes: int
    order: SampleOrder | None = None


def start_after(
    saved: tuple[Position, BatchSizes, SampleOrder],
    pace: BatchSizes,
    order: SampleOrder,
    passes: int | None,
    pipeline: bool = False,
    drop_last: bool = False,
) -> Start:
    """Return the position at which a run continues.

    The last passes of an epoch run even if they are too few for a step: PaddleFormers adds their gradients to the next
    step.

    Args:
        saved: position, batch sizes and order of the checkpoint.
        pace: batch sizes of this run.
        order: order of this run.
        passes: forward passes per rank in an epoch of this run; None if unknown, as for a stream.
        pipeline: whether batches can wait in this run. If not, or if batch sizes differ, the run continues at the first
            waiting batch.
        drop_last: whether this run drops a last batch that is not full.
    Raises:
        OptionError: the settings of this run do not determine which samples were trained.
    """
    position, old_pace, old_order = saved
    if not pipeline or pace != old_pace:
        position = _without_waiting(position, old_pace)
    if position.samples == 0:
        return Start(position, 0)
    rest = _order_of_rest(old_order, order)
    if rest is not None:
        passes = passes_of(rest.length, pace, drop_last)
    faults = list(_order_faults(old_order, order if rest is None else replace(order, length=old_order.length)))
    if position.samples % pace.per_pass:
        faults.append(
            f"{position.samples} samples of epoch {position.epoch} were trained; {pace.ranks} data ranks with "
            f"per_device_train_batch_size {pace.micro_batch} read {pace.per_pass} per pass"
        )
    if faults:
        raise OptionError(
            "The run cannot continue with the next sample: the order of its data or its batch sizes do not fit.",
            where=f"global batch {old_pace.per_step} when saved, {pace.per_step} now",
            evidence=faults,
            next_step=SAME_SAMPLES,
        )
    done = position.samples // pace.per_pass
    if passes is not None and done - position.waiting >= passes:
        return Start(Position(position.epoch + 1, 0, position.consumed), 0)
    return Start(position, done, rest)


def passes_of(length: int, pace: BatchSizes, drop_last: bool = False) -> int:
    """Return the number of forward passes of every data rank in an epoch of this length."""
    full, left = divmod(length // pace.ranks, pace.micro_batch)
    return full + (left > 0 and not drop_last)


def covered(position: Position, order: SampleOrder) -> int:
    """Return how many of the data's first samples may have been trained; a checkpoint contains a digest of these."""
    return order.length if order.shuffled else position.samples


def _order_of_rest(old: SampleOrder, new: SampleOrder) -> SampleOrder | None:
    """Return the order of the rest of the epoch if its permutation differs from this run's; None if not, or unknown."""
    shuffled = old.indexed and new.indexed and old.shuffled and new.shuffled
    if not shuffled or old.ends == new.ends or not _same_samples(old, new):
        return None
    length = max(old.length, new.length)
    return replace(new, length=length, parts=tuple(end for end in old.ends if end < length))


def _same_samples(old: SampleOrder, new: SampleOrder) -> bool:
    """Return whether the data begins with the samples that the saved run has permuted."""
    if old.length > new.samples:  # Also bounds the numbers of a damaged checkpoint.
        return False
    return old.corpus == new.corpus if old.corpus else old.samples == new.samples


def _without_waiting(position: Position, pace: BatchSizes) -> Position:
    """Return the position before the waiting batches."""
    waiting = position.waiting * pace.per_pass
    return replace(position, samples=position.samples - waiting, consumed=position.consumed - waiting, waiting=0)


def _order_faults(old: SampleOrder, new: SampleOrder) -> Iterator[str]:
    if old.indexed != new.indexed:
        yield "the data was a map and is a stream now" if old.indexed else "the data was a stream and is a map now"
    elif old.shuffled != new.shuffled:
        yield f"dataloader_shuffle was {str(old.shuffled).lower()} and is {str(new.shuffled).lower()}"
    elif new.shuffled and old.seed != new.seed:
        yield f"seed was {old.seed} and is {new.seed}, which shuffles the data differently"
    elif new.shuffled and old.length != new.length:
        yield f"{old.length} samples were shuffled and {new.length} are now, which gives another order"
    if old.corpus and new.corpus != old.corpus:
        yield (
            "the corpus is distributed to other samples: by seed, sequence length, and the number of passes over it "
            "that max_steps and the global batch need"
        )


def epochs_left(start: Start, epochs: int, bounded_by_steps: bool, done: bool) -> int:
    """Return the number of epochs that a resumed loop still has to run.

    Args:
        start: the position at which it continues.
        epochs: epochs of the complete run.
        bounded_by_steps: whether ``max_steps`` ends the run.
        done: whether all steps are done.
    """
    if done:
        return 0
    return sys.maxsize if bounded_by_steps else max(epochs - start.position.epoch, 0)


class PositionTracker:
    """Tracks the position of the training loop in its data; :class:`.session.LoopEvents` calls it.

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
        # A callback may have changed gradient_accumulation_steps since the steps before.
        done, trained = self.position, (state.global_step - self._counted) * batch_sizes_of(args).per_step
        self.position = Position(done.epoch, done.samples + trained, done.consumed + trained, waiting)
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
