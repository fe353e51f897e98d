"""Expand a statement with placeholders, arrays and wildcards into steps of whole names, in Paddle's order.

``$LAYER_ID_OFFSET`` first, then ``$LAYER_ID`` and ``$EXPERT_ID``, then ``name[0:2]``, then ``*``. The numbers come from
the tensors on the left, matched by the first name with a placeholder. A pattern that matches no tensor is a fault.

A :class:`Budget` limits the number of expanded names, which bounds time and memory on any text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from paddleformers_fc.aoa.faults import Fault
from paddleformers_fc.aoa.names import EXPERT, LAYER, LAYER_OFFSET, STAR, NameIndex, placeholders, skeleton
from paddleformers_fc.aoa.operations import Operation, operation_of
from paddleformers_fc.aoa.syntax import NOTHING, AoaStatement, Item


class Budget:
    """The maximum number of names and boxes of a list of statements.

    Args:
        limit: the number; more are refused before they are built.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = limit

    def spend(self, count: int) -> None:
        """Take ``count`` names or boxes from the budget.

        Raises:
            Fault: the budget is exceeded.
        """
        if count > self._left:
            raise Fault(f"The statements expand to more than {self._limit} names and boxes.")
        self._left -= count


@dataclass(frozen=True, slots=True)
class Name:
    """A whole name that is read, and whether it is read transposed."""

    text: str
    transposed: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One of the statements with whole names that a statement of the user expands to."""

    statement: AoaStatement
    operation: Operation
    left: tuple[Name, ...]
    right: tuple[str, ...]


class Expander:
    """Expands statements between two sides.

    Args:
        left: the names of the left side's tensors.
        right: the names of the right side's tensors, or None if that side follows from the statements.
        budget: limit of all names.
    """

    def __init__(self, left: NameIndex, right: NameIndex | None, budget: Budget) -> None:
        self._left = left
        self._right = right
        self._budget = budget

    def steps(self, statement: AoaStatement) -> Iterator[Step]:
        """Yield the steps of an expanded statement, in ascending order of its numbers.

        Raises:
            Fault: a pattern matches no tensor, or the statement has no operation.
        """
        operations: dict[tuple[int, int], Operation] = {}
        for numbers in self._numbers(statement):
            self._budget.spend(len(statement.left) + len(statement.right))
            shifted = {key: _before(value) if key == LAYER_OFFSET else value for key, value in numbers.items()}
            left = [
                Name(name, item.transposed)
                for item in statement.left
                for name in self._names(item, numbers, self._left)
            ]
            right = [name for item in statement.right for name in self._names(item, shifted, self._right)]
            if len(set(right)) != len(right):
                raise Fault(f"The statement writes {Counter(right).most_common(1)[0][0]} twice.", "each name once")
            counts = (len(left), len(right))
            if counts not in operations:
                operations[counts] = operation_of(statement, *counts)
            yield Step(statement, operations[counts], tuple(left), tuple(right))

    def _numbers(self, statement: AoaStatement) -> list[dict[str, str]]:
        """Return the values of a statement's placeholders for every step."""
        items = [item for item in (*statement.left, *statement.right) if item.pattern != NOTHING]
        first = next((item for item in items if "$" in item.pattern), None)
        if first is None:
            return [{}]
        keys = [key for key in placeholders(first.pattern) if key != STAR]
        for item in items:
            _check_placeholders(item, keys)
        if STAR in first.pattern:
            raise Fault("The first name with a placeholder contains `*`.", "a first name without `*`", first.span)
        found = [dict(zip(keys, numbers, strict=True)) for _, numbers in self._left.matches(first.pattern)]
        if not found:
            cause = f"`{first.pattern}` matches no tensor of the left side, whose numbers the placeholders take."
            raise Fault(cause, self._left.nearest(first.pattern), first.span)
        columns = [{numbers[key] for numbers in found} for key in keys]
        if prod(map(len, columns)) != len(found):
            counts = f"{' x '.join(str(len(column)) for column in columns)} combinations"
            cause = f"{' and '.join(keys)} have {counts}, and only {len(found)} of these tensors exist."
            raise Fault(cause, "one statement for every number of one of the two", first.span)
        return found

    def _names(self, item: Item, numbers: dict[str, str], side: NameIndex | None) -> list[str]:
        name = item.pattern
        for key, number in numbers.items():
            name = name.replace(key, number)
        if item.array is None and STAR not in name:
            return [name]
        begin, end = item.array or (0, 0)
        self._budget.spend(end - begin)
        listed = [f"{name}_{index}" for index in range(begin, end)] or [name]
        if STAR not in name:
            return listed
        return [found for pattern in listed for found in self._wild(pattern, item, side)]

    def _wild(self, pattern: str, item: Item, side: NameIndex | None) -> list[str]:
        if pattern.count(STAR) > 1:
            raise Fault("More than one `*` in a name.", "layers.*.weight", item.span)
        if item.transposed:
            raise Fault("`^T` is not supported for a name with `*`.", "one name per statement", item.span)
        if side is None:
            raise Fault("`*` on the right requires the tensors of that side, which are not known.", "", item.span)
        found = [name for name, _ in side.matches(pattern)]
        self._budget.spend(len(found))
        if not found:
            raise Fault(f"`{pattern}` matches no tensor of its side.", side.nearest(pattern), item.span)
        return found


def _check_placeholders(item: Item, keys: list[str]) -> None:
    """Refuse a name whose placeholders are not those of the first name with any."""
    own = [key for key in placeholders(item.pattern) if key != STAR]
    cause = accepted = ""
    if "$" in skeleton(item.pattern) or not keys:
        cause = f"Unknown placeholder in `{item.pattern}`."
        accepted = f"{LAYER}, {EXPERT} and {LAYER_OFFSET}"
    elif len(set(own)) != len(own):
        cause, accepted = f"Duplicate placeholder in `{item.pattern}`.", "each once; other numbers as digits"
    elif set(own) != set(keys):
        cause = f"`{item.pattern}` and the first name have different placeholders."
        accepted = f"every name with {' and '.join(keys)}, or whole names"
    elif LAYER_OFFSET in own and (len(own) > 1 or item.transposed):
        cause = f"{LAYER_OFFSET} is not supported with other placeholders or `^T`."
        accepted = 'permute="[]" in place of `^T`; digits in place of other placeholders'
    if cause:
        raise Fault(cause, accepted, item.span)


def _before(number: str) -> str:
    if number == "0":
        raise Fault(f"{LAYER_OFFSET} maps N to N - 1, and a tensor has N = 0.", LAYER)
    return str(int(number) - 1)
