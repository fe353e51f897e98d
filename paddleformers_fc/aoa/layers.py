"""Reduce a mapping to one layer of each kind, whose text with placeholders holds for all layers of the kind.

A *layer* is all tensors of both sides whose names have the same first number. Two layers are alike if they have the
same names apart from the number, shapes, dtypes, cuts and templates, and read tensors of their own layer only. The
reduced mapping has the first layer of each kind:

- a pattern matches a layer if and only if it matches the first layer of its kind, so that a statement with a
  placeholder expands to equal steps with other numbers;
- no step of one layer reads or writes a name of another, so that these steps give equal boxes with other numbers.

Text that is evaluated to the reduced mapping is therefore evaluated to the whole one, unless it contains the number of
a reduced layer (:meth:`ReducedMapping.holds_for_all`). Layers are not reduced if they exchange tensors with others,
have dropped or fresh tensors, or have numbers in another form than placeholders. Linear in the names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from paddleformers_fc.aoa.runs import Hints
from paddleformers_fc.mapping.correspondences import TensorMapping, TensorSources

_FIRST = re.compile(r"\.([0-9]+|\$[A-Z_]+)")
_PLAIN = re.compile(r"0|[1-9][0-9]{0,17}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.$]*")

Split = tuple[str, str, str]
"""The text before the number of the layer, the number, and the text after it. Names without a layer have the first."""


@dataclass(frozen=True)
class ReducedMapping:
    """A mapping with one layer of each kind.

    Args:
        mapping: the mapping.
        representatives: the numbers of layers that represent others.
    """

    mapping: TensorMapping
    representatives: frozenset[str]

    def holds_for_all(self, statements: Iterable[str]) -> bool:
        """Return whether the statements contain no number of a layer that represents others."""
        first = (_FIRST.search(name) for statement in statements for name in _NAME.findall(statement))
        return not any(found is not None and found.group(1) in self.representatives for found in first)


def reduce_layers(mapping: TensorMapping, hints: Hints) -> ReducedMapping | None:
    """Return the mapping with one layer of each kind, or None if all layers differ.

    Args:
        mapping: the whole mapping.
        hints: shards and layouts by name, on which the text depends as well.
    """
    split = {name: _split(name) for name in (*mapping.targets, *mapping.sources)}
    alone = _alone(mapping, split)
    facts: dict[str, list[object]] = {}
    for name, made in mapping.made.items():
        number = split[name][1]
        if number and number not in alone:
            facts.setdefault(number, []).append(_facts(name, made, mapping, hints, split))
    first: dict[tuple[object, ...], str] = {}
    representative_of = {number: first.setdefault(tuple(own), number) for number, own in facts.items()}
    absent = {number for number, other in representative_of.items() if number != other}
    if not absent:
        return None
    reduced = TensorMapping(
        {name: spec for name, spec in mapping.sources.items() if split[name][1] not in absent},
        {name: spec for name, spec in mapping.targets.items() if split[name][1] not in absent},
        {name: made for name, made in mapping.made.items() if split[name][1] not in absent},
        mapping.fresh,
        mapping.dropped,
    )
    return ReducedMapping(reduced, frozenset(representative_of[number] for number in absent))


def _split(name: str) -> Split:
    found = _FIRST.search(name)
    # The number needs a name after it: parts of `a.1` would be `a.1_0`, which is not a name of a layer.
    if found is None or name[found.end() : found.end() + 1] != "." or not _PLAIN.fullmatch(found.group(1)):
        return name, "", ""
    return name[: found.start(1)], found.group(1), name[found.end(1) :]


def _alone(mapping: TensorMapping, split: dict[str, Split]) -> set[str]:
    """Return the numbers of the layers that are not reduced."""
    alone: set[str] = set()
    read: set[str] = set()
    for name, made in mapping.made.items():
        numbers = {split[source][1] for source in made.names if source in split}
        if numbers != {split[name][1]}:
            alone |= numbers | {split[name][1]}
        read.update(made.names)
    # Fresh and dropped tensors are written by name.
    alone |= {split[name][1] for name in mapping.targets.keys() - mapping.made.keys()}
    alone |= {split[name][1] for name in mapping.sources.keys() - read}
    return alone


def _facts(name: str, made: TensorSources, mapping: TensorMapping, hints: Hints, split: dict[str, Split]) -> object:
    """Return all facts about a tensor and its sources, without the number of the layer."""
    sources = [
        (split[one][::2], mapping.sources.get(one), hints.left.get(one), hints.per_rank.get(one)) for one in made.names
    ]
    target = (split[name][::2], mapping.targets.get(name), hints.right.get(name), hints.per_rank.get(name))
    return target, made.template, tuple(sources)
