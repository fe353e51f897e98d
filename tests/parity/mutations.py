"""Wrong declarations, enumerated from the data of a right one: what a slip of its author would be.

Parts in another order, exchanged names, a transpose too many or too few, the layout of another fused layer, experts or
layers that are shifted. Most of them map every element exactly once, so that no proof refuses them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import structs

from paddleformers_fc.families import Family, ModelDescription, ModelTensor, bind
from paddleformers_fc.families.declarations import PLACEHOLDER, Geometry, Stack, Statement
from paddleformers_fc.families.names import Names
from paddleformers_fc.mapping import Rule, RuleSet


@dataclass(frozen=True)
class Mutant:
    """A wrong declaration.

    Args:
        kind: what is wrong.
        targets: of the statements that are wrong; none where all numbers of a kind are.
        family: the family with the fault.
        rotated: the number of canonical names that the statement confuses, such as ``expert``.
    """

    kind: str
    targets: tuple[str, ...]
    family: Family
    rotated: str = ""

    def rules(self, model: ModelDescription, tensors: Sequence[ModelTensor]) -> RuleSet:
        """The rules of a model by the wrong declaration."""
        found = bind(self.family, model, tensors)
        if not self.rotated:
            return found
        statement = next(one for one in self.family.statements if one.target in self.targets)
        index = Names(structs.replace(self.family, statements=(statement,)), model)
        wrong = [index.find(rule.targets[0])[0] != [] for rule in found.rules]
        names = {name for rule, one in zip(found.rules, wrong, strict=True) if one for name in rule.sources}
        others = _rotated(names, statement, self.rotated)
        return structs.replace(
            found,
            rules=tuple(_renamed(rule, others) if one else rule for rule, one in zip(found.rules, wrong, strict=True)),
        )


def mutants(family: Family) -> Iterator[Mutant]:
    """Every mutant of a declaration."""
    for index, one in enumerate(family.statements):
        for kind, changed in _changed(one):
            yield Mutant(kind, (one.target,), _with(family, {index: changed}))
        for hole in dict.fromkeys(hole for source in one.sources for hole in PLACEHOLDER.findall(source)):
            yield Mutant(f"shifted {hole}", (one.target,), family, hole)
    for (index, one), (number, other) in itertools.combinations(enumerate(family.statements), 2):
        if _exchangeable(one, other):
            changes = {
                index: structs.replace(one, sources=other.sources),
                number: structs.replace(other, sources=one.sources),
            }
            yield Mutant("exchanged names", (one.target, other.target), _with(family, changes))
    for numbers in family.numbered.values():
        shifted = structs.replace(numbers, shift=(numbers.shift, 1))
        kept = tuple(one for one in family.numbers if one.name != numbers.name)
        yield Mutant(f"numbers of {numbers.name}", (), structs.replace(family, numbers=(*kept, shifted)))


def _changed(one: Statement) -> Iterator[tuple[str, Statement]]:
    for first, second in itertools.combinations(range(len(one.sources)), 2):
        order = list(one.sources)
        order[first], order[second] = order[second], order[first]
        yield "order of parts", structs.replace(one, sources=tuple(order))
    if one.sources:
        yield "uninitialised", structs.replace(one, sources=())
        yield "transpose", structs.replace(one, turned=not one.turned)
        for geometry in Geometry:
            if geometry is not one.geometry:
                yield "layout", structs.replace(one, geometry=geometry)
    if one.parts:
        yield "lengths of parts", structs.replace(one, parts=one.parts[::-1])
    if one.siblings:
        yield "order of siblings", structs.replace(one, siblings=one.siblings[::-1])
    if one.groups != 1:
        yield "groups of a source", structs.replace(one, groups=1)
        yield "groups of a source", structs.replace(one, groups="kv_heads")
    if one.stack is not None:
        yield "stack", structs.replace(one, stack=Stack.ROWS if one.stack is Stack.NEW_AXIS else Stack.NEW_AXIS)


def _exchangeable(one: Statement, other: Statement) -> bool:
    """Whether two statements declare tensors of one kind of shape by names with the same numbers."""
    alike = len(one.sources) == len(other.sources) > 0 and len(one.shape) == len(other.shape)
    holes = [{hole for source in each.sources for hole in PLACEHOLDER.findall(source)} for each in (one, other)]
    return alike and holes[0] == holes[1] and one.sources != other.sources and one.target != other.target


def _with(family: Family, changes: dict[int, Statement]) -> Family:
    return structs.replace(
        family, statements=tuple(changes.get(index, one) for index, one in enumerate(family.statements))
    )


def _rotated(names: set[str], statement: Statement, hole: str) -> dict[str, str]:
    """Every name, and the one with the next number of a kind; the last one has the first."""
    found: dict[tuple[str, ...], list[tuple[int, str]]] = {}
    for name in names:
        for source in statement.sources:
            pattern = "([0-9]+)".join(map(re.escape, re.split(r"\{\w+\}", source)))
            numbers = re.fullmatch(pattern, name)
            if numbers:
                known = dict(zip(PLACEHOLDER.findall(source), numbers.groups(), strict=True))
                others = tuple(number for key, number in known.items() if key != hole)
                found.setdefault((source, *others), []).append((int(known[hole]), name))
    pairs: dict[str, str] = {}
    for group in found.values():
        ordered = [name for _, name in sorted(group)]
        pairs |= dict(zip(ordered, ordered[1:] + ordered[:1], strict=True))
    return pairs


def _renamed(rule: Rule, names: dict[str, str]) -> Rule:
    return msgspec.structs.replace(rule, sources=tuple(names.get(name, name) for name in rule.sources))
