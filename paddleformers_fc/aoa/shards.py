"""The tensor-parallel shards of the tensors that statements name, directly or through intermediate names.

``fused_ffn`` and ``fused_qkv_old`` interleave their parts in one group per shard. A value that is read has the shards
of its left tensor. A name that is written has the shards of the right tensor that later statements build from it.
"""

from __future__ import annotations

from collections.abc import Sequence

from paddleformers_fc.aoa.expand import Name, Step
from paddleformers_fc.aoa.faults import Fault
from paddleformers_fc.aoa.operations import Move
from paddleformers_fc.aoa.rules import Tensors, Value
from paddleformers_fc.mapping.boxes import Shape

Shards = tuple[str, Shape] | str
"""A tensor and its shards on each axis; or why they are ambiguous, or an empty text where no tensor is known."""


def shards_written(steps: Sequence[Step], right: Tensors) -> list[Shards]:
    """Return the shards of the right tensor that the first result of every step becomes."""
    later: dict[str, Shards] = {}
    found: list[Shards] = []
    for step in reversed(steps):
        name = step.right[0]
        shards: Shards = (name, right[name].cuts) if name in right else later.get(name, "")
        found.append(shards)
        for left in step.left:
            later[left.text] = _shards_before(step, left, shards)
    return found[::-1]


def _shards_before(step: Step, left: Name, shards: Shards) -> Shards:
    """Return the shards of a name that a step reads, from those of its result."""
    move = step.operation if isinstance(step.operation, Move) else Move()
    if len(step.right) > 1 or move.reshape:
        return f"{left.text} is {'reshaped' if move.reshape else 'split'} later"
    if isinstance(shards, str):
        return shards
    name, cuts = shards
    if move.permute and len(move.permute) == len(cuts):
        cuts = tuple(cuts[move.permute.index(axis)] for axis in range(len(cuts)))
    return name, cuts[::-1] if left.transposed != (move.permute == ()) else cuts


def groups_of(shards: Shards, axis: int) -> int:
    """Return the shards along an axis, where no other axis is cut.

    Raises:
        Fault: another axis is cut, or the shards are ambiguous.
    """
    if isinstance(shards, str):
        if shards:
            raise Fault(f"{shards}: the shards are ambiguous.", "a name that is not split")
        return 1
    name, cuts = shards
    others = [other for other, count in enumerate(cuts) if count > 1 and other != axis]
    if others:
        raise Fault(
            f"The parts of {name} are on axis {axis}, and tensor parallelism cuts {name} on axis {others[0]}.",
            "statements that join and split by `axis=`, which do not depend on shards",
        )
    return cuts[axis] if 0 <= axis < len(cuts) else 1


def groups_read(value: Value, axis: int, left: Tensors) -> int:
    """Return the number of shards of the left tensor that a value comes from, along an axis of the value.

    Raises:
        Fault: the value comes from several tensors, or the tensor is cut on another axis.
    """
    origins = {(value.sources.names[link.source], link.axes) for link in value.links}
    if len(origins) != 1:
        raise Fault(
            f"The source consists of {', '.join(sorted(set(value.sources.names))[:3])}: the shards are ambiguous.",
            "a name that comes from one tensor",
        )
    ((source, axes),) = origins
    return groups_of((source, left[source].cuts), axes[axis]) if axis < len(axes) else 1
