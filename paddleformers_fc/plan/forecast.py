"""What a load would cost on every rank of a simulated grid, without a model, a tensor byte, or the ranks.

The plan of a rank is worked out as a load would, shard by shard. Idea: its cost depends on nothing but the shard and
where its sources lie, so a shard that many ranks hold is planned once, and so are the states of a parameter that are
stored alike. Of a plan only four numbers are kept.

Time: linear in the distinct shards of the grid, plus one sum per rank. Memory: the same, a few hundred bytes each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import msgspec

from paddleformers_fc.catalog.stored import StoredTensor
from paddleformers_fc.layout.roles import MASTER_WEIGHT, MODEL_STATE, split_state_name
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.plan.build import Source, plan_reads
from paddleformers_fc.plan.items import ReadItem
from paddleformers_fc.plan.report import Report, natural
from paddleformers_fc.plan.simulate import SimulatedModel, states_of
from paddleformers_fc.storage.dtypes import item_size, to_safetensors
from paddleformers_fc.storage.regions import HOT_BYTES, MAX_OVER_READ, bytes_read, row_major, span_of, walk_of

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
    source: Source, model: SimulatedModel, report: Report, may_drop: Callable[[str], bool] = lambda name: False
) -> Forecast:
    """Plan a load for every rank of a grid.

    Args:
        source: what is stored, and how its names lead to the model's.
        model: the model over its grid.
        report: what was found not to fit before.
        may_drop: whether a stored parameter may be read by nobody; by default none may.
    Raises:
        MismatchError: stored and wanted do not fit, as a load would say it.
    """
    costs = _Costs(source)
    ranks = [_of_rank(rank, costs.of_rank(model, rank)) for rank in range(model.grid.world_size)]
    merged = costs.report.merge([report])
    dropped = sorted(costs.untouched(), key=natural)
    for name in dropped:
        if not may_drop(split_state_name(MASTER_WEIGHT, name).parameter):
            merged.add("unexpected", name)
    merged.refuse(str(source.catalog.root))
    return Forecast(ranks, sorted(costs.fresh, key=natural), dropped, list(costs.cast.values()))


def _of_rank(rank: int, cost: Cost) -> RankForecast:
    return RankForecast(rank, cost.held, cost.read, cost.items, cost.held + THREADS * cost.staging)


class _Costs:
    """Costs of shards, each worked out once, and what was learnt on the way."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._roles = source.catalog.roles
        self._aliases: dict[str, list[str]] = {}
        for alias, owner in source.stored_aliases.items():
            self._aliases.setdefault(owner, []).append(alias)
        self._stored_alike: dict[tuple[object, ...], int] = {}
        self._alike: dict[tuple[str, str], int] = {}
        self._known: dict[tuple[object, ...], Cost] = {}
        self._weights: dict[tuple[int, ...], Cost] = {}
        self._wanted: dict[str, set[str]] = {role: set() for role in self._roles}
        self.report = Report()
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
        state = split_state_name(role, shard.name)
        key = (
            role == MODEL_STATE,
            state.parameter,
            state.scalar,
            shard.box.lo,
            shard.flat,
            self._likeness(role, shard),
        )
        cost = self._known.get(key)
        if cost is None:
            cost = self._known[key] = self._planned(role, shard)
        return cost

    def _likeness(self, role: str, shard: Shard) -> int:
        """A number that two wanted tensors share where their sources lie alike, whatever files those are in."""
        key = (role, shard.name)
        if key not in self._alike:
            self._wanted[role].add(shard.name)
            sources = list(self._sources(role, shard.name))
            # What is not stored, or shaped otherwise, is to be reported under its own name.
            form = (shard.dtype, shard.global_shape, *map(_form, sources)) if None not in sources else key
            self._alike[key] = self._stored_alike.setdefault(form, len(self._stored_alike))
        return self._alike[key]

    def _sources(self, role: str, name: str) -> Iterator[StoredTensor | None]:
        state = split_state_name(role, name)
        parameter = self._source.wanted_aliases.get(state.parameter, state.parameter)
        for source in dict.fromkeys(link.source for link in self._source.mapping.by_target.get(parameter, ())):
            for candidate in (source, *self._aliases.get(source, ())):
                yield self._roles[role].get(candidate + state.suffix)

    def _planned(self, role: str, shard: Shard) -> Cost:
        plan = plan_reads(self._source, {role: {shard.name: shard}})
        self.report = self.report.merge([plan.report]) if not plan.report.empty else self.report
        held = shard.size * item_size(to_safetensors(shard.dtype))
        cost = Cost(held)
        for item in plan.items:
            read, staging = cost_of(item, shard.dtype)
            cost += Cost(0, read, 1, staging)
            if item.stored.dtype != shard.dtype:
                self.cast[shard.name] = CastFacts(shard.name, item.stored.dtype, shard.dtype)
        if not plan.items and plan.report.empty and shard.size:
            self.fresh.add(shard.name)
        return cost

    def untouched(self) -> Iterator[str]:
        """Stored names that no wanted tensor is made of."""
        for role, tensors in self._roles.items():
            touched = {
                tensor.name for name in self._wanted[role] for tensor in self._sources(role, name) if tensor is not None
            }
            yield from (name for name in tensors if name not in touched)


def _form(tensor: StoredTensor | None) -> object:
    return tensor and (tensor.dtype, tensor.shape, tuple(fragment.box for fragment in tensor.fragments))


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
    walk = walk_of(size, row_major(stored.shape, widths[0]), tuple(targets.get(i, 0) for i in range(len(size))), widths)
    straight = stored.dtype == dtype and walk.targets[-1] == widths[1] and span_of(walk, HOT_BYTES, MAX_OVER_READ) == 1
    read = bytes_read(walk, widths[0])
    return read, 0 if straight else min(HOT_BYTES, read)
