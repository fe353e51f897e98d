"""The exponential moving average of a run's weights, in float32 in host memory.

A rank averages what its optimizer has states of: parameters, ranges of them under ``split_param``, or slices under
sharding stage 3. A sharding group thus shares work and memory. The source is the master weight or a float32 parameter:
an average of 16-bit weights would stay constant. In a checkpoint the role is ``ema_state``.

After a step a thread updates the averages during the next passes, because weights only change in optimizer updates.
The next optimizer update waits until the weights are read (:class:`.UpdateBarrier`). Device weights are first copied
into a host buffer. Ranks do not communicate in an update, so the next save raises its errors on all ranks.

Memory: four bytes per averaged element, and the same again for weights on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
import paddle
from paddle.distributed import ShardedWeight

from paddleformers_fc.errors import MismatchError, OptionError
from paddleformers_fc.execute.async_snapshot import SnapshotBuffer, SnapshotCopy
from paddleformers_fc.execute.memory import AveragedTensor, HostPieces, slot_of, update_averages, view_of
from paddleformers_fc.execute.staging_pool import in_host_memory
from paddleformers_fc.layout.live import dtype_name
from paddleformers_fc.layout.roles import EMA_STATE, MASTER, MODEL_STATE, OPTIMIZER_STATE, StateShape, split_state_name
from paddleformers_fc.trainer import live_roles
from paddleformers_fc.trainer.library import logger
from paddleformers_fc.trainer.optimizers import ExpectedTensor, descriptor_of, innermost


@dataclass(frozen=True)
class TrainedPart:
    """The part of a trained parameter that this rank averages.

    Args:
        weight: ``ShardedWeight`` with the part's geometry.
        local_tensor: the float32 tensor that contains the part.
        first: index of the part's first element in ``local_tensor``.
        is_weight: whether ``local_tensor`` is the weight itself and not its master weight.
    """

    weight: Any
    local_tensor: Any
    first: int = 0
    is_weight: bool = True

    @property
    def geometry(self) -> tuple[object, ...]:
        """Return a key that is equal for parts with the same elements."""
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
    """Caches the description of this rank's parts until the memory of the optimizer states changes.

    Describing a part takes 0.1 ms, comparing addresses 0.001 ms.

    Args:
        trainer: the Trainer with the model and the optimizer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._addresses: tuple[int, ...] = ()
        self._parts: dict[str, TrainedPart] = {}

    def __call__(self) -> Mapping[str, TrainedPart]:
        """Return the parts by the name of the parameter."""
        addresses = _addresses(self._trainer.optimizer)
        if not addresses or addresses != self._addresses:
            self._parts = _parts_of(live_roles.LiveModel(self._trainer.model, self._trainer.optimizer).roles())
            self._addresses = () if any(map(_is_slice, self._parts.values())) else addresses
        return self._parts


def _addresses(optimizer: Any) -> tuple[int, ...]:
    inner = innermost(optimizer)
    tensors = [*getattr(inner, "_master_weights", {}).values()]
    for states in inner._accumulators.values():
        tensors.extend(states.values())
    return tuple([tensor.data_ptr() for tensor in tensors])


def _is_slice(part: TrainedPart) -> bool:
    """Return whether a part is a sharding stage 3 slice without a master weight, whose memory may be replaced."""
    own = part.weight.local_tensor is part.local_tensor
    return part.is_weight and own and part.weight.flattened_range is not None


