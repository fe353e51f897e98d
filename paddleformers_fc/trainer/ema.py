"""The exponential moving average of a run's weights, kept in host memory beside training.

After a step a thread gets the update, and reads the weights while the next passes run. The next update of the optimizer
waits until they are read (:mod:`.update_barrier`). Weights on a device are copied into a kept buffer first, as in a
save beside training. The averages are a role of the checkpoint, ``ema_state``, in float32 under the names of the
parameters, with the geometry of the optimizer's states. ``trainer/ema.json`` contains what the next update depends on.

An error in the thread is raised by the next save, on all ranks, because ranks exchange nothing in an update.

Memory: four bytes per element that the rank averages, and on a device as much again for the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from paddleformers_fc.errors import FormatError, MismatchError, OptionError
from paddleformers_fc.execute.async_snapshot import SnapshotBuffer, SnapshotCopy
from paddleformers_fc.execute.ema_update import update_averages
from paddleformers_fc.layout.roles import EMA_STATE
from paddleformers_fc.storage.manifest import RESTORE
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.text import count_text
from paddleformers_fc.trainer import ema_tensors
from paddleformers_fc.trainer.library import TrainerCallback, logger
from paddleformers_fc.trainer.update_barrier import UpdateBarrier

_COUNT = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


@dataclass(frozen=True)
class EmaSettings:
    """The settings of an average.

    Args:
        decay: weight of the former average, between 0 and 1.
        interval: optimizer steps between two updates.
    """

    decay: float
    interval: int = 1

    def is_due(self, step: int) -> bool:
        """Return whether the average is updated after a step; it starts as a copy of the weights after the first."""
        return step == 1 or step % self.interval == 0


class AverageDocument(msgspec.Struct, forbid_unknown_fields=True):
    """``trainer/ema.json``. Checkpoints of PaddleFormers' own formats do not contain all of it.

    Args:
        step: the optimizer step of the last update; None if it is unknown, as for the next two.
        decay: that of the saved run; for a reader, as the next one.
        interval: steps between two updates.
    """

    step: _COUNT | None
    decay: float | None
    interval: _COUNT | None


def settings_of(args: Any) -> EmaSettings | None:
    """Return the settings of training arguments; None without an average."""
    if not args.flex_ema_decay:
        return None
    return EmaSettings(float(args.flex_ema_decay), args.flex_ema_interval)


class MovingAverage(TrainerCallback):
    """The average of one Trainer's weights on this rank.

    Args:
        settings: when and how it is updated.
        parts: returns this rank's parts of the trained parameters.
        update_barrier: has the next update of the optimizer wait.

    Attributes:
        tensors: ``ShardedWeight`` over host memory, by the name of the parameter; empty before the first update.
        step: the optimizer step of the last update; 0 before the first, None if it is unknown.
        in_model: whether the averages are in the model in place of its weights.
    """

    def __init__(
        self,
        settings: EmaSettings,
        parts: Callable[[], Mapping[str, ema_tensors.TrainedPart]],
        update_barrier: UpdateBarrier,
    ) -> None:
        self.settings = settings
        self._parts, self._update_barrier = parts, update_barrier
        self._buffer = SnapshotBuffer()
        self._threads = ThreadPoolExecutor(1, "flex-ema")
        self._pending: Future[None] | None = None
        self._failure: Exception | None = None
        self.in_model = False
        self.reset()

    def reset(self) -> None:
        """Forget the average, before a training that may load another one."""
        if self._pending is not None:
            self._pending.exception()
        self._pending = self._failure = None
        self.tensors: dict[str, Any] = {}
        self.step: int | None = 0

    @property
    def has_begun(self) -> bool:
        """Return whether there was an update."""
        return self.step != 0

    def wait_for_update(self) -> None:
        """Wait until the average is that of the last step.

        Raises:
            Exception: that of the first update that failed.
        """
        if self._pending is not None:
            self._pending.result()
            self._pending = None
        if self._failure is not None:
            raise self._failure

    def roles(self) -> dict[str, dict[str, Any]]:
        """Return the averages in their role; no role if this rank has none. Waits as :meth:`wait_for_update`.

        Raises:
            OptionError: they are in the model.
        """
        self.refuse_in_model()
        self.wait_for_update()
        return {EMA_STATE: dict(self.tensors)} if self.tensors else {}

    def document(self) -> dict[str, Any]:
        """Return the content of ``trainer/ema.json``."""
        return dict(msgspec.to_builtins(AverageDocument(self.step, self.settings.decay, self.settings.interval)))

    def allocate(self, names: Collection[str]) -> dict[str, Any]:
        """Return new host memory for the averages of some parameters, which a load fills; those of this rank alone.

        Args:
            names: names of parameters.
        """
        parts = self._parts()
        return {name: ema_tensors.empty_average(name, part) for name, part in parts.items() if name in names}

    def restore(self, tensors: Mapping[str, Any], saved: AverageDocument) -> None:
        """Continue the average of a checkpoint.

        Args:
            tensors: the result of :meth:`allocate`, filled.
            saved: the document of the checkpoint.
        """
        self.tensors, self.step = dict(tensors), saved.step

    def refuse_in_model(self) -> None:
        """Refuse to train or save while the averages are in the model.

        Raises:
            OptionError: they are.
        """
        if self.in_model:
            raise OptionError(
                "The model has its averaged weights, which are neither trained nor saved as weights.",
                where="averaged_weights",
                next_step="Train and save outside of the block; save_ema exports the averaged weights.",
            )

    def on_optimizer_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Refuse to train averaged weights."""
        self.refuse_in_model()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin an update if one is due. A save of the same step comes later."""
        if self.settings.is_due(state.global_step):
            self._begin(state.global_step)

    def _begin(self, step: int) -> None:
        if self._pending is not None:
            self._pending.result()  # It may average what it has copied from a device.
        if self._failure is not None:
            return
        try:
            parts = self._parts()
            fresh = self._make_absent(parts)
            copying = ema_tensors.begin_copies(parts, self._buffer)
        except Exception as error:  # Raised by the next save, on all ranks.
            self._failed(step, error)
            return
        self.step = step
        read: Future[None] = Future()
        self._pending = self._threads.submit(self._update, parts, fresh, copying, read, step)
        self._update_barrier.add(read)

    def _make_absent(self, parts: Mapping[str, ema_tensors.TrainedPart]) -> frozenset[str]:
        """Make memory for averages that do not exist yet, and return their names."""
        fresh = frozenset(parts.keys() - self.tensors.keys())
        for name, part in parts.items():
            if name in fresh:
                self.tensors[name] = ema_tensors.empty_average(name, part)
            else:
                _refuse_moved(name, self.tensors[name], part)
        return fresh

    def _update(
        self,
        parts: Mapping[str, ema_tensors.TrainedPart],
        fresh: frozenset[str],
        copying: SnapshotCopy,
        read: Future[None],
        step: int,
    ) -> None:
        """Update the averages, on the thread. ``read`` ends when the weights may change."""
        try:
            copied = copying.finish().get(EMA_STATE, {})
            if len(copied) == len(parts):
                read.set_result(None)
            tensors = {
                name: ema_tensors.averaged_tensor(self.tensors[name], part, copied.get(name))
                for name, part in parts.items()
            }
            update_averages([one for name, one in tensors.items() if name in fresh], 1.0)
            update_averages([one for name, one in tensors.items() if name not in fresh], 1.0 - self.settings.decay)
        except Exception as error:  # As above.
            self._failed(step, error)
        finally:
            if not read.done():
                read.set_result(None)

    def _failed(self, step: int, error: Exception) -> None:
        logger.error(
            f"The moving average of step {step} failed on this rank; the next save raises it on all ranks: {error}"
        )
        self._failure = error


def _refuse_moved(name: str, average: Any, part: ema_tensors.TrainedPart) -> None:
    """Refuse a part that is no longer the one whose average is kept.

    Raises:
        MismatchError: the optimizer of this rank has other states than before.
    """
    if ema_tensors.TrainedPart(average, None).geometry != part.geometry:
        raise MismatchError(
            "The optimizer has states of another part of a parameter than at the last update of the moving average.",
            where=name,
            next_step="Train one model with one optimizer; start the job again to continue from its last checkpoint.",
        )


def from_document(values: Mapping[str, Any], where: AnyPath) -> AverageDocument:
    """Read the content of ``trainer/ema.json``.

    Raises:
        FormatError: the document is damaged.
    """
    try:
        return msgspec.convert(values, type=AverageDocument)
    except ValueError as error:
        what = "Invalid description of the moving average."
        raise FormatError(what, where=str(where), evidence=[str(error)], next_step=RESTORE) from error


def absent_text(directory: AnyPath) -> str:
    """Return the warning of a run with an average that resumes a checkpoint without one."""
    return (
        f"{directory} has no moving average. It starts as a copy of the weights at its next update, so that it does "
        "not contain the steps before."
    )


def new_run_text(directory: AnyPath) -> str:
    """Return the warning of a new run with an average that begins with the weights of a checkpoint with another one."""
    return (
        f"The moving average of {directory} is not continued, because ignore_load_lr_and_optim starts a new run. That "
        "of this run starts as a copy of the weights."
    )


def switched_off_text(directory: AnyPath, tensors: int) -> str:
    """Return the warning of a run without an average that resumes a checkpoint with one."""
    return (
        f"{directory} has a moving average of {count_text(tensors, 'tensor')}, and this run has none: the average is "
        "not continued, and later checkpoints do not contain it. Set flex_ema_decay to continue it."
    )
