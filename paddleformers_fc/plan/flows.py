"""The bytes that each rank of a grid reads from each writer, by tensor: the content of a plan's picture.

The shards are those of a forecast (:mod:`.forecast`). A flex checkpoint has one writer per saving rank; every other
format has one per file. Parameters are listed once, together with their states.

Time: one look-up per shard of every rank. Memory: the table of ranks by writers, and a row per parameter.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from paddleformers_fc.formats import OpenedCheckpoint
from paddleformers_fc.layout.roles import MODEL_STATE, split_state_name
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.plan.forecast import (
    GridPlan,
    PlannedShards,
    cost_of,
    parse_plan_target,
    plan_for_grid,
    plan_target,
)
from paddleformers_fc.plan.simulate import SimulatedModel
from paddleformers_fc.text import natural

_RANK_FILE = re.compile(r"[^/]+/rank-0*(\d+)(-\d+)?\.safetensors")


class ParameterFlow(msgspec.Struct, frozen=True):
    """One parameter with its states.

    Attributes:
        name: its name in the model.
        shape: global shape.
        dtype: of the weight; ``float32 -> bfloat16`` if it is cast.
        bytes: that all ranks read for it and its states.
        ranks: how many ranks hold a part of it.
        shards: distinct shards of the weight.
        writers: how many writers it is read from.
        states: the kinds of states that are read with it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    ranks: int
    shards: int
    writers: int
    states: list[str]


class PlanFlows(msgspec.Struct, frozen=True):
    """A plan, with the source and the reader of every range.

    Attributes:
        plan: the forecast of every rank.
        writers: names of the sources: ranks of the run that saved, or files.
        reads: for every rank the bytes that it reads, by index of the writer.
        parameters: in natural order.
    """

    plan: GridPlan
    writers: list[str]
    reads: list[dict[int, int]]
    parameters: list[ParameterFlow]


@dataclass
class _Row:
    """A parameter while it is collected."""

    shape: tuple[int, ...] = ()
    dtype: str = ""
    bytes: int = 0
    last: int = -1
    ranks: int = 0
    shards: set[object] = field(default_factory=set)
    writers: set[str] = field(default_factory=set)
    states: dict[str, None] = field(default_factory=dict)


def plan_flows(
    checkpoint: OpenedCheckpoint, to: str, dtype: str | None = None, aoa_config: Mapping[str, object] | None = None
) -> PlanFlows:
    """Plan a load for every rank of a grid, as :func:`~.forecast.plan_for_grid` does, with the sources of all bytes.

    Raises:
        FlexError: as for a plan.
    """
    plan = plan_for_grid(checkpoint, to, dtype, aoa_config)
    target = plan_target(checkpoint, parse_plan_target(to, dtype), dtype, aoa_config)
    collector = _Collector(PlannedShards(target.source), target.model, {cast.name: cast.stored for cast in plan.cast})
    reads = [collector.rank(rank) for rank in range(plan.world_size)]
    writers = sorted({writer for found in reads for writer in found}, key=lambda name: natural(name.replace(" ", ".")))
    index = {name: number for number, name in enumerate(writers)}
    numbered = [{index[name]: count for name, count in sorted(found.items())} for found in reads]
    return PlanFlows(plan, writers, numbered, list(collector.parameters()))


class _Collector:
    """Adds up the reads of ranks; the sources of a shard are worked out once."""

    def __init__(self, shards: PlannedShards, model: SimulatedModel, cast: Mapping[str, str]) -> None:
        self._shards, self._model, self._cast = shards, model, cast
        self._known: dict[tuple[object, ...], Counter[str]] = {}
        self._rows: dict[str, _Row] = {}

    def rank(self, rank: int) -> Counter[str]:
        """Return the bytes that a rank reads, by writer."""
        total: Counter[str] = Counter()
        for role, shard in self._wanted(rank):
            found = self._sources(role, shard)
            total.update(found)
            self._note(rank, role, shard, found)
        return total

    def _wanted(self, rank: int) -> Iterable[tuple[str, Shard]]:
        yield from self._shards.weights(self._model, rank)
        yield from self._shards.states(self._model, rank)

    def _sources(self, role: str, shard: Shard) -> Counter[str]:
        key = (role, shard.name, shard.box.lo, shard.flat)
        if key not in self._known:
            filling = self._shards.planner.filling(role, shard)
            found: Counter[str] = Counter()
            for item in filling.items(role, shard.name) if filling is not None else ():
                found[_writer(item.stored.file)] += cost_of(item, shard.dtype)[0]
            self._known[key] = found
        return self._known[key]

    def _note(self, rank: int, role: str, shard: Shard, found: Counter[str]) -> None:
        state = split_state_name(role, shard.name, shard.global_shape)
        row = self._rows.setdefault(state.parameter, _Row())
        row.bytes += found.total()
        row.writers.update(found)
        if row.last != rank:
            row.last, row.ranks = rank, row.ranks + 1
        if role == MODEL_STATE:
            row.shape, row.dtype = shard.global_shape, shard.dtype
            row.shards.add((shard.box.lo, shard.flat))
        else:
            row.states[state.suffix.lstrip(".") or role] = None

    def parameters(self) -> Iterator[ParameterFlow]:
        """Yield every parameter that some rank holds."""
        for name in sorted(self._rows, key=natural):
            row = self._rows[name]
            dtype = f"{self._cast[name]} -> {row.dtype}" if name in self._cast else row.dtype
            yield ParameterFlow(
                name, row.shape, dtype, row.bytes, row.ranks, len(row.shards), len(row.writers), list(row.states)
            )


def _writer(file: str) -> str:
    found = _RANK_FILE.fullmatch(file)
    return f"rank {found.group(1)}" if found else file
