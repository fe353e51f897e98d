"""The exponential moving average of a run's weights, kept in host memory.

After a step a thread gets the update, and reads the weights while the next passes run. The next update of the optimizer
waits until they are read (:class:`UpdateBarrier`). Weights on a device are copied into a kept buffer first, as in an
asynchronous save. The averages are a role of the checkpoint, ``ema_state``, in float32 under the names of the
parameters, with the geometry of the optimizer's states. ``trainer/ema.json`` contains what the next update depends on.

An error in the thread is raised by the next save, on all ranks, because ranks exchange nothing in an update.

Memory: four bytes per element that the rank averages, and on a device as much again for the copies.

The tensors whose moving averages a rank keeps: master weights, and float32 parameters without one.

A rank averages the parts of parameters of which its optimizer has states: whole parameters, ranges of them under
``split_param``, or its slices under sharding stage 3. The ranks of a sharding group therefore share the work and the
memory. Parameters without states are not trained. 16-bit weights without a master weight are not averaged, because an
average of rounded weights stays constant.

Let the next optimizer update wait for reads of live tensors that run beside the passes.

Weights and states do not change between two updates of the optimizer. A thread may copy or average them while the next
passes run, and the next update waits for the rest. Copies from a device begin on the training thread, at the step end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
import paddle
from paddle.distributed import ShardedWeight

from paddleformers_fc.errors import FormatError, MismatchError, OptionError
from paddleformers_fc.execute.async_snapshot import SnapshotBuffer, SnapshotCopy
from paddleformers_fc.execute.memory import AveragedTensor, HostPieces, slot_of, update_averages, view_of
from paddleformers_fc.execute.staging_pool import in_host_memory
from paddleformers_fc.layout.live import dtype_name
from paddleformers_fc.layout.roles import (
    EMA_STATE,
    MASTER,
    MASTER_WEIGHT,
    MODEL_STATE,
    OPTIMIZER_STATE,
    StateShape,
    split_state_name,
)
from paddleformers_fc.storage.manifest import RESTORE
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.text import count_text
from paddleformers_fc.trainer import live_roles
from paddleformers_fc.trainer.library import logger
from paddleformers_fc.trainer.optimizers import ExpectedTensor, descriptor_of, innermost


@dataclass(frozen=True)
class TrainedPart:
    """This rank's part of a trained parameter.

    Args:
        weight: ``ShardedWeight`` with the part's geometry.
        local_tensor: contains the part in float32.
        first: index of the part's first element in that tensor.
        is_weight: whether that tensor is the weight itself and not its master weight.
    """

    weight: Any
    local_tensor: Any
    first: int = 0
    is_weight: bool = True

    @property
    def geometry(self) -> tuple[object, ...]:
        """Return the key that parts of the same elements share."""
        one, flat = self.weight, self.weight.flattened_range
        return (
            *(tuple(map(int, shape)) for shape in (one.local_shape, one.global_shape, one.global_offset)),
            None if flat is None else (int(flat.start), int(flat.stop)),
        )

    @property
    def size(self) -> int:
        """Number of elements."""
        flat = self.weight.flattened_range
        return int(np.prod(self.weight.local_shape)) if flat is None else int(flat.stop - flat.start)


class KnownParts:
    """This rank's parts of trained parameters, described again only if the optimizer has other states than before.

    To describe a part takes a tenth of a millisecond, to compare addresses a thousandth.

    Args:
        trainer: its model and optimizer have the parts.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._addresses: tuple[int, ...] = ()
        self._parts: dict[str, TrainedPart] = {}

    def __call__(self) -> Mapping[str, TrainedPart]:
        """Return the parts by the name of the parameter."""
        addresses = _addresses(self._trainer.optimizer)
        if not addresses or addresses != self._addresses:
            self._parts = trained_parts(self._trainer.model, self._trainer.optimizer)
            self._addresses = () if any(map(_is_slice, self._parts.values())) else addresses
        return self._parts


