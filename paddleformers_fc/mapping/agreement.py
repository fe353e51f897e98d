"""Whether two mappings move the same numbers to the same places.

The proof of one mapping (:mod:`.prove`) cannot know that a query was taken for a key of the same shape, or a square
matrix for its transpose: such a mapping is total and single-writer too. What knows is the declaration it came from.
So a mapping that was stored, edited or handed on is compared with the one that is declared: wherever two target boxes
overlap, both must read the same source at the same place under the same axes. Together with both proofs, that makes
them equal functions.

Linear in the correspondences of each tensor, up to the bisection that finds overlaps.
"""

from __future__ import annotations

from collections.abc import Iterator

from paddleformers_fc.errors import MappingError
from paddleformers_fc.mapping.boxes import Box, BoxFinder
from paddleformers_fc.mapping.correspondences import NEW_AXIS, Correspondence, Mapping
from paddleformers_fc.mapping.folding import fold


def refuse_disagreement(mapping: Mapping, declared: Mapping, title: str, next_step: str) -> None:
    """Refuse a mapping that moves any number elsewhere than the declared one does.

    Args:
        mapping: what is in question; proved.
        declared: what it must be equal to; proved.
        title: how the error names the mapping.
        next_step: what the reader can do.
    Raises:
        MappingError: with every tensor on which they disagree, indices folded.
    """
    faults = list(disagreements(mapping, declared))
    if faults:
        raise MappingError(
            f"{title} is not what its family declares: {len(faults)} differences.",
            evidence=fold(faults),
            next_step=next_step,
        )


def disagreements(mapping: Mapping, declared: Mapping) -> Iterator[str]:
    """One line per place where the two differ; each line starts with the target's name."""
    for name in mapping.targets.keys() | declared.targets.keys():
        if mapping.targets.get(name) != declared.targets.get(name):
            yield f"{name}: is {mapping.targets.get(name)}, declared is {declared.targets.get(name)}"
            continue
        ours, theirs = mapping.by_target.get(name, []), declared.by_target.get(name, [])
        if bool(ours) != bool(theirs):
            yield f"{name}: is {'written' if ours else 'not written'}, declared is the opposite"
            continue
        finder = BoxFinder([item.target_box for item in theirs])
        for item in ours:
            for index in finder.near(item.target_box):
                common = item.target_box.intersect(theirs[index].target_box)
                if common is not None and not _alike(item, theirs[index], common):
                    yield (
                        f"{name}: {common} is read from {_spelled(item, common)}, "
                        f"declared from {_spelled(theirs[index], common)}"
                    )


def _alike(one: Correspondence, other: Correspondence, part: Box) -> bool:
    if (one.source, one.cast) != (other.source, other.cast) or one.pull(part) != other.pull(part):
        return False
    return _turning_axes(one, part) == _turning_axes(other, part)


def _turning_axes(item: Correspondence, part: Box) -> list[int]:
    """The source axes in target order, without axes of length one, whose order moves nothing."""
    lengths = part.shape
    return [source for axis, source in enumerate(item.axes) if source != NEW_AXIS and lengths[axis] > 1]


def _spelled(item: Correspondence, part: Box) -> str:
    cast = f" cast to {item.cast}" if item.cast else ""
    return f"{item.source} {item.pull(part)} axes {list(item.axes)}{cast}"
