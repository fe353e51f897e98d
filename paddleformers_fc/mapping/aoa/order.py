"""The order of blocks in which no name is overwritten before it is read.

Statements are carried out one after the other, and a name stands for what was assigned to it last. Where a tensor of
the right side bears the name of a tensor of the left side that another block reads, that block goes first. Blocks that
wait for each other in a ring, and those behind them, read copies that were set aside. Linear in the names.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from paddleformers_fc.mapping.aoa.blocks import Block


@dataclass(frozen=True)
class Order:
    """Blocks by their places in the list.

    Args:
        free: blocks that share no name with another.
        bound: the others, each behind those that read what it overwrites.
        aside: blocks among ``bound`` whose sources must be set aside before all of them.
    """

    free: tuple[int, ...]
    bound: tuple[int, ...]
    aside: tuple[int, ...]


def ordered(blocks: Sequence[Block]) -> Order:
    """The order of blocks."""
    reader = {name: place for place, block in enumerate(blocks) for name in block.sources}
    before: dict[int, set[int]] = {}
    bound: set[int] = set()
    for place, block in enumerate(blocks):
        firsts = {reader[name] for name in block.targets if name in reader} - {place}
        if firsts:
            before[place] = firsts
            bound |= firsts | {place}
    line, aside = _sorted(sorted(bound), before)
    return Order(tuple(place for place in range(len(blocks)) if place not in bound), line, aside)


def _sorted(places: list[int], before: dict[int, set[int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    after: dict[int, list[int]] = {}
    for place, firsts in before.items():
        for first in firsts:
            after.setdefault(first, []).append(place)
    waiting = {place: len(before.get(place, ())) for place in places}
    ready = deque(place for place in places if not waiting[place])
    line: list[int] = []
    while ready:
        place = ready.popleft()
        line.append(place)
        for following in after.get(place, ()):
            waiting[following] -= 1
            if not waiting[following]:
                ready.append(following)
    aside = tuple(place for place in places if waiting[place])
    return (*line, *aside), aside
