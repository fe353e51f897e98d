"""The number of tensor-parallel shards of a tensor that a statement names, directly or through intermediate names.

``fused_ffn`` and ``fused_qkv_old`` interleave their parts in one group per shard. A value that is read has the shards
of its left tensor. A name that is written has those of the right tensor that later statements make of it.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

from paddleformers_fc.aoa.expand import Budget, Step
from paddleformers_fc.aoa.faults import Fault
from paddleformers_fc.aoa.operations import Move
from paddleformers_fc.aoa.values import Value
from paddleformers_fc.mapping.boxes import Shape


def groups_read(value: Value, axis: int, cuts: Mapping[str, Shape]) -> int:
    """Return the number of shards of the left tensor that a value comes from, along an axis of the value.

    Raises:
        Fault: the value comes from several tensors, or the tensor is cut on another axis.
    """
    origins = {(piece.source, piece.axes) for piece in value.pieces}
    if len(origins) != 1:
        names = sorted({piece.source for piece in value.pieces})
        raise Fault(
            f"The source consists of {', '.join(names[:3])}: the shards are ambiguous.",
            "a name that comes from one tensor",
        )
    ((source, axes),) = origins
    return _groups(source, cuts[source], axes[axis]) if axis < len(axes) else 1


def _groups(name: str, cuts: Shape, axis: int) -> int:
    """Return the shards along an axis, where no other axis is cut."""
    others = [other for other, count in enumerate(cuts) if count > 1 and other != axis]
    if others:
        raise Fault(
            f"The parts of {name} are on axis {axis}, and tensor parallelism cuts {name} on axis {others[0]}.",
            "statements that join and split by `axis=`, which do not depend on shards",
        )
    return cuts[axis] if axis < len(cuts) else 1


class Readers:
    """Finds the later step that reads a name.

    Args:
        steps: all steps, in order.
        cuts: the number of shards of every right tensor on each axis.
        budget: limit of all steps that are followed. A long chain of fused layouts would take quadratic time.
    """

    def __init__(self, steps: Sequence[Step], cuts: Mapping[str, Shape], budget: Budget) -> None:
        self._steps = steps
        self._cuts = cuts
        self._budget = budget
        self._readers: dict[str, list[int]] | None = None

    def groups_written(self, name: str, axis: int, rank: int, after: int) -> int:
        """Return the number of shards of the right tensor that a name becomes, along an axis of the name.

        Args:
            name: the name that a step writes.
            axis: an axis of it.
            rank: its number of axes.
            after: index of the step that writes it.
        Raises:
            Fault: the name is split, or becomes a tensor that is cut on another axis.
        """
        while name not in self._cuts:
            self._budget.spend(1)
            index = self._next(name, after)
            if index is None:
                return 1
            step = self._steps[index]
            if len(step.right) > 1:
                raise Fault(f"{name} is split later: the shards are ambiguous.", "a name that is not split")
            transposed = any(left.text == name and left.transposed for left in step.left)
            axis = rank - 1 - axis if transposed else axis
            if isinstance(step.operation, Move) and step.operation.permute is not None:
                order = step.operation.permute or tuple(reversed(range(rank)))
                axis = order.index(axis) if axis in order else axis
            name, after = step.right[0], index
        return _groups(name, self._cuts[name], axis)

    def _next(self, name: str, after: int) -> int | None:
        if self._readers is None:
            self._readers = {}
            for index, step in enumerate(self._steps):
                for left in step.left:
                    self._readers.setdefault(left.text, []).append(index)
        indices = self._readers.get(name, [])
        following = bisect.bisect_right(indices, after)
        return indices[following] if following < len(indices) else None
