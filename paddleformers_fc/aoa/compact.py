"""Combine statements that differ only in numbers into one with placeholders, if it is exact.

Placeholders take their numbers from the tensors that match the first name, in all combinations. Statements are combined
only if these tensors are exactly theirs. Linear in the statements and in the tensors that their patterns match.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from paddleformers_fc.aoa.names import EXPERT, LAYER, NameIndex
from paddleformers_fc.aoa.statement_text import Text

_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=[.^\[]|$)")
_BASE = re.compile(r"[^\^\[]*")
_CHOICES = ((0, 1), (1,), (0,))
"""The positions of numbers that become placeholders; those that combine most statements come first."""

ComponentTexts = Sequence[Text]
Numbers = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Pattern:
    """Statements with placeholders, and the numbers of one component."""

    texts: tuple[Text, ...]
    numbers: Numbers


def compacted(components: Sequence[ComponentTexts], index: NameIndex) -> list[str]:
    """Return as few statements as possible for all components.

    Args:
        components: the statements of every component.
        index: the names of the left side.
    Returns:
        statements, in the order of the components; those of one component keep their order.
    """
    placed: dict[int, list[str]] = {}
    waiting = [number for number, component in enumerate(components) if component]
    for positions in _CHOICES:
        groups: dict[tuple[Text, ...], list[tuple[int, Numbers]]] = {}
        for number in waiting:
            pattern = _pattern(components[number], positions)
            if pattern is not None:
                groups.setdefault(pattern.texts, []).append((number, pattern.numbers))
        done: set[int] = set()
        for texts, members in groups.items():
            numbers = {entry for _, entry in members}
            if _exact(texts[0], numbers, index):
                placed[members[0][0]] = _group(texts, members, components, index)
                done.update(number for number, _ in members)
        waiting = [number for number in waiting if number not in done]
    for number in waiting:
        placed[number] = [str(text) for text in components[number]]
    return [text for number in sorted(placed) for text in placed[number]]


def _group(
    texts: tuple[Text, ...], members: list[tuple[int, Numbers]], components: Sequence[ComponentTexts], index: NameIndex
) -> list[str]:
    """Return a group's statements; a statement that is not exact is written once per member."""
    numbers = {entry for _, entry in members}
    statements: list[str] = []
    for at, text in enumerate(texts):
        if _exact(text, numbers, index):
            statements.append(str(text))
        else:
            statements += [str(components[number][at]) for number, _ in members]
    return statements


def _exact(text: Text, numbers: set[Numbers], index: NameIndex) -> bool:
    columns = [{entry[at] for entry in numbers} for at in range(len(next(iter(numbers))))]
    if prod(map(len, columns)) != len(numbers):
        return False
    base = _BASE.match(text.left[0])
    matched = index.matches(base.group()) if base else []
    return len(matched) == len(numbers) and {entry for _, entry in matched} == numbers


def _pattern(component: ComponentTexts, positions: tuple[int, ...]) -> _Pattern | None:
    """Return the statements with placeholders at these positions, or None if names differ in these numbers."""
    first = component[0].left[0]
    found = list(_NUMBER.finditer(first))
    if len(found) <= max(positions):
        return None
    numbers = tuple(found[position].group() for position in positions)
    expert = EXPERT if first[: found[positions[-1]].start()].endswith("experts.") or len(positions) > 1 else LAYER
    names = dict(zip(positions, (LAYER, expert)[-len(positions) :], strict=True))

    def patterned(item: str) -> str | None:
        places = list(_NUMBER.finditer(item))
        if len(places) <= max(positions) or any(
            places[position].group() != number for position, number in zip(positions, numbers, strict=True)
        ):
            return None
        for position in reversed(positions):
            begin, end = places[position].span()
            item = item[:begin] + names[position] + item[end:]
        return item

    texts: list[Text] = []
    for text in component:
        left, right = [patterned(item) for item in text.left], [patterned(item) for item in text.right]
        known_left, known_right = [item for item in left if item], [item for item in right if item]
        if len(known_left) < len(left) or len(known_right) < len(right):
            return None
        texts.append(replace(text, left=tuple(known_left), right=tuple(known_right)))
    return _Pattern(tuple(texts), numbers)
