"""What a load would cost on every rank of a simulated grid, without a model, a tensor byte, or the ranks.

The plan of a rank is worked out as a load would, shard by shard. Idea: its cost depends on nothing but the pattern that
fills a shard, so a shard that many ranks hold is looked up once, and a pattern is costed once. Of a plan only four
numbers are kept.

Time: linear in the distinct shards of the grid, plus one sum per rank. Memory: the same, a few hundred bytes each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.plan.build import FillPattern, Planner, ReadSource, ShardFill
from paddleformers_fc.plan.items import ReadItem
from paddleformers_fc.plan.report import Report, natural
from paddleformers_fc.plan.simulate import SimulatedModel, states_of
from paddleformers_fc.storage.dtypes import item_size, to_safetensors
from paddleformers_fc.storage.regions import (
    HOT_BYTES,
    MAX_OVER_READ,
    bytes_read,
    is_direct,
    row_major,
    span_of,
    strided_axes,
)

THREADS = 4
"""How many threads of a load read at a time, unless it is told otherwise."""


class RankForecast(msgspec.Struct, frozen=True):
    """What one rank would do.

    Attributes:
        rank: its number.
        bytes: of the weights and states that it holds.
        read: bytes it reads from storage.
        items: read items of its plan.
        peak: bytes of what it holds and of the scratch memory that its reads need at a time.
    """

    rank: int
    bytes: int
    read: int
    items: int
    peak: int


class CastFacts(msgspec.Struct, frozen=True):
    """A tensor whose numbers change their type on the way.

    Attributes:
        name: its name in the model.
        stored: element type in the checkpoint.
        wanted: element type in the model.
    """

    name: str
    stored: str
    wanted: str


class Forecast(msgspec.Struct, frozen=True):
    """What a load onto a grid would do.

    Attributes:
        ranks: by rank.
        fresh: wanted tensors that keep their initial values, by full name.
        dropped: stored tensors of the wanted roles that no rank reads, by full name.
        cast: weights whose element type changes.
    """

    ranks: list[RankForecast]
    fresh: list[str]
    dropped: list[str]
    cast: list[CastFacts]

    @property
    def amplification(self) -> float:
        """Bytes read over bytes held, of all ranks together."""
        held = sum(rank.bytes for rank in self.ranks)
        return sum(rank.read for rank in self.ranks) / held if held else 1.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes held and read, read items, and the largest scratch memory of some shards."""

    held: int = 0
    read: int = 0
    items: int = 0
    staging: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.held + other.held,
            self.read + other.read,
            self.items + other.items,
            max(self.staging, other.staging),
        )


def forecast(
    source: ReadSource,
    model: SimulatedModel,
    report: Report,
    unexpected: Callable[[Sequence[str]], Iterable[str]] = lambda untouched: untouched,
) -> Forecast:
    """Plan a load for every rank of a grid.

    Args:
        source: what is stored, and how its names lead to the model's.
        model: the model over its grid.
        report: what was found not to fit before.
        unexpected: of the stored tensors that no rank reads, those that somebody should; by default all of them.
    Raises:
        MismatchError: stored and wanted do not fit, as a load would say it.
    """
    costs = _Costs(source)
    ranks = [_of_rank(rank, costs.of_rank(model, rank)) for rank in range(model.grid.world_size)]
    merged = costs.planner.report.merge([report])
    dropped = sorted(costs.untouched(), key=natural)
    for name in unexpected(dropped):
        merged.add("unexpected", name)
    merged.refuse(str(source.catalog.root))
    return Forecast(ranks, sorted(costs.fresh, key=natural), dropped, list(costs.cast.values()))


def _of_rank(rank: int, cost: Cost) -> RankForecast:
    return RankForecast(rank, cost.held, cost.read, cost.items, cost.held + THREADS * cost.staging)


class _Costs:
    """Costs of shards, each worked out once, and what was learnt on the way."""

    def __init__(self, source: ReadSource) -> None:
        self._roles = source.catalog.roles
        self._known: dict[tuple[object, ...], Cost] = {}
        self._patterns: dict[tuple[FillPattern, str], Cost] = {}
        self._weights: dict[tuple[int, ...], Cost] = {}
        self.planner = Planner(source)
        self.fresh: set[str] = set()
        self.cast: dict[str, CastFacts] = {}

    def of_rank(self, model: SimulatedModel, rank: int) -> Cost:
        """What one rank costs: its weights, which it shares with others, and the states that are its own."""
        place = model.grid.coordinates(rank)
        key = (place.pp, place.tp, place.ep, place.sharding if model.grid.stage == 3 else 0)
        if key not in self._weights:
            self._weights[key] = sum(map(partial(self._of, MODEL_STATE), model.weights(rank).values()), Cost())
        cost = self._weights[key]
        if len(self._roles) > 1:
            for parameter in model.owned(rank).values():
                for role, state in states_of(parameter):
                    if role in self._roles:
                        cost += self._of(role, state)
        return cost

    def _of(self, role: str, shard: Shard) -> Cost:
        key = (role, shard.name, shard.box.lo, shard.flat)
        cost = self._known.get(key)
        if cost is None:
            cost = self._known[key] = self._planned(role, shard)
        return cost

    def _planned(self, role: str, shard: Shard) -> Cost:
        held = Cost(shard.size * item_size(to_safetensors(shard.dtype)))
        filling = self.planner.filling(role, shard)
        if filling is None:
            # Where something does not fit, the report says so, and nothing else is said.
            self.fresh.add(shard.name)
            return held
        for tensor in filling.tensors:
            if tensor.dtype != shard.dtype:
                self.cast[shard.name] = CastFacts(shard.name, tensor.dtype, shard.dtype)
        key = (filling.pattern, shard.dtype)
        if key not in self._patterns:
            self._patterns[key] = sum(_costs(filling, shard.dtype), Cost())
        return held + self._patterns[key]

    def untouched(self) -> Iterator[str]:
        """Stored names that no wanted tensor is made of."""
        for role, tensors in self._roles.items():
            touched = self.planner.touched.get(role, set())
            yield from (name for name in tensors if name not in touched)


def _costs(filling: ShardFill, dtype: str) -> Iterator[Cost]:
    for item in filling.items("", ""):
        read, staging = cost_of(item, dtype)
        yield Cost(0, read, 1, staging)


def cost_of(item: ReadItem, dtype: str) -> tuple[int, int]:
    """Bytes read from storage for one item, and bytes of the scratch memory that it needs, with default options.

    Args:
        item: the item.
        dtype: element type of the wanted shard.
    """
    stored = item.stored
    size = stored.part.shape
    widths = item_size(to_safetensors(stored.dtype)), item_size(to_safetensors(dtype))
    wanted = row_major(item.shape, widths[1])
    # A stored axis that no wanted axis reads has length one, and its stride means nothing.
    targets = {axis: wanted[index] for index, axis in enumerate(item.axes)}
    walk = strided_axes(
        size, row_major(stored.shape, widths[0]), tuple(targets.get(i, 0) for i in range(len(size))), widths
    )
    direct = stored.dtype == dtype and is_direct(walk, widths[1]) and span_of(walk, HOT_BYTES, MAX_OVER_READ) == 1
    return bytes_read(walk, widths[0]), 0 if direct else HOT_BYTES
