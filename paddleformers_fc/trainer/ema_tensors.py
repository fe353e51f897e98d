"""The tensors whose moving averages a rank keeps: master weights, and float32 parameters without one.

A rank averages the parts of parameters of which its optimizer has states: whole parameters, ranges of them under
``split_param``, or its slices under sharding stage 3. The ranks of a sharding group therefore share the work and the
memory. Parameters without states are not trained. 16-bit weights without a master weight are not averaged, because an
average of rounded weights stays constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle.distributed import ShardedWeight

from paddleformers_fc.errors import OptionError
from paddleformers_fc.execute.async_snapshot import SnapshotBuffer, SnapshotCopy
from paddleformers_fc.execute.device import in_host_memory
from paddleformers_fc.execute.ema_update import AveragedTensor
from paddleformers_fc.execute.memory import HostPieces, dtype_name, slot_of, view_of
from paddleformers_fc.layout.roles import (
    EMA_STATE,
    MASTER,
    MASTER_WEIGHT,
    MODEL_STATE,
    OPTIMIZER_STATE,
    StateShape,
    split_state_name,
)
from paddleformers_fc.trainer import live_roles
from paddleformers_fc.trainer.optimizers import descriptor_of, innermost


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
    roles = live_roles.run_roles(model, optimizer)
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


def refuse_stateless(model: Any, optimizer: Any) -> None:
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
    if trains and stateless and not live_roles.trained_in_half(model, optimizer):
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
    one = part.weight
    shape = [part.size] if one.flattened_range is not None else list(one.local_shape)
    memory = paddle.empty(shape, dtype="float32", device=paddle.CPUPlace())
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
