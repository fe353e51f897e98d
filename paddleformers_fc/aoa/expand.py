"""Expand a statement with placeholders, arrays and wildcards into steps with complete names, in Paddle's order.

``$LAYER_ID_OFFSET`` first, then ``$LAYER_ID`` and ``$EXPERT_ID``, then ``name[0:2]``, then ``*``. The first name with
a placeholder is matched with the tensors on the left and provides the numbers. A pattern without a match is a fault.

A :class:`NameIndex` groups names by their skeleton: the text without its numbers. Patterns have a skeleton too, so they
are compared only with names that can match. Building the index is linear in the names, and a lookup is linear in the
names of one skeleton. A :class:`Budget` limits the number of expanded names, and so time and memory for any text.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple

from paddleformers_fc.aoa.faults import Fault
from paddleformers_fc.aoa.syntax import NOTHING, AoaStatement, Item, Operation, operation_of

LAYER_OFFSET = "$LAYER_ID_OFFSET"
LAYER = "$LAYER_ID"
EXPERT = "$EXPERT_ID"
STAR = "*"

_HOLE = "\0"
_DIGITS = re.compile(r"[0-9]+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.$*^]*")
# The longer placeholder comes first, because the shorter one is its prefix.
_PARTS = re.compile(r"(\$LAYER_ID_OFFSET|\$LAYER_ID|\$EXPERT_ID|\*)|([0-9]+)")
_SUGGESTIONS = 5
_LONGEST = 300
_PLAIN = re.compile(r"0|[1-9][0-9]{0,17}")
"""The form of a placeholder's number: no leading zero, and a bounded length."""

_CANDIDATES = 200


def placeholders(pattern: str) -> list[str]:
    """Return the placeholders and wildcards of a pattern, in order, with repetitions."""
    return [found.group(1) for found in _PARTS.finditer(pattern) if found.group(1)]


def skeleton(name: str) -> str:
    """Return a name or pattern with its numbers and placeholders replaced."""
    return _PARTS.sub(_HOLE, name)


def name_skeletons(text: str) -> set[str]:
    """Return the skeletons of all names that a text may contain, including expanded arrays."""
    found = {skeleton(name.removesuffix("^T")) for name in _NAME.findall(text)}
    return found | {f"{name}_{_HOLE}" for name in found}


class NameIndex:
    """The names of one side.

    Args:
        names: every tensor of the side.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._by_skeleton: dict[str, list[tuple[str, list[str]]]] = {}
        self._suggestions = _SUGGESTIONS
        for name in names:
            self._by_skeleton.setdefault(_DIGITS.sub(_HOLE, name), []).append((name, _DIGITS.findall(name)))

    def matches(self, pattern: str) -> list[tuple[str, tuple[str, ...]]]:
        """Return every name that matches a pattern, with the numbers of its placeholders.

        Args:
            pattern: a name with placeholders or wildcards.
        Returns:
            names and numbers, sorted by the numbers.
        Raises:
            Fault: a placeholder touches a digit or another placeholder, so the end of its number is ambiguous.
        """
        holes = list(_PARTS.finditer(pattern))
        for one, other in zip(holes, holes[1:], strict=False):
            if one.end() == other.start() and (one.group(1) or other.group(1)):
                raise Fault(f"The end of a number in `{pattern}` is ambiguous.", "a letter or `.` in between")
        fixed = [hole.group(2) for hole in holes]
        hits = [
            (name, tuple(number for number, digits in zip(numbers, fixed, strict=True) if digits is None))
            for name, numbers in self._by_skeleton.get(skeleton(pattern), ())
            if all(digits is None or number == digits for number, digits in zip(numbers, fixed, strict=True))
        ]
        plain = [hit for hit in hits if all(map(_PLAIN.fullmatch, hit[1]))]
        return sorted(plain, key=lambda hit: [(len(number), number) for number in hit[1]])

    def nearest(self, name: str) -> str:
        """Return a tensor with a similar name, or an empty text. Only the first few calls search."""
        if not self._suggestions or len(name) > _LONGEST:
            return ""
        self._suggestions -= 1
        known = [key for key in self._by_skeleton if len(key) <= _LONGEST][:_CANDIDATES]
        near = difflib.get_close_matches(skeleton(name), known, 1)
        if not near:
            return ""
        (found, _), *others = self._by_skeleton[near[0]]
        return f"`{found}` or another of {len(others) + 1} such names" if others else f"`{found}`"


class Budget:
    """Limits the number of names and boxes that statements expand to.

    Args:
        limit: the maximum number.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = limit

    def spend(self, count: int) -> None:
        """Account for ``count`` names or boxes, before they are built.

        Raises:
            Fault: the limit is exceeded.
        """
        if count > self._left:
            raise Fault(f"The statements expand to more than {self._limit} names and boxes.")
        self._left -= count


class Name(NamedTuple):
    """A complete name on the left side, and whether the tensor is read transposed."""

    text: str
    transposed: bool


class Step(NamedTuple):
    """A statement with complete names, expanded from a user's statement."""

    statement: AoaStatement
    operation: Operation
    left: tuple[Name, ...]
    right: tuple[str, ...]


class Expander:
    """Expands statements between two sides.

    Args:
        left: the names of the left side's tensors.
        right: the names of the right side's tensors; None if they follow from the statements.
        budget: limits the number of names.
    """

    def __init__(self, left: NameIndex, right: NameIndex | None, budget: Budget) -> None:
        self._left = left
        self._right = right
        self._budget = budget

    def steps(self, statement: AoaStatement) -> Iterator[Step]:
        """Yield the expanded statement, in ascending order of the numbers.

        Raises:
            Fault: a pattern matches no tensor, or the statement is no valid operation.
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
        """Return the values of the placeholders, for every step."""
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
    """Check that a name has the placeholders of the first name, ``keys``."""
    own = [key for key in placeholders(item.pattern) if key != STAR]
    cause = accepted = ""
    if "$" in skeleton(item.pattern) or not keys:
        cause = f"Unknown placeholder in `{item.pattern}`."
        accepted = f"{LAYER}, {EXPERT} and {LAYER_OFFSET}"
    elif len(set(own)) != len(own):
        cause, accepted = f"Duplicate placeholder in `{item.pattern}`.", "each once; other numbers as digits"
    elif set(own) != set(keys):
        cause = f"`{item.pattern}` and the first name have different placeholders."
        accepted = f"every name with {' and '.join(keys)}, or complete names"
    elif LAYER_OFFSET in own and (len(own) > 1 or item.transposed):
        cause = f"{LAYER_OFFSET} is not supported with other placeholders or `^T`."
        accepted = 'permute="[]" in place of `^T`; digits in place of other placeholders'
    if cause:
        raise Fault(cause, accepted, item.span)


def _before(number: str) -> str:
    if number == "0":
        raise Fault(f"{LAYER_OFFSET} maps N to N - 1, and a tensor has N = 0.", LAYER)
    return str(int(number) - 1)