def expected_roles(roles: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the role of the averages that a run with these tensors will keep, as tensors without memory."""
    place = paddle.CPUPlace()
    averages = {
        name: _averaged(name, part, ExpectedTensor(_shape_of_average(part), "float32", place))
        for name, part in _parts_of(roles).items()
    }
    return {EMA_STATE: averages} if averages else {}


def _parts_of(roles: Mapping[str, Mapping[str, Any]]) -> dict[str, TrainedPart]:
    found: dict[str, TrainedPart] = {}
    for name, master in roles.get(MASTER.role, {}).items():
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
    """Check that the optimizer has states or master weights: without them, as in SGD, nothing would be averaged.

    Args:
        model: the model as it was built, not its parallel wrapper.
        optimizer: the optimizer with the Trainer's wrappers.
    Raises:
        OptionError: this rank trains parameters, and its optimizer will have no states.
    """
    kinds = [one for one in descriptor_of(optimizer).states if one.role == OPTIMIZER_STATE]
    trains = any(not parameter.stop_gradient for parameter in model.parameters())
    stateless = not any(one.shape is StateShape.PARAMETER for one in kinds)
    if trains and stateless and not live_roles.LiveModel(model, optimizer).trained_in_half():
        raise OptionError(
            f"flex_ema_decay does not support the optimizer {type(innermost(optimizer)).__name__}.",
            where="training arguments",
            evidence=["only parameters with optimizer states are averaged, and this optimizer has no states"],
            next_step="Train with an optimizer that has states, such as Momentum or AdamW, or remove flex_ema_decay.",
        )


def _part_of(weight: Any, state_: Any) -> TrainedPart:
    """Return the part of a float32 parameter that has a state."""
    if state_.flattened_range is None or weight.flattened_range is not None:
        return TrainedPart(weight, weight.local_tensor)
    return TrainedPart(state_, weight.local_tensor, int(state_.flattened_range.start))


def empty_average(name: str, part: TrainedPart) -> Any:
    """Return a ``ShardedWeight`` over uninitialized host memory for the average of a part."""
    return _averaged(name, part, paddle.empty(_shape_of_average(part), dtype="float32", device=paddle.CPUPlace()))


def _shape_of_average(part: TrainedPart) -> tuple[int, ...]:
    return (part.size,) if part.weight.flattened_range is not None else tuple(part.weight.local_shape)


def _averaged(name: str, part: TrainedPart, memory: Any) -> Any:
    one = part.weight
    return ShardedWeight(
        name, memory, one.local_shape, one.global_shape, one.global_offset, one.is_flattened, one.flattened_range
    )


def begin_copies(parts: Mapping[str, Any], buffer: SnapshotBuffer) -> SnapshotCopy:
    """Begin to copy parts in device memory to the host. Call on the training thread.

    Args:
        parts: this rank's parts.
        buffer: memory for the copies; earlier copies must not be in use.
    """
    on_device = {name: part for name, part in parts.items() if not in_host_memory(part.local_tensor.place)}
    ranges = {(EMA_STATE, name): ((part.first, part.first + part.size),) for name, part in on_device.items()}
    buffer.reserve({EMA_STATE: on_device}, ranges)
    return buffer.begin({EMA_STATE: on_device}, ranges)


def averaged_tensor(average: Any, part: TrainedPart, copied: HostPieces | None) -> AveragedTensor:
    """Return a part with its average.

    Args:
        average: the result of :func:`empty_average` for the part.
        part: the part.
        copied: the host copy of the part; None if the part is in host memory.
    """
    values = view_of(part.local_tensor) if copied is None else copied
    return AveragedTensor(slot_of(average.local_tensor).open().array(), values, part.first)


_COUNT = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class AverageDocument(msgspec.Struct, forbid_unknown_fields=True):
    """``trainer/ema.json``. Fields that PaddleFormers' own formats do not contain are None.

    Args:
        step: the optimizer step of the last update.
        decay: the decay of the saved run, for readers.
        interval: steps between two updates in the saved run, for readers.
    """

    step: _COUNT | None
    decay: float | None
    interval: _COUNT | None


class MovingAverage:
    """The average of one Trainer's weights on this rank.

    Args:
        decay: weight of the previous average, between 0 and 1.
        interval: optimizer steps between two updates.
        parts: returns this rank's parts of the trained parameters.
        update_barrier: lets the next optimizer update wait for reads.

    Attributes:
        tensors: ``ShardedWeight`` over host memory, by the name of the parameter; empty before the first update.
        step: the optimizer step of the last update; 0 before the first update, None if unknown.
        in_model: whether the averages replace the weights in the model.
    """

    def __init__(
        self,
        decay: float,
        interval: int,
        parts: Callable[[], Mapping[str, TrainedPart]],
        update_barrier: live_roles.UpdateBarrier,
    ) -> None:
        self._decay, self._interval = decay, interval
        self._parts, self._update_barrier = parts, update_barrier
        self._buffer = SnapshotBuffer()
        self._threads = ThreadPoolExecutor(1, "flex-ema")
        self._pending: Future[None] | None = None
        self._failure: Exception | None = None
        self.in_model = False
        self.reset()

    def reset(self) -> None:
        """Discard the average, before a training that may load another one."""
        if self._pending is not None:
            self._pending.exception()
        self._pending = self._failure = None
        self.tensors: dict[str, Any] = {}
        self.step: int | None = 0

    @property
    def has_begun(self) -> bool:
        """Return whether the average was updated at least once."""
        return self.step != 0

    def wait_for_update(self) -> None:
        """Wait until the last update is done.

        Raises:
            Exception: the error of the first failed update.
        """
        if self._pending is not None:
            self._pending.result()
            self._pending = None
        if self._failure is not None:
            raise self._failure

    def roles(self) -> dict[str, dict[str, Any]]:
        """Wait for the last update, and return the averages as a role; empty if this rank has no averages.

        Raises:
            OptionError: the averages are in the model.
        """
        self.check_not_in_model()
        self.wait_for_update()
        return {EMA_STATE: dict(self.tensors)} if self.tensors else {}

    def document(self) -> dict[str, Any]:
        """Return the content of ``trainer/ema.json``."""
        return dict(msgspec.to_builtins(AverageDocument(self.step, self._decay, self._interval)))

    def allocate(self, names: Collection[str]) -> dict[str, Any]:
        """Return uninitialized averages for a load to fill.

        Args:
            names: names of parameters; names that this rank does not average are ignored.
        """
        parts = self._parts()
        return {name: empty_average(name, part) for name, part in parts.items() if name in names}

    def restore(self, tensors: Mapping[str, Any], saved: AverageDocument) -> None:
        """Continue the average of a checkpoint.

        Args:
            tensors: the filled result of :meth:`allocate`.
            saved: the ``trainer/ema.json`` of the checkpoint.
        """
        self.tensors, self.step = dict(tensors), saved.step

    def check_not_in_model(self) -> None:
        """Check that the averages are not in the model, before it is trained or saved.

        Raises:
            OptionError: the averages are in the model.
        """
        if self.in_model:
            raise OptionError(
                "The model contains its averaged weights, which are neither trained nor saved as weights.",
                where="averaged_weights",
                next_step="Train and save outside averaged_weights(). save_ema exports the averaged weights.",
            )

    def on_step_end(self, state: Any) -> None:
        """Begin an update if one is due; the first step copies the weights. Saves of the same step come later."""
        if state.global_step == 1 or state.global_step % self._interval == 0:
            self._begin(state.global_step)

    def _begin(self, step: int) -> None:
        if self._pending is not None:
            self._pending.result()  # It may still use the buffer.
        if self._failure is not None:
            return
        try:
            parts = self._parts()
            new = self._allocate_missing(parts)
            copying = begin_copies(parts, self._buffer)
        except Exception as error:  # The next save raises it on all ranks.
            self._record_failure(step, error)
            return
        self.step = step
        read: Future[None] = Future()
        self._pending = self._threads.submit(self._update, parts, new, copying, read, step)
        self._update_barrier.add(read)

    def _allocate_missing(self, parts: Mapping[str, TrainedPart]) -> frozenset[str]:
        """Allocate the averages that do not exist yet, and return their names."""
        new = frozenset(parts.keys() - self.tensors.keys())
        for name, part in parts.items():
            if name in new:
                self.tensors[name] = empty_average(name, part)
            else:
                _check_same_geometry(name, self.tensors[name], part)
        return new

    def _update(
        self,
        parts: Mapping[str, TrainedPart],
        new: frozenset[str],
        copying: SnapshotCopy,
        read: Future[None],
        step: int,
    ) -> None:
        """Update the averages, on the thread, and set ``read`` as soon as the weights may change."""
        try:
            copied = copying.finish().get(EMA_STATE, {})
            if len(copied) == len(parts):
                read.set_result(None)
            tensors = {
                name: averaged_tensor(self.tensors[name], part, copied.get(name)) for name, part in parts.items()
            }
            update_averages([one for name, one in tensors.items() if name in new], 1.0)
            update_averages([one for name, one in tensors.items() if name not in new], 1.0 - self._decay)
        except Exception as error:  # The next save raises it on all ranks.
            self._record_failure(step, error)
        finally:
            if not read.done():
                read.set_result(None)

    def _record_failure(self, step: int, error: Exception) -> None:
        logger.error(
            f"The moving average failed at step {step} on this rank; the next save raises this on all ranks: {error}"
        )
        self._failure = error


def _check_same_geometry(name: str, average: Any, part: TrainedPart) -> None:
    """Check that a part has the same elements as its average.

    Raises:
        MismatchError: the optimizer states of this rank have changed.
    """
    if TrainedPart(average, None).geometry != part.geometry:
        raise MismatchError(
            "The part of a parameter with optimizer states has changed since the last update of the moving average.",
            where=name,
            next_step="Train one model with one optimizer. Start the job again to continue from its last checkpoint.",
        )
