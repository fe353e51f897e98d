"""The order of blocks in which no name is overwritten before it is read.

Statements are carried out one after the other, and a name stands for what was assigned to it last. Where a tensor of
the right side bears the name of a tensor of the left side that another block reads, that block goes first. Blocks that
wait for each other in a ring, and those behind them, read copies that were set aside. Linear in the names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paddleformers_fc.aoa.blocks import Block


@dataclass(frozen=True)
class BlockOrder:
    """Blocks by their places in the list.

    Args:
        free: blocks that share no name with another.
        ranks: the others: every block stands in a later rank than those that read what it overwrites.
        aside: blocks that cannot be ranked; their sources are set aside before the first rank, and they come last.
    """

    free: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    aside: tuple[int, ...]


def ordered(blocks: Sequence[Block]) -> BlockOrder:
    """The order of blocks."""
    reader = {name: place for place, block in enumerate(blocks) for name in block.sources}
    before: dict[int, set[int]] = {}
    bound: set[int] = set()
    for place, block in enumerate(blocks):
        firsts = {reader[name] for name in block.targets if name in reader} - {place}
        if firsts:
            before[place] = firsts
            bound |= firsts | {place}
    ranks, aside = _ranked(sorted(bound), before)
    return BlockOrder(tuple(place for place in range(len(blocks)) if place not in bound), ranks, aside)


def _ranked(places: list[int], before: dict[int, set[int]]) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    after: dict[int, list[int]] = {}
    for place, firsts in before.items():
        for first in firsts:
            after.setdefault(first, []).append(place)
    waiting = {place: len(before.get(place, ())) for place in places}
    rank = [place for place in places if not waiting[place]]
    ranks: list[tuple[int, ...]] = []
    while rank:
        ranks.append(tuple(rank))
        for place in ranks[-1]:
            for following in after.get(place, ()):
                waiting[following] -= 1
        rank = sorted({one for place in ranks[-1] for one in after.get(place, ()) if not waiting[one]})
    return tuple(ranks), tuple(place for place in places if waiting[place])
