"""List the ranges of live tensors that a save reads: to write them, or to hash replicas and tied copies.

A snapshot copies exactly these, so its memory is this rank's share of the checkpoint and not its state. Overlapping
ranges are joined. Time and memory are linear in the tensors of this rank, apart from a sort per tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from paddleformers_fc.execute.replica_assignment import Replica
from paddleformers_fc.execute.replicas import hashed_range
from paddleformers_fc.execute.save_plan import SavePlan
from paddleformers_fc.execute.ties import CopyPart

TensorKey: TypeAlias = tuple[str, str]
"""Role and name of a live tensor."""

ElementRange: TypeAlias = tuple[int, int]
"""The index of the first element, in row-major order, and that behind the last."""

ElementRanges: TypeAlias = Mapping[TensorKey, tuple[ElementRange, ...]]
"""Disjoint ranges of live tensors, in ascending order."""


def ranges_of(plan: SavePlan, rank: int, step: int, replicas: str) -> ElementRanges:
    """Return what one rank reads in a save.

    Args:
        plan: that of the rank.
        rank: the rank.
        step: determines the part of a large replica that is hashed.
        replicas: as for :func:`.save_checkpoint`; ``off`` hashes none.
    """
    found: dict[TensorKey, list[ElementRange]] = {}
    for file in plan.files:
        for piece in file.pieces:
            found.setdefault((file.role, piece.name), []).append((piece.start, piece.stop))
    hashed: tuple[Replica, ...] = plan.replicas if replicas != "off" else ()
    for one in hashed:
        found.setdefault((one.role, one.name), []).append(hashed_range(one, step))
    for part in plan.ties.parts:
        for side in part.sides:
            if side.rank == rank:
                found.setdefault((side.role, side.name), []).append(_rows(side))
    return {key: tuple(_joined(some)) for key, some in found.items()}


def _rows(side: CopyPart) -> ElementRange:
    """Return the rows that contain a box."""
    if not side.shape:
        return side.start, side.start + 1
    row = math.prod(side.shape[1:])
    return side.start + side.part.lo[0] * row, side.start + side.part.hi[0] * row


def _joined(some: list[ElementRange]) -> Iterator[ElementRange]:
    begin, end = min(some)
    for start, stop in sorted(some):
        if start > end:
            yield begin, end
            begin, end = start, stop
        end = max(end, stop)
    yield begin, end
