"""Evaluate AOA text for derivation: a user's lines, which must be valid, and native statements, which are a hint.

Casts are ignored, because they follow from the dtypes of both sides. A hint is written for all models of a family, so
statements without a tensor here are skipped. The others are used if they are proved; skipped and unproved ones are
reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from paddleformers_fc.aoa import AoaTensor, normal, parse
from paddleformers_fc.aoa.expand import Budget, Expander
from paddleformers_fc.aoa.faults import Fault, SourceLine
from paddleformers_fc.aoa.names import NameIndex
from paddleformers_fc.aoa.syntax import parse_line
from paddleformers_fc.errors import MappingError
from paddleformers_fc.families.bind import ModelTensor
from paddleformers_fc.mapping import Correspondence, Rule, Shape, TensorMapping, TensorSpec, Tie
from paddleformers_fc.mapping.correspondences import coalesced
from paddleformers_fc.mapping.prove import faults_of
from paddleformers_fc.mapping.rules import Slab

_CAST = re.compile(r",\s*(?:src_|dst_)?dtype\s*=\s*(?:'[^']*'|\"[^\"]*\")")
_NEUTRAL = "float32"
_SPARE = 1_000_000

Pieces = frozenset[Correspondence]


@dataclass(frozen=True)
class HintedMapping:
    """The mapping of a text.

    Args:
        pieces: the boxes of every tensor that it fills.
        fresh: tensors that keep their initial values.
        dropped: canonical tensors that it removes.
        unused: the reasons for which parts of it are not used.
    """

    pieces: Mapping[str, Pieces] = field(default_factory=dict)
    fresh: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()
    unused: tuple[str, ...] = ()


class HintReader:
    """Reads text between a model and its canonical side.

    Args:
        tensors: the model's.
        canonical: the canonical side.
        ties: aliases, which text may fill with what their owners are made of.
    """

    def __init__(
        self, tensors: Iterable[ModelTensor], canonical: Mapping[str, TensorSpec], ties: Sequence[Tie]
    ) -> None:
        self._right = {one.name: AoaTensor(one.shape, _NEUTRAL, one.cuts) for one in tensors}
        self._left = {name: AoaTensor(spec.shape, _NEUTRAL, (1,) * len(spec.shape)) for name, spec in canonical.items()}
        self._ties = tuple(ties)

    def settled(self, lines: Sequence[str]) -> HintedMapping:
        """Evaluate the lines of a user.

        Raises:
            MappingError: a line matches no tensor, or the mapping of a tensor cannot be proved.
        """
        uncast = [_CAST.sub("", line) for line in lines]
        named, wrong = self._named(uncast)
        mapping = parse(
            [line for line, names in zip(uncast, named, strict=True) if names], self._left, self._rights(named)
        )
        faults = [*wrong, *_faults(mapping)]
        if faults:
            raise MappingError(
                "Invalid settling lines.",
                where="--settle",
                evidence=faults,
                next_step="Write lines that name tensors of both sides and fill their targets completely.",
            )
        return _hinted_mapping(mapping, ())

    def hint(self, lines: Sequence[str]) -> HintedMapping:
        """Evaluate the statements of a hint that can be proved."""
        uncast = [_CAST.sub("", line) for line in lines]
        named, wrong = self._named(uncast)
        unused = [f"skipped: {reason}" for reason in wrong]
        kept = [line for line, names in zip(uncast, named, strict=True) if names]
        try:
            mapping = parse(kept, self._left, self._rights(named), self._ties)
        except MappingError as error:
            return HintedMapping(unused=(*unused, "not used, because statements are invalid:", *error.evidence))
        faults = _faults(mapping)
        if faults:
            return HintedMapping(unused=(*unused, "not used, because it cannot be proved:", *faults))
        return _hinted_mapping(mapping, tuple(unused))

    def _named(self, lines: Sequence[str]) -> tuple[list[set[str]], list[str]]:
        """Return the names that every line fills or removes; for an invalid line none, and the reason."""
        index = NameIndex(self._left)
        expander = Expander(index, NameIndex(self._right), Budget(_SPARE + 64 * (len(self._left) + len(self._right))))
        named: list[set[str]] = []
        wrong: list[str] = []
        known = set(self._left)
        for number, text in enumerate(lines, start=1):
            names: set[str] = set()
            try:
                statement = parse_line(SourceLine(number, text))
                for step in expander.steps(statement) if statement is not None else ():
                    left = {name.text for name in step.left}
                    missing = sorted(left - known - {"_"})
                    if missing:
                        raise Fault(f"`{missing[0]}` is not a canonical tensor")
                    if left == {"_"} and not self._right.keys() >= set(step.right):
                        raise Fault("the model has no such tensor")
                    names.update(step.right)
            except Fault as fault:
                wrong.append(f"`{text.strip()}`: {fault.cause}")
                names = set()
            known |= names
            named.append(names)
        return named, wrong

    def _rights(self, named: Iterable[set[str]]) -> dict[str, AoaTensor]:
        return {name: self._right[name] for names in named for name in names if name in self._right}


def _faults(mapping: TensorMapping) -> list[str]:
    """Faults of the proof, for the sources that are read and the targets that are written."""
    read = mapping.read.keys() | mapping.dropped
    return list(
        faults_of(
            TensorMapping(
                {name: spec for name, spec in mapping.sources.items() if name in read},
                mapping.targets,
                mapping.made,
                mapping.fresh,
                mapping.dropped,
            )
        )
    )


def _hinted_mapping(mapping: TensorMapping, unused: tuple[str, ...]) -> HintedMapping:
    found: dict[str, set[Correspondence]] = {}
    for item in normal(mapping):
        found.setdefault(item.target, set()).add(item)
    return HintedMapping(
        {name: frozenset(items) for name, items in found.items()}, mapping.fresh, mapping.dropped, unused
    )


def pieces_of(rules: Iterable[Rule], shapes: Mapping[str, Shape]) -> dict[str, Pieces]:
    """Return the boxes of every target of some rules, in the largest boxes."""
    found: dict[str, list[Correspondence]] = {}
    for rule in rules:
        for item in rule.correspondences([shapes[name] for name in rule.targets]):
            found.setdefault(item.target, []).append(item)
    return {name: frozenset(coalesced(items)) for name, items in found.items()}


def rules_of(pieces: Pieces, target: Shape, sources: Mapping[str, Shape]) -> tuple[Rule, ...] | None:
    """Return rules of whole sources that are exactly these boxes of one target, or None.

    Args:
        pieces: all boxes of the target.
        target: its shape.
        sources: the shapes of the canonical tensors.
    """
    name = next(iter(pieces)).target
    ordered = sorted(pieces, key=lambda item: item.target_box.lo)
    for stretches in _stretches(ordered, target):
        rules = [_row(name, items, slab, sources) for slab, items in stretches]
        known = tuple(rule for rule in rules if rule is not None)
        if len(known) == len(rules) and pieces_of(known, {name: target}).get(name) == pieces:
            return known
    return None


def _stretches(
    ordered: list[Correspondence], target: Shape
) -> Iterable[list[tuple[Slab | None, list[Correspondence]]]]:
    """Return the boxes as a whole, and taken apart along every axis."""
    yield [(None, ordered)]
    for axis in range(len(target)):
        groups: dict[tuple[int, int], list[Correspondence]] = {}
        for item in ordered:
            groups.setdefault((item.target_box.lo[axis], item.target_box.hi[axis]), []).append(item)
        yield [(Slab(axis, low, high), items) for (low, high), items in groups.items()]


def _row(name: str, items: list[Correspondence], slab: Slab | None, sources: Mapping[str, Shape]) -> Rule | None:
    """Return one rule that joins whole sources along one axis."""
    names = tuple(dict.fromkeys(item.source for item in items))
    axes = items[0].axes
    moving = {
        axis
        for axis in range(len(axes))
        if len({(item.target_box.lo[axis], item.target_box.hi[axis]) for item in items}) > 1
    } - ({slab.axis} if slab else set())
    if len(moving) > 1 or any(item.axes != axes for item in items):
        return None
    axis = moving.pop() if moving else max((place for place in range(len(axes)) if axes[place] >= 0), default=0)
    if slab is not None and axis == slab.axis:
        axis = next((place for place in range(len(axes)) if axes[place] >= 0 and place != slab.axis), axis)
    parts = tuple(sources[source][axes[axis]] if axes else 1 for source in names)
    rounds = sum(item.source == names[0] for item in items)
    if len(names) == 1 and len(items) > 1:
        parts, rounds = _parts_of_one(items, axis, parts)
    return Rule(names, (name,), parts, axis, axes, target_blocks=rounds, slab=slab)


def _parts_of_one(items: list[Correspondence], axis: int, whole: Shape) -> tuple[Shape, int]:
    """Return the parts that are consecutive in one source and interleaved in a target, and the number of groups."""
    at = items[0].axes[axis]
    stretches = [(item.source_box.lo[at], item.source_box.hi[at]) for item in items]
    # The second group begins where the first stretch ends in the source.
    period = next((place for place, (low, _) in enumerate(stretches) if low == stretches[0][1]), len(stretches))
    rounds = len(stretches) // period
    parts = tuple(rounds * (high - low) for low, high in stretches[:period])
    return (parts, rounds) if sum(parts) == sum(whole) else (whole, 1)