def _addresses(optimizer: Any) -> tuple[int, ...]:
    """Return the addresses of master weights and of the other states."""
    inner = innermost(optimizer)
    tensors = [*getattr(inner, "_master_weights", {}).values()]
    for states in inner._accumulators.values():
        tensors.extend(states.values())
    return tuple([tensor.data_ptr() for tensor in tensors])


def _is_slice(part: TrainedPart) -> bool:
    """Return whether a part is a slice of sharding stage 3 without a master weight, whose memory may be replaced."""
    own = part.weight.local_tensor is part.local_tensor
    return part.is_weight and own and part.weight.flattened_range is not None


def trained_parts(model: Any, optimizer: Any) -> dict[str, TrainedPart]:
    """Return this rank's parts of trained parameters, by the name of the parameter.

    Args:
        model: the model as it was built, not its parallel wrapper.
        optimizer: the optimizer with the Trainer's wrappers, with its states.
    """
    return _parts_of(live_roles.run_roles(model, optimizer))


def expected_roles(roles: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the role of the averages that a run with these tensors will keep, whose tensors have no memory yet."""
    place = paddle.CPUPlace()
    averages = {
        name: _averaged(name, part, ExpectedTensor(_shape_of_average(part), "float32", place))
        for name, part in _parts_of(roles).items()
    }
    return {EMA_STATE: averages} if averages else {}


def _parts_of(roles: Mapping[str, Mapping[str, Any]]) -> dict[str, TrainedPart]:
    found: dict[str, TrainedPart] = {}
    for name, master in roles.get(MASTER_WEIGHT, {}).items():
        parameter = name.removesuffix(MASTER.suffix)
        found[parameter] = TrainedPart(master, master.local_tensor, is_weight=False)
    weights = roles[MODEL_STATE]
    for name, one in roles.get(OPTIMIZER_STATE, {}).items():
        split = split_state_name(OPTIMIZER_STATE, name, one.global_shape)
        weight = weights.get(split.parameter)
        if split.parameter in found or split.shape is not StateShape.PARAMETER or weight is None:
            continue
        if dtype_name(weight.local_tensor) == "float32":
            found[split.parameter] = _part_of(weight, one)
    return found


def check_has_states(model: Any, optimizer: Any) -> None:
    """Refuse an optimizer without states and master weights, such as SGD: nothing would be averaged.

    Args:
        model: the model as it was built, not its parallel wrapper.
        optimizer: the optimizer with the Trainer's wrappers.
    Raises:
        OptionError: this rank trains parameters, and its optimizer will have states of none.
    """
    kinds = [one for one in descriptor_of(optimizer).states if one.role == OPTIMIZER_STATE]
    trains = any(not parameter.stop_gradient for parameter in model.parameters())
    stateless = not any(one.shape is StateShape.PARAMETER for one in kinds)
    if trains and stateless and not live_roles.LiveModel(model, optimizer).trained_in_half():
        raise OptionError(
            f"flex_ema_decay does not support the optimizer {type(innermost(optimizer)).__name__}.",
            where="training arguments",
            evidence=["a rank averages the parts of parameters of which its optimizer has states, and it has none"],
            next_step="Train with an optimizer that has states, such as Momentum or AdamW; or remove flex_ema_decay.",
        )


def _part_of(weight: Any, state_: Any) -> TrainedPart:
    """Return the part of a float32 parameter that a state belongs to."""
    if state_.flattened_range is None or weight.flattened_range is not None:
        return TrainedPart(weight, weight.local_tensor)
    return TrainedPart(state_, weight.local_tensor, int(state_.flattened_range.start))


def empty_average(name: str, part: TrainedPart) -> Any:
    """Return a ``ShardedWeight`` over new host memory for the average of a part; its numbers are undefined."""
    return _averaged(name, part, paddle.empty(_shape_of_average(part), dtype="float32", device=paddle.CPUPlace()))


def _shape_of_average(part: TrainedPart) -> tuple[int, ...]:
    return (part.size,) if part.weight.flattened_range is not None else tuple(part.weight.local_shape)


def _averaged(name: str, part: TrainedPart, memory: Any) -> Any:
    one = part.weight
    return ShardedWeight(
        name, memory, one.local_shape, one.global_shape, one.global_offset, one.is_flattened, one.flattened_range
    )


def begin_copies(parts: Mapping[str, Any], buffer: SnapshotBuffer) -> SnapshotCopy:
    """Begin to copy the parts that are in the memory of a device. On the training thread.

    Args:
        parts: this rank's parts.
        buffer: memory for the copies; no earlier ones may be in use.
    """
    away = {name: part for name, part in parts.items() if not in_host_memory(part.local_tensor.place)}
    ranges = {(EMA_STATE, name): ((part.first, part.first + part.size),) for name, part in away.items()}
    buffer.reserve({EMA_STATE: away}, ranges)
    return buffer.begin({EMA_STATE: away}, ranges)


def averaged_tensor(average: Any, part: TrainedPart, copied: HostPieces | None) -> AveragedTensor:
    """Return a part and its average.

    Args:
        average: the result of :func:`empty_average` for the part.
        part: the part.
        copied: its copy; None if it is in host memory.
    """
    values = view_of(part.local_tensor) if copied is None else copied
    return AveragedTensor(slot_of(average.local_tensor).open().array(), values, part.first)


class UpdateBarrier:
    """The reads that have begun since the last update.

    Args:
        passes_change_weights: returns whether a run changes tensors that are read already in the passes, as the
            overlapped broadcast of parameters does. Then every read is waited for at once.

    Attributes:
        waited: seconds for which the training thread has waited.
    """

    def __init__(self, passes_change_weights: Callable[[], bool]) -> None:
        self.waited = 0.0
        self._passes_change_weights = passes_change_weights
        self._reads: list[Future[Any]] = []

    def add(self, read: Future[Any]) -> None:
        """Have the next update wait for a read of live tensors.

        Args:
            read: ends when live tensors are not read any more; its error is the business of others.
        """
        self._reads.append(read)
        if self._passes_change_weights():
            self.finish()

    def finish(self) -> None:
        """Wait until no read is under way."""
        started = time.monotonic()
        wait(self._reads)
        self._reads.clear()
        self.waited += time.monotonic() - started


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


class MovingAverage:
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
        parts: Callable[[], Mapping[str, TrainedPart]],
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
        self.check_not_in_model()
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
        return {name: empty_average(name, part) for name, part in parts.items() if name in names}

    def restore(self, tensors: Mapping[str, Any], saved: AverageDocument) -> None:
        """Continue the average of a checkpoint.

        Args:
            tensors: the result of :meth:`allocate`, filled.
            saved: the document of the checkpoint.
        """
        self.tensors, self.step = dict(tensors), saved.step

    def check_not_in_model(self) -> None:
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

    def on_step_end(self, state: Any) -> None:
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
            copying = begin_copies(parts, self._buffer)
        except Exception as error:  # Raised by the next save, on all ranks.
            self._failed(step, error)
            return
        self.step = step
        read: Future[None] = Future()
        self._pending = self._threads.submit(self._update, parts, fresh, copying, read, step)
        self._update_barrier.add(read)

    def _make_absent(self, parts: Mapping[str, TrainedPart]) -> frozenset[str]:
        """Make memory for averages that do not exist yet, and return their names."""
        fresh = frozenset(parts.keys() - self.tensors.keys())
        for name, part in parts.items():
            if name in fresh:
                self.tensors[name] = empty_average(name, part)
            else:
                _check_not_moved(name, self.tensors[name], part)
        return fresh

    def _update(
        self,
        parts: Mapping[str, TrainedPart],
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
                name: averaged_tensor(self.tensors[name], part, copied.get(name)) for name, part in parts.items()
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


def _check_not_moved(name: str, average: Any, part: TrainedPart) -> None:
    """Refuse a part that is no longer the one whose average is kept.

    Raises:
        MismatchError: the optimizer of this rank has other states than before.
    """
    if TrainedPart(average, None).geometry != part.geometry:
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
