"""Compare two mappings: equal mappings move the same elements to the same positions.

The proof of one mapping (:mod:`.prove`) does not detect a query that is read as a key of the same shape, or a square
matrix that is read as its transpose. Such a mapping is total and single-writer as well. A stored or edited mapping is
therefore compared with the declared one. Wherever two target boxes overlap, both must read the same source at the same
position under the same axes. Together with both proofs, this makes them equal functions.

Linear in the tensors, and for each kind of them in its boxes, up to the bisection that finds overlaps.
"""

from __future__ import annotations

from collections.abc import Iterator

from paddleformers_fc.errors import MappingError
from paddleformers_fc.mapping.boxes import Box
from paddleformers_fc.mapping.correspondences import NEW_AXIS, TensorMapping, TensorSources
from paddleformers_fc.mapping.folding import fold
from paddleformers_fc.mapping.templates import BoxLink, pulled
from paddleformers_fc.text import count_text


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
