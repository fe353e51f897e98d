"""The proof of a mapping, from names, shapes and dtypes alone.

A mapping is proved if these conditions hold. Every element of every target is written exactly once, or its target is
declared fresh. Every element of every source is read, or its source is declared dropped. Every box is inside its
tensor, and boxes of one correspondence have the same shape under its axes. No dtype changes without a declared cast.
Together these make ``reverse(forward)`` the identity on all values without a cast: each source element has one position
in the targets, and each target element one position in the sources.

Each kind of tensor is proved once: linear in the tensors, and per kind in its boxes, up to their sort.

Compare two mappings: equal mappings move the same elements to the same positions.

The proof of one mapping (:mod:`.prove`) does not detect a query that is read as a key of the same shape, or a square
matrix that is read as its transpose. Such a mapping is total and single-writer as well. A stored or edited mapping is
therefore compared with the declared one. Wherever two target boxes overlap, both must read the same source at the same
position under the same axes. Together with both proofs, this makes them equal functions.

Linear in the tensors, and for each kind of them in its boxes, up to the bisection that finds overlaps.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import le

from paddleformers_fc.errors import MappingError
from paddleformers_fc.mapping.boxes import Box, Shape, cover_faults, whole
from paddleformers_fc.mapping.correspondences import NEW_AXIS, TensorMapping, TensorSources, TensorSpec
from paddleformers_fc.mapping.templates import BoxLink, pulled
from paddleformers_fc.text import count_text, fold


def prove(mapping: TensorMapping, title: str = "The mapping") -> None:
    """Refuse a mapping that is not total, single-writer, in bounds and dtype-closed.

    Args:
        mapping: the mapping to prove.
        title: the name of the mapping in the error.
    Raises:
        MappingError: with every fault, indices folded.
    """
    faults = list(faults_of(mapping))
    if faults:
        raise MappingError(
            f"{title} cannot be proved: {count_text(len(faults), 'fault')}.",
            evidence=fold(faults),
            next_step="Correct the family's declaration or the model's configuration. No tensor was read or written.",
        )


def faults_of(mapping: TensorMapping) -> Iterator[str]:
    """Yield every fault of a mapping as one line of text that starts with the tensor's name."""
    yield from _faults_of_targets(mapping)
    sound: set[tuple[object, ...]] = set()
    for name, spec in mapping.sources.items():
        made = mapping.read.get(name)
        if made is None:
            if name not in mapping.dropped:
                yield from _tiling_faults(name, spec, [], "read")
        elif (made.template, spec) not in sound:
            faults = list(_tiling_faults(name, spec, [link.target_box for link in made.template.links], "read"))
            yield from faults
            if not faults:
                sound.add((made.template, spec))


def _faults_of_targets(mapping: TensorMapping) -> Iterator[str]:
    sound: set[tuple[object, ...]] = set()
    sources, targets = mapping.sources, mapping.targets
    for name, made in mapping.made.items():
        spec, read = targets.get(name), tuple(map(sources.get, made.names))
        key = (made.template, spec, read)
        if key in sound:
            continue
        faults = [fault for link in made.template.links for fault in _local_faults(name, spec, made, read, link)]
        if spec is not None:
            faults += _tiling_faults(name, spec, [link.target_box for link in made.template.links], "written")
        yield from faults
        if not faults:
            sound.add(key)
    for name, spec in targets.items():
        if name not in mapping.made and name not in mapping.fresh:
            yield from _tiling_faults(name, spec, [], "written")


def _local_faults(
    name: str, target: TensorSpec | None, made: TensorSources, sources: tuple[TensorSpec | None, ...], link: BoxLink
) -> Iterator[str]:
    source, source_name = sources[link.source], made.names[link.source]
    if source is None:
        yield f"{source_name}: is read and not a tensor of the source space"
    if target is None:
        yield f"{name}: is written and not a tensor of the target space"
    if source is None or target is None:
        return
    for one, box, spec in ((source_name, link.source_box, source), (name, link.target_box, target)):
        if not _inside(box, spec.shape):
            yield f"{one}: box {box} is outside shape {list(spec.shape)}"
            return
    yield from _axes_faults(name, source_name, link)
    if link.cast is None and source.dtype != target.dtype:
        yield f"{name}: is {target.dtype}, its source {source_name} is {source.dtype}, no cast is declared"
    if link.cast is not None and link.cast != target.dtype:
        yield f"{name}: is {target.dtype}, the declared cast gives {link.cast}"


