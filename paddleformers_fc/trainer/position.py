"""How far into the data a run is, counted in samples, and how a resumed run goes on from exactly there.

PaddleFormers counts optimizer steps. Resumed with another global batch (another data-parallel degree, micro batch or
accumulation) it multiplies old steps by the new batch, and repeats or loses samples. Here the position is ``(epoch,
samples of it)``: a checkpoint holds it, and a resumed run skips those samples, however many steps they took.

Skipping by samples is right because every sampler of PaddleFormers deals batches from the front of one order: after k
batches, the first ``k * micro batch * data ranks`` samples have been trained, whoever trained them. That order must be
the same before and after. It is a permutation of a length that the number of data ranks divides, seeded with ``seed``
and the epoch: where seed or length differ, nobody can say which samples were seen, and resuming is refused.

Cost: a sampler skips by index. A stream (no index) is read and dropped up to the position.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from paddleformers.trainer import TrainerCallback
from paddleformers.utils.batch_sampler import (
    DistributedBatchSampler,
    MappingBatchSampler,
    MappingDistributedBatchSampler,
)

from paddleformers_fc.errors import FormatError, OptionError

_SKIPPING = (MappingBatchSampler, MappingDistributedBatchSampler, DistributedBatchSampler)
_START_ANEW = "Resume under settings that deal the same samples, or set ignore_data_skip: true to begin the data anew."


@dataclass(frozen=True)
class Order:
    """What decides in which order the samples of an epoch come.

    Args:
        indexed: whether samples have indices, so that a sampler can skip them.
        length: number of samples that are put in order; 0 for a stream.
        shuffled: whether they are permuted.
        seed: of the permutation, to which the epoch is added; 0 where nothing is permuted.
    """

    indexed: bool
    length: int
    shuffled: bool
    seed: int


@dataclass(frozen=True)
class Pace:
    """How many samples a run takes at a time.

    Args:
        micro_batch: samples per rank and forward pass.
        accumulation: forward passes per optimizer step.
        ranks: number of data-parallel ranks, those that see different samples.
    """

    micro_batch: int
    accumulation: int
    ranks: int

    @property
    def per_pass(self) -> int:
        """Samples of one forward pass on all ranks."""
        return self.micro_batch * self.ranks

    @property
    def per_step(self) -> int:
        """Samples of one optimizer step: the global batch."""
        return self.per_pass * self.accumulation


@dataclass(frozen=True)
class Position:
    """How far into the data a run is.

    Args:
        epoch: epochs that are finished.
        samples: samples of the current epoch that were trained, on all ranks together.
        consumed: samples trained since the very start.
    """

    epoch: int = 0
    samples: int = 0
    consumed: int = 0


def pace_of(args: Any) -> Pace:
    """The pace of a run.

    Args:
        args: PaddleFormers' training arguments.
    """
    return Pace(args.per_device_train_batch_size, args.gradient_accumulation_steps, args.dataset_world_size)


def order_of(loader: Any) -> Order:
    """The order in which a data loader takes samples.

    Args:
        loader: what ``Trainer.get_train_dataloader`` returned.
    """
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, MappingDistributedBatchSampler):
        return Order(True, sampler.total_size, bool(sampler.shuffle), sampler.base_seed if sampler.shuffle else 0)
    if isinstance(sampler, MappingBatchSampler):
        source = sampler.sampler
        shuffled = hasattr(source, "base_seed")
        return Order(True, len(source.data_source), shuffled, source.base_seed if shuffled else 0)
    if isinstance(sampler, DistributedBatchSampler):
        return Order(True, sampler.total_size, False, 0)
    return Order(False, 0, False, 0)


def to_document(position: Position, pace: Pace, order: Order) -> dict[str, Any]:
    """What a checkpoint says about its position."""
    return {"position": asdict(position), "pace": asdict(pace), "order": asdict(order)}


def from_document(document: dict[str, Any], where: str) -> tuple[Position, Pace, Order]:
    """What :func:`to_document` made.

    Raises:
        FormatError: the document is damaged.
    """
    try:
        position, pace, order = (
            kind(**{one.name: document[key][one.name] for one in fields(kind)})
            for key, kind in (("position", Position), ("pace", Pace), ("order", Order))
        )
    except (KeyError, TypeError) as error:
        raise FormatError("The position in the data cannot be read.", where=where, evidence=[repr(error)]) from error
    return position, pace, order


@dataclass(frozen=True)
class Start:
    """Where a resumed run takes up the data.

    Args:
        position: the position it starts from; ``samples`` is 0 if the saved epoch was used up.
        batches: forward passes of the epoch that lie before it.
    """

    position: Position
    batches: int


def start_after(saved: tuple[Position, Pace, Order], pace: Pace, order: Order, batches: int | None) -> Start:
    """Where to go on.

    Args:
        saved: position, pace and order of the checkpoint.
        pace: of this run.
        order: of this run.
        batches: forward passes per rank in an epoch of this run; None if that is not known, as for a stream.

    Raises:
        OptionError: the samples that were trained cannot be told from the others under this run's settings.
    """
    position, old_pace, old_order = saved
    if position.samples == 0:
        return Start(position, 0)
    faults = list(_order_faults(old_order, order))
    if position.samples % pace.per_pass:
        faults.append(
            f"{position.samples} samples of epoch {position.epoch} were trained; {pace.ranks} data ranks with "
            f"per_device_train_batch_size {pace.micro_batch} take {pace.per_pass} at a time"
        )
    if faults:
        raise OptionError(
            "The run cannot go on with the next sample: its data comes in another order or in other portions.",
            where=f"global batch {old_pace.per_step} when saved, {pace.per_step} now",
            evidence=faults,
            next_step=_START_ANEW,
        )
    done = position.samples // pace.per_pass
    if batches is not None and batches - done < pace.accumulation:
        return Start(Position(position.epoch + 1, 0, position.consumed), 0)
    return Start(position, done)


def _order_faults(old: Order, new: Order) -> Iterator[str]:
    if old.indexed != new.indexed:
        yield "the data was a map and is a stream now" if old.indexed else "the data was a stream and is a map now"
    elif old.shuffled != new.shuffled:
        yield f"dataloader_shuffle was {str(old.shuffled).lower()} and is {str(new.shuffled).lower()}"
    elif new.shuffled and old.seed != new.seed:
        yield f"seed was {old.seed} and is {new.seed}, which shuffles the data differently"
    elif new.shuffled and old.length != new.length:
        yield f"{old.length} samples were shuffled and {new.length} are now, which gives another order"


class ResumedBatches:
    """Stands in for the data loader of a resumed run: its first epoch begins where the checkpoint ended.

    The Trainer's loop does not know that anything was skipped; what it knows of a data loader's sampler is done here.

    Args:
        loader: the data loader. start: where to begin. on_first_batch: called once, when the first batch has been taken
        from the loader and before it is trained. Shuffling
            draws from the global random generators, so they are restored here and not earlier.
    """

    def __init__(self, loader: Any, start: Start, on_first_batch: Callable[[], None]) -> None:
        self._loader = loader
        self._epoch = start.position.epoch
        self._samples = start.position.samples
        self._batches = start.batches
        self._on_first_batch: Callable[[], None] | None = on_first_batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        iterator = self._begin_epoch()
        for batch in iterator:
            if self._on_first_batch is not None:
                self._on_first_batch()
                self._on_first_batch = None
            yield batch

    def _begin_epoch(self) -> Iterator[Any]:
        epoch, samples, batches = self._epoch, self._samples, self._batches
        self._epoch, self._samples, self._batches = epoch + 1, 0, 0
        sampler = getattr(self._loader, "batch_sampler", None)
        if isinstance(sampler, _SKIPPING):
            sampler.set_epoch(epoch, samples)
            return iter(self._loader)
        iterator = iter(self._loader)
        for _ in range(batches):
            next(iterator, None)
        return iterator


class PositionTracker(TrainerCallback):  # type: ignore[misc]
    """Follows the training loop and always knows the position.

    It also corrects the two numbers of the Trainer's state that the loop derives from steps: the samples consumed, and
    the epoch of a run that was resumed in the middle of one.
    """

    def __init__(self) -> None:
        self.order = Order(False, 0, False, 0)
        self._start = Start(Position(), 0)
        self._resumed = False
        self._epochs = 0
        self._epochs_begun = 0
        self._epoch_begin = Position()
        self._step_at_epoch_begin = 0
        self.position = Position()

    def begin(self, order: Order, start: Start, resumed: bool, epochs: int) -> None:
        """Forget the last run.

        Args:
            order: of the data loader.
            start: where this run starts.
            resumed: whether it was resumed.
            epochs: how many epochs the whole run has.
        """
        self.order = order
        self._start = start
        self._resumed = resumed
        self._epochs = epochs
        self._epochs_begun = 0
        self.position = self._epoch_begin = start.position

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The loop counts only the epochs that are left."""
        state.num_train_epochs = self._epochs
        state.consumed_samples = self.position.consumed

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A resumed epoch has a part that is done; every other begins with its first sample."""
        if self._epochs_begun > 0:
            self._epoch_begin = Position(self._epoch_begin.epoch + 1, 0, self.position.consumed)
        self._epochs_begun += 1
        self._step_at_epoch_begin = state.global_step
        self.position = self._epoch_begin

    def on_step_end(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        """Count the samples of the step that was just made."""
        begin = self._epoch_begin
        trained = (state.global_step - self._step_at_epoch_begin) * pace_of(args).per_step
        self.position = Position(begin.epoch, begin.samples + trained, begin.consumed + trained)
        state.consumed_samples = self.position.consumed
        if self._resumed and self.order.length:
            state.epoch = begin.epoch + min(1.0, self.position.samples / self.order.length)


def epochs_left(start: Start, epochs: int, bounded_by_steps: bool, done: bool) -> int:
    """How many epochs the loop of a resumed run is to make.

    Args:
        start: where it starts.
        epochs: of the whole run, as the Trainer counted them.
        bounded_by_steps: whether the number of steps was given, which then ends the run.
        done: whether all steps have been made.
    """
    if done:
        return 0
    return sys.maxsize if bounded_by_steps else max(epochs - start.position.epoch, 0)
