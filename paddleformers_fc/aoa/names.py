"""Find tensors by patterns. An index groups names by their skeleton, the text without its numbers.

A pattern with placeholders or a wildcard has a skeleton as well, so that it is compared only with names that can match.
Building is linear in the names; a lookup is linear in the names of one skeleton.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from paddleformers_fc.aoa.faults import Fault

LAYER_OFFSET = "$LAYER_ID_OFFSET"
LAYER = "$LAYER_ID"
EXPERT = "$EXPERT_ID"
STAR = "*"

_HOLE = "\0"
_DIGITS = re.compile(r"[0-9]+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.$*^]*")
# The longer placeholder first: the shorter one begins it.
_PARTS = re.compile(r"(\$LAYER_ID_OFFSET|\$LAYER_ID|\$EXPERT_ID|\*)|([0-9]+)")
_SUGGESTIONS = 5
_LONGEST = 300
_LONGEST_NUMBER = 18
_CANDIDATES = 200


def placeholders(pattern: str) -> list[str]:
    """Return the placeholders and wildcards of a pattern, in order, with repetitions."""
    return [found.group(1) for found in _PARTS.finditer(pattern) if found.group(1)]


def skeleton(name: str) -> str:
    """Return a name or pattern with its numbers and placeholders taken out."""
    return _PARTS.sub(_HOLE, name)


def name_skeletons(text: str) -> set[str]:
    """Return the skeletons of all possible names in a text, also as names of an array."""
    found = {skeleton(name.removesuffix("^T")) for name in _NAME.findall(text)}
    return found | {f"{name}_{_HOLE}" for name in found}


def _is_plain(number: str) -> bool:
    """Return whether a number has the form of a placeholder's number: no leading zero, and a bounded length."""
    return len(number) <= _LONGEST_NUMBER and (number == "0" or number[0] != "0")


class NameIndex:
    """The names of one side.

    Args:
        names: every tensor of the side.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._filed: dict[str, list[tuple[str, list[str]]]] = {}
        self._suggestions = _SUGGESTIONS
        for name in names:
            self._filed.setdefault(_DIGITS.sub(_HOLE, name), []).append((name, _DIGITS.findall(name)))

    def matches(self, pattern: str) -> list[tuple[str, tuple[str, ...]]]:
        """Return every name that a pattern matches, with the numbers of its placeholders.

        Args:
            pattern: a name with placeholders or wildcards.
        Returns:
            names and numbers, in ascending order of the numbers.
        Raises:
            Fault: a placeholder touches a digit, so that the end of its number is ambiguous.
        """
        holes = list(_PARTS.finditer(pattern))
        for one, other in zip(holes, holes[1:], strict=False):
            if one.end() == other.start() and (one.group(1) or other.group(1)):
                raise Fault(f"The end of a number in `{pattern}` is ambiguous.", "a letter or `.` in between")
        fixed = [hole.group(2) for hole in holes]
        hits = [
            (name, tuple(number for number, wanted in zip(numbers, fixed, strict=True) if wanted is None))
            for name, numbers in self._filed.get(skeleton(pattern), ())
            if all(wanted is None or number == wanted for number, wanted in zip(numbers, fixed, strict=True))
        ]
        plain = [hit for hit in hits if all(map(_is_plain, hit[1]))]
        return sorted(plain, key=lambda hit: [(len(number), number) for number in hit[1]])

    def nearest(self, name: str) -> str:
        """Return a tensor with a similar name, or an empty text; only for the first few names."""
        if not self._suggestions or len(name) > _LONGEST:
            return ""
        self._suggestions -= 1
        known = [key for key in self._filed if len(key) <= _LONGEST][:_CANDIDATES]
        near = difflib.get_close_matches(skeleton(name), known, 1)
        if not near:
            return ""
        (found, _), *others = self._filed[near[0]]
        return f"`{found}` or another of {len(others) + 1} such names" if others else f"`{found}`"
