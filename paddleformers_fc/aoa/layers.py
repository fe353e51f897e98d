"""One layer for all that are like it: what is said of it, with a placeholder for its number, holds for each.

A *layer* is all tensors of both sides whose names have the same first number. Two layers are alike if exchanging their
numbers changes nothing: the same names, shapes, dtypes and cuts, made alike, of tensors of the same layer. A mapping
with one layer of each kind is then a model of the whole one in little:

- a pattern matches a layer if and only if it matches the one that stands for it, so that a statement with a placeholder
  becomes, for every layer, the steps of that one with the number exchanged;
- no step of one layer reads or writes a name of another, so that these steps mean the boxes of that one, with the
  number exchanged, which are the boxes of the layer.

So text that is read back as the little mapping is read back as the whole one, unless it names by number a layer that
stands for others; :meth:`InLittle.holds_for_all` tells. Layers of which this is not certain stand for themselves alone:
those that exchange tensors with others, have tensors that are dropped or fresh, or are numbered in another way than a
placeholder writes numbers. Linear in the names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from paddleformers_fc.aoa.runs import Hints
from paddleformers_fc.mapping.correspondences import Mapping, TensorSources

_FIRST = re.compile(r"\.([0-9]+|\$[A-Z_]+)")
_PLAIN = re.compile(r"0|[1-9][0-9]{0,17}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.$]*")

Split = tuple[str, str, str]
"""A name before the number of its layer, the number, and the name behind it; the last two empty for one of no layer."""


@dataclass(frozen=True)
class ReducedMapping:
    """A mapping with one layer of each kind.

    Args:
        mapping: the mapping.
        standing: the numbers of the layers that stand for others.
    """

    mapping: Mapping
    standing: frozenset[str]

    def holds_for_all(self, statements: Iterable[str]) -> bool:
        """Whether what means the little mapping means the whole one: it names no layer that stands for others."""
        first = (_FIRST.search(name) for statement in statements for name in _NAME.findall(statement))
        return not any(found is not None and found.group(1) in self.standing for found in first)


def reduce_layers(mapping: Mapping, hints: Hints) -> ReducedMapping | None:
    """Return the mapping with one layer of each kind, or None where all layers differ.

    Args:
        mapping: the whole mapping.
        hints: what else the text depends on, by name.
    """
    split = {name: _split(name) for name in (*mapping.targets, *mapping.sources)}
    alone = _alone(mapping, split)
    facts: dict[str, list[object]] = {}
    for name, made in mapping.made.items():
        number = split[name][1]
        if number and number not in alone:
            facts.setdefault(number, []).append(_facts(name, made, mapping, hints, split))
    first: dict[tuple[object, ...], str] = {}
    stands_for = {number: first.setdefault(tuple(said), number) for number, said in facts.items()}
    absent = {number for number, other in stands_for.items() if number != other}
    if not absent:
        return None
    little = Mapping(
        {name: spec for name, spec in mapping.sources.items() if split[name][1] not in absent},
        {name: spec for name, spec in mapping.targets.items() if split[name][1] not in absent},
        {name: made for name, made in mapping.made.items() if split[name][1] not in absent},
        mapping.fresh,
        mapping.dropped,
    )
    return ReducedMapping(little, frozenset(stands_for[number] for number in absent))


def _split(name: str) -> Split:
    found = _FIRST.search(name)
    # Without a name behind the number: parts of `a.1` would be named `a.1_0`, and that is a name of no layer.
    if found is None or name[found.end() : found.end() + 1] != "." or not _PLAIN.fullmatch(found.group(1)):
        return name, "", ""
    return name[: found.start(1)], found.group(1), name[found.end(1) :]


def _alone(mapping: Mapping, split: dict[str, Split]) -> set[str]:
    """Return the numbers of the layers that are like no other, whatever is in them."""
    alone: set[str] = set()
    read: set[str] = set()
    for name, made in mapping.made.items():
        numbers = {split[source][1] for source in made.names if source in split}
        if numbers != {split[name][1]}:
            alone |= numbers | {split[name][1]}
        read.update(made.names)
    # What is fresh or dropped is said by name.
    alone |= {split[name][1] for name in mapping.targets.keys() - mapping.made.keys()}
    alone |= {split[name][1] for name in mapping.sources.keys() - read}
    return alone


def _facts(name: str, made: TensorSources, mapping: Mapping, hints: Hints, split: dict[str, Split]) -> object:
    """Everything that is known of a tensor and of what it is made of, but for the number of its layer."""
    sources = [
        (split[one][::2], mapping.sources.get(one), hints.left.get(one), hints.per_rank.get(one)) for one in made.names
    ]
    target = (split[name][::2], mapping.targets.get(name), hints.right.get(name), hints.per_rank.get(name))
    return target, made.stencil, tuple(sources)
