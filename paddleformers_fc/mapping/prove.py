"""The proof of a mapping, from names, shapes and dtypes alone.

A mapping is right when every element of every target is written exactly once (or its target is declared fresh),
every element of every source is read (or its source is declared dropped), every box lies inside its tensor, boxes
of one correspondence have the same shape under its axes, and no dtype changes without a declared cast. Together these
make ``reverse(forward)`` the identity on everything that is not cast: each source element has one place in the
targets and each target element one place in the sources.

Linear in the correspondences, up to the sort of the boxes of one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import le

from paddleformers_fc.errors import MappingError
from paddleformers_fc.mapping.boxes import Box, Shape, cover_faults, whole
from paddleformers_fc.mapping.correspondences import NEW_AXIS, Correspondence, Mapping, TensorSpec
from paddleformers_fc.mapping.folding import fold


def prove(mapping: Mapping, title: str = "The mapping") -> None:
    """Refuse a mapping that is not total, single-writer, in bounds and dtype-closed.

    Args:
        mapping: what to prove.
        title: how the error names the mapping.
    Raises:
        MappingError: with every fault, indices folded.
    """
    faults = list(faults_of(mapping))
    if faults:
        raise MappingError(
            f"{title} cannot be proved: {len(faults)} faults.",
            evidence=fold(faults),
            next_step="Nothing was read or written. Mend the family's declaration or the model's configuration.",
        )


def faults_of(mapping: Mapping) -> Iterator[str]:
    """Every fault of a mapping as one line of text that starts with the tensor's name."""
    for item in mapping.correspondences:
        yield from _local_faults(mapping, item)
    for name, spec in mapping.targets.items():
        items = mapping.by_target.get(name, [])
        if name in mapping.fresh and not items:
            continue
        yield from _tiling_faults(name, spec, [item.target_box for item in items], "written")
    for name, spec in mapping.sources.items():
        items = mapping.by_source.get(name, [])
        if name in mapping.dropped and not items:
            continue
        yield from _tiling_faults(name, spec, [item.source_box for item in items], "read")


def _local_faults(mapping: Mapping, item: Correspondence) -> Iterator[str]:
    source, target = mapping.sources.get(item.source), mapping.targets.get(item.target)
    if source is None:
        yield f"{item.source}: is read but is no tensor of the source space"
    if target is None:
        yield f"{item.target}: is written but is no tensor of the target space"
    if source is None or target is None:
        return
    for name, box, spec in ((item.source, item.source_box, source), (item.target, item.target_box, target)):
        if not _inside(box, spec.shape):
            yield f"{name}: box {box} is outside shape {list(spec.shape)}"
            return
    yield from _axes_faults(item)
    if item.cast is None and source.dtype != target.dtype:
        yield f"{item.target}: is {target.dtype}, its source {item.source} is {source.dtype}, no cast is declared"
    if item.cast is not None and item.cast != target.dtype:
        yield f"{item.target}: is {target.dtype}, the declared cast gives {item.cast}"


def _inside(box: Box, shape: Shape) -> bool:
    return len(box.lo) == len(shape) and all(map(le, box.hi, shape)) and min(box.lo, default=0) >= 0


def _axes_faults(item: Correspondence) -> Iterator[str]:
    axes, shape, source_shape = item.axes, item.target_box.shape, item.source_box.shape
    if len(axes) == len(shape) == len(source_shape) and sorted(axes) == list(range(len(axes))):
        # The common case: a permutation, with no axis added or left out.
        if tuple(map(source_shape.__getitem__, axes)) != shape:
            yield f"{item.target}: box {item.target_box} does not have the shape of {item.source} {item.source_box}"
        return
    used = [axis for axis in axes if axis != NEW_AXIS]
    if len(axes) != len(shape) or len(set(used)) != len(used) or not set(used) <= set(range(len(source_shape))):
        yield f"{item.target}: axes {list(axes)} do not permute the axes of {item.source}"
        return
    expected = tuple(1 if axis == NEW_AXIS else source_shape[axis] for axis in axes)
    unused = [length for axis, length in enumerate(source_shape) if axis not in used]
    if expected != shape or any(length != 1 for length in unused):
        yield f"{item.target}: box {item.target_box} does not have the shape of {item.source} {item.source_box}"


def _tiling_faults(name: str, spec: TensorSpec, boxes: list[Box], verb: str) -> Iterator[str]:
    if len(boxes) == 1 and boxes[0].hi == spec.shape and not any(boxes[0].lo):
        return
    # A box of another rank was reported already; it has no place in this tensor.
    fitting = [box for box in boxes if len(box.lo) == len(spec.shape)]
    for fault in cover_faults(whole(spec.shape), fitting):
        if fault.writers:
            yield f"{name}: {fault.where} is {verb} more than once"
        else:
            yield f"{name}: {fault.where} is not {verb}"