def _inside(box: Box, shape: Shape) -> bool:
    return len(box.lo) == len(shape) and all(map(le, box.hi, shape)) and min(box.lo, default=0) >= 0


def _axes_faults(name: str, source_name: str, link: BoxLink) -> Iterator[str]:
    axes, shape, source_shape = link.axes, link.target_box.shape, link.source_box.shape
    used = [axis for axis in axes if axis != NEW_AXIS]
    if len(axes) != len(shape) or len(set(used)) != len(used) or not set(used) <= set(range(len(source_shape))):
        yield f"{name}: axes {list(axes)} do not permute the axes of {source_name}"
        return
    expected = tuple(1 if axis == NEW_AXIS else source_shape[axis] for axis in axes)
    unused = [length for axis, length in enumerate(source_shape) if axis not in used]
    if expected != shape or any(length != 1 for length in unused):
        yield f"{name}: box {link.target_box} does not have the shape of {source_name} {link.source_box}"


def _tiling_faults(name: str, spec: TensorSpec, boxes: list[Box], verb: str) -> Iterator[str]:
    # A box with another number of axes was reported already.
    fitting = [box for box in boxes if len(box.lo) == len(spec.shape)]
    for fault in cover_faults(whole(spec.shape), fitting):
        if fault.writers:
            yield f"{name}: {fault.where} is {verb} more than once"
        else:
            yield f"{name}: {fault.where} is not {verb}"


def require_agreement(mapping: TensorMapping, declared: TensorMapping, title: str, next_step: str) -> None:
    """Refuse a mapping that differs from the declared one.

    Args:
        mapping: the mapping to check; proved.
        declared: the declared mapping; proved.
        title: the name of the mapping in the error.
        next_step: the next step of the error.
    Raises:
        MappingError: with every tensor on which they differ, indices folded.
    """
    faults = list(disagreements(mapping, declared))
    if faults:
        raise MappingError(
            f"{title} differs from the declaration of its family: {count_text(len(faults), 'difference')}.",
            evidence=fold(faults),
            next_step=next_step,
        )


def disagreements(mapping: TensorMapping, declared: TensorMapping) -> Iterator[str]:
    """Yield one line per difference; each line starts with the target's name."""
    alike: set[tuple[object, ...]] = set()
    for name in mapping.targets.keys() | declared.targets.keys():
        if mapping.targets.get(name) != declared.targets.get(name):
            yield f"{name}: is {mapping.targets.get(name)}, declared is {declared.targets.get(name)}"
            continue
        ours, theirs = mapping.made.get(name), declared.made.get(name)
        if ours is None or theirs is None:
            if ours is not theirs:
                yield f"{name}: is {'not written' if ours is None else 'written'}, declared is the opposite"
            continue
        # Names matter only in which of them are the same.
        places: dict[str, int] = {}
        same = tuple([places.setdefault(source, len(places)) for source in (*ours.names, *theirs.names)])
        key = (ours.template, theirs.template, same)
        if key in alike:
            continue
        faults = list(_differences(name, ours, theirs))
        yield from faults
        if not faults:
            alike.add(key)


def _differences(name: str, ours: TensorSources, theirs: TensorSources) -> Iterator[str]:
    for link in ours.template.links:
        for index in theirs.template.finder.near(link.target_box):
            other = theirs.template.links[index]
            common = link.target_box.intersect(other.target_box)
            if common is None:
                continue
            source, declared = ours.names[link.source], theirs.names[other.source]
            if source != declared or not _alike(link, other, common):
                yield (
                    f"{name}: {common} is read from {_spelled(source, link, common)}, "
                    f"declared from {_spelled(declared, other, common)}"
                )


def _alike(one: BoxLink, other: BoxLink, part: Box) -> bool:
    if one.cast != other.cast or pulled(one, part) != pulled(other, part):
        return False
    return _turning_axes(one, part) == _turning_axes(other, part)


def _turning_axes(link: BoxLink, part: Box) -> list[int]:
    """Return the source axes in target order, without axes of length one, whose order moves nothing."""
    lengths = part.shape
    return [source for axis, source in enumerate(link.axes) if source != NEW_AXIS and lengths[axis] > 1]


def _spelled(source: str, link: BoxLink, part: Box) -> str:
    cast = f" cast to {link.cast}" if link.cast else ""
    return f"{source} {pulled(link, part)} axes {list(link.axes)}{cast}"
