"""Prove mappings from names, shapes and dtypes alone, and compare a mapping with the declared one.

A proved mapping writes every element of every target once, or declares the target uninitialized, and reads every
element of every source once, or declares the source dropped. All boxes are in bounds, paired boxes have equal shapes,
and no dtype changes without a declared cast. Without casts, ``reverse(forward)`` is therefore the identity.

The proof does not detect a query that is read as a key of the same shape, or a square matrix that is read as its
transpose. Stored and edited mappings are therefore compared with the declared mapping: where two target boxes overlap,
both must read the same source at the same position. Both checks handle tensors of one kind together: linear in the
tensors, and for each kind linear in its boxes up to sorting and bisection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import le

from paddleformers_fc.errors import MappingError
from paddleformers_fc.mapping.boxes import Box, Shape, cover_faults, whole
from paddleformers_fc.mapping.correspondences import NEW_AXIS, TensorMapping, TensorSources, TensorSpec
from paddleformers_fc.mapping.templates import BoxLink, pulled
from paddleformers_fc.text import count_text, fold

_CORRECT = "Correct the family's declaration or the model's configuration. No tensor was read or written."


def prove(mapping: TensorMapping, title: str = "The mapping", next_step: str = _CORRECT) -> None:
    """Check that a mapping is total, single-writer, in bounds and dtype-closed.

    Args:
        mapping: the mapping to prove.
        title: the name of the mapping in the error.
        next_step: the next step of the error.
    Raises:
        MappingError: with every fault, indices folded.
    """
    if faults := list(faults_of(mapping)):
        raise invalid_mapping(f"{title} cannot be proved", faults, next_step)


def invalid_mapping(what: str, faults: Sequence[str], next_step: str, where: str = "") -> MappingError:
    """Return the error for faults of a mapping, with their number; indices are folded."""
    counted = f"{what}: {count_text(len(faults), 'fault')}."
    return MappingError(counted, where=where, evidence=fold(faults), next_step=next_step)


def faults_of(mapping: TensorMapping) -> Iterator[str]:
    """Yield every fault of a mapping as a line that starts with the tensor's name."""
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
    # Boxes with a wrong number of axes are reported elsewhere.
    fitting = [box for box in boxes if len(box.lo) == len(spec.shape)]
    for fault in cover_faults(whole(spec.shape), fitting):
        if fault.writers:
            yield f"{name}: {fault.where} is {verb} more than once"
        else:
            yield f"{name}: {fault.where} is not {verb}"


def require_agreement(mapping: TensorMapping, declared: TensorMapping, title: str, next_step: str) -> None:
    """Check that a mapping is equal to the declared one.

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
    equal: set[tuple[object, ...]] = set()
    for name in mapping.targets.keys() | declared.targets.keys():
        if mapping.targets.get(name) != declared.targets.get(name):
            yield f"{name}: is {mapping.targets.get(name)}, declared is {declared.targets.get(name)}"
            continue
        ours, theirs = mapping.made.get(name), declared.made.get(name)
        if ours is None or theirs is None:
            if ours is not theirs:
                yield f"{name}: is {'not written' if ours is None else 'written'}, declared is the opposite"
            continue
        # The comparison depends only on which names are equal.
        places: dict[str, int] = {}
        same = tuple([places.setdefault(source, len(places)) for source in (*ours.names, *theirs.names)])
        key = (ours.template, theirs.template, same)
        if key in equal:
            continue
        faults = list(_differences(name, ours, theirs))
        yield from faults
        if not faults:
            equal.add(key)


def _differences(name: str, ours: TensorSources, theirs: TensorSources) -> Iterator[str]:
    for link in ours.template.links:
        for index in theirs.template.finder.near(link.target_box):
            other = theirs.template.links[index]
            common = link.target_box.intersect(other.target_box)
            if common is None:
                continue
            source, declared = ours.names[link.source], theirs.names[other.source]
            if source != declared or not _is_same_read(link, other, common):
                yield (
                    f"{name}: {common} is read from {_read_text(source, link, common)}, "
                    f"declared from {_read_text(declared, other, common)}"
                )


def _is_same_read(one: BoxLink, other: BoxLink, part: Box) -> bool:
    if one.cast != other.cast or pulled(one, part) != pulled(other, part):
        return False
    return _long_axes(one, part) == _long_axes(other, part)


def _long_axes(link: BoxLink, part: Box) -> list[int]:
    """Return the source axes in target order, without axes of length one, whose order does not matter."""
    lengths = part.shape
    return [source for axis, source in enumerate(link.axes) if source != NEW_AXIS and lengths[axis] > 1]


def _read_text(source: str, link: BoxLink, part: Box) -> str:
    cast = f" cast to {link.cast}" if link.cast else ""
    return f"{source} {pulled(link, part)} axes {list(link.axes)}{cast}"
