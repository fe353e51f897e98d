"""The position of a run in its data, counted in samples, at which a resumed run continues.

PaddleFormers counts optimizer steps. Resumed with another global batch (another data-parallel degree, micro batch or
accumulation) it multiplies old steps by the new batch, and repeats or loses samples. Here the position is ``(epoch,
samples of it)``: a checkpoint contains it, and a resumed run skips those samples, however many steps they took.

Skipping by samples is correct because every sampler of PaddleFormers takes batches from the front of one order: after k
batches, the first ``k * micro batch * data ranks`` samples have been trained, on any ranks. That order must be the same
before and after. It is a permutation of a length that the number of data ranks divides, seeded with ``seed`` and the
epoch. If seed or length differ, the trained samples are unknown, and resuming is refused.

Nothing here imports Paddle; :mod:`.batches` follows a training loop and starts one in the middle of an epoch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec

from paddleformers_fc.errors import FormatError, OptionError

_START_ANEW = "Resume under settings that deal the same samples, or set ignore_data_skip: true to begin the data anew."


@dataclass(frozen=True)
class SampleOrder:
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
        waiting: forward passes of those whose batches a pipeline has taken and not trained. PaddleFormers keeps what
            an epoch leaves over of them for the next one, and from then on trains every batch later than it takes it.
        ended: whether the loop has come to the end of the epoch, so that passes beyond the last step have been made.
            ``samples`` does not count them.
    """

    epoch: int = 0
    samples: int = 0
    consumed: int = 0
    waiting: int = 0
    ended: bool = False


def pace_of(args: Any, passes: int | None = None) -> Pace:
    """The pace of a run.

    Args:
        args: PaddleFormers' training arguments.
        passes: forward passes per rank in an epoch, where that is known and PaddleFormers has yet to lower the
            accumulation to it.
    """
    accumulation = args.gradient_accumulation_steps
    if passes:
        accumulation = min(accumulation, passes)
    return Pace(args.per_device_train_batch_size, accumulation, args.dataset_world_size)


def to_document(position: Position, pace: Pace, order: SampleOrder) -> dict[str, Any]:
    """What a checkpoint says about its position."""
    usual = asdict(Position())
    optional = ("waiting", "ended")
    where = {name: value for name, value in asdict(position).items() if name not in optional or value != usual[name]}
    return {"position": where, "pace": asdict(pace), "order": asdict(order)}


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    """What :func:`to_document` makes."""

    position: Position
    pace: Pace
    order: SampleOrder


def from_document(document: dict[str, Any], where: str) -> tuple[Position, Pace, SampleOrder]:
    """What :func:`to_document` made.

    Raises:
        FormatError: the document is damaged.
    """
    try:
        read = msgspec.convert(document, type=_Document)
    except ValueError as error:
        raise FormatError("The position in the data cannot be read.", where=where, evidence=[str(error)]) from error
    numbers = [*asdict(read.position).values(), *asdict(read.pace).values(), read.order.length]
    if min(numbers) < 0:
        raise FormatError("The position in the data counts fewer than none.", where=where, evidence=[str(read)])
    if read.position.waiting * read.pace.per_pass > read.position.samples:
        raise FormatError("More samples wait than were taken.", where=where, evidence=[str(read)])
    return read.position, read.pace, read.order


@dataclass(frozen=True)
class Start:
    """Where a resumed run takes up the data.

    Args:
        position: the position it starts from; ``samples`` is 0 if the saved epoch was used up.
        passes: forward passes of the epoch that lie before it; the last ``position.waiting`` of them are to be made.
    """

    position: Position
    passes: int


def start_after(
    saved: tuple[Position, Pace, SampleOrder],
    pace: Pace,
    order: SampleOrder,
    passes: int | None,
    pipeline: bool = False,
) -> Start:
    """Where to go on.

    Passes that are left of an epoch and too few for a step are made: PaddleFormers adds their gradients to the next.

    Args:
        saved: position, pace and order of the checkpoint.
        pace: of this run.
        order: of this run.
        passes: forward passes per rank in an epoch of this run; None if that is not known, as for a stream.
        pipeline: whether batches can wait in this run as they did in the one that was saved. Where they cannot, or
            come in other portions, it resumes at the first of them.

    Raises:
        OptionError: the trained samples are unknown under this run's settings.
    """
    position, old_pace, old_order = saved
    if not pipeline or pace != old_pace:
        position = _without_waiting(position, old_pace)
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
    if passes is not None and done - position.waiting >= passes:
        return Start(Position(position.epoch + 1, 0, position.consumed), 0)
    return Start(position, done)


def _without_waiting(position: Position, pace: Pace) -> Position:
    """The position before the batches that were taken and not trained."""
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
