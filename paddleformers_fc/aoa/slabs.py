"""Blocks with a tensor that is a stack: cut along one axis into slabs, each of which is a block of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from paddleformers_fc.aoa.blocks import Block, BlockPiece, Inexpressible, SourceView
from paddleformers_fc.mapping.boxes import Box, Shape


@dataclass(frozen=True)
class Slabs:
    """A stack and its slabs.

    Args:
        stack: the name of the tensor that holds the slabs.
        axis: the axis along which they lie.
        facing: how the stack is seen where it is the source; None where it is the target.
        blocks: the slabs, in order; in each the stack is replaced by ``<stack>_<index>``.
    """

    stack: str
    axis: int
    facing: SourceView | None
    blocks: tuple[Block, ...]


def slabs_of(block: Block) -> Slabs | None:
    """The stack of a block, or None where it has none.

    Raises:
        Inexpressible: where a stacked source has slabs of several lengths.
    """
    for side in (len(block.targets) == 1, False):
        if side or len(block.sources) == 1:
            rank = len(next(iter(block.targets.values())))
            for axis in range(rank):
                groups = _groups(block.pieces, axis, of_target=side)
                if len(groups) > 1 and _apart(groups, of_target=side):
                    return _target_slabs(block, axis, groups) if side else _source_slabs(block, axis, groups)
    return None


def _box(piece: BlockPiece, of_target: bool) -> Box:
    return piece.target_box if of_target else piece.source_box


def _groups(pieces: Iterable[BlockPiece], axis: int, *, of_target: bool) -> list[list[BlockPiece]]:
    """Pieces whose boxes overlap along the axis, together."""
    groups: list[list[BlockPiece]] = []
    end = 0
    for piece in sorted(pieces, key=lambda piece: _box(piece, of_target).lo[axis]):
        box = _box(piece, of_target)
        if groups and box.lo[axis] < end:
            groups[-1].append(piece)
        else:
            groups.append([piece])
        end = max(end, box.hi[axis])
    return groups


def _apart(groups: list[list[BlockPiece]], *, of_target: bool) -> bool:
    """Whether every tensor of the other side belongs to one slab."""
    names = [{piece.source if of_target else piece.target for piece in group} for group in groups]
    return sum(map(len, names)) == len(set[str]().union(*names))


def _span(group: list[BlockPiece], axis: int, *, of_target: bool) -> tuple[int, int]:
    boxes = [_box(piece, of_target) for piece in group]
    return min(box.lo[axis] for box in boxes), max(box.hi[axis] for box in boxes)


def _target_slabs(block: Block, axis: int, groups: list[list[BlockPiece]]) -> Slabs:
    ((stack, shape),) = block.targets.items()
    blocks = []
    for index, group in enumerate(groups):
        begin, end = _span(group, axis, of_target=True)
        name = f"{stack}_{index}"
        sources = dict.fromkeys(piece.source for piece in group)
        pieces = [replace(piece, target=name, target_box=_moved(piece.target_box, axis, -begin)) for piece in group]
        blocks.append(
            Block(
                {source: block.sources[source] for source in sources},
                {name: _with(shape, axis, end - begin)},
                {source: block.facings[source] for source in sources},
                tuple(pieces),
            )
        )
    return Slabs(stack, axis, None, tuple(blocks))


def _source_slabs(block: Block, axis: int, groups: list[list[BlockPiece]]) -> Slabs:
    ((stack, shape),) = block.sources.items()
    facing = SourceView(tuple(range(len(shape))))
    blocks = []
    for index, group in enumerate(groups):
        begin, end = _span(group, axis, of_target=False)
        if (end - begin) * len(groups) != shape[axis]:
            raise Inexpressible(f"{stack}: the language splits equally only, and its slabs have several lengths")
        name = f"{stack}_{index}"
        targets = dict.fromkeys(piece.target for piece in group)
        pieces = [replace(piece, source=name, source_box=_moved(piece.source_box, axis, -begin)) for piece in group]
        blocks.append(
            Block(
                {name: _with(shape, axis, end - begin)},
                {target: block.targets[target] for target in targets},
                {name: facing},
                tuple(pieces),
            )
        )
    return Slabs(stack, axis, block.facings[stack], tuple(blocks))


def _moved(box: Box, axis: int, by: int) -> Box:
    return Box(_with(box.lo, axis, box.lo[axis] + by), _with(box.hi, axis, box.hi[axis] + by))


def _with(shape: Shape, axis: int, length: int) -> Shape:
    return (*shape[:axis], length, *shape[axis + 1 :])
