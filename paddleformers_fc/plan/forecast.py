"""Forecast the cost of a load on every rank of a simulated grid, without a model, a tensor byte, or the ranks.

The target's layout is simulated from the checkpoint's own configuration. The plan of a rank is derived as in a load,
shard by shard. Its cost depends only on the pattern that fills a shard. A shard of many ranks is therefore looked up
once, and a pattern is costed once. Replicas have one cost.

The page of a plan also shows the bytes that each rank reads from each writer, by parameter with its states. A flex
checkpoint has one writer per saving rank; every other format has one per file.

Time: linear in the shards of the ranks that differ, one look-up each. Memory: a few hundred bytes per distinct shard;
for a page, the table of ranks by writers and a row per parameter.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec import structs

from paddleformers_fc.aoa import AoaTensor
from paddleformers_fc.errors import OptionError
from paddleformers_fc.families import OptionalNames, described_by_file, family_for
from paddleformers_fc.families.names import tied_sources
from paddleformers_fc.families.stated import no_family
from paddleformers_fc.formats import OpenedCheckpoint
from paddleformers_fc.formats.checkpoint import CONFIG_NAME, not_a_flex_checkpoint
from paddleformers_fc.formats.flex import FLEX
from paddleformers_fc.layout.grid import ParallelGrid, parse_grid
from paddleformers_fc.layout.roles import (
    EMA_STATE,
    MASTER_WEIGHT,
    MODEL_STATE,
    OPTIMIZER_STATE,
    StateDescriptor,
    split_state_name,
    stored_optimizer,
)
from paddleformers_fc.layout.shards import Shard, shard_bytes
from paddleformers_fc.plan.build import FillPattern, Planner, ReadSource, regrouped
from paddleformers_fc.plan.items import ReadItem
from paddleformers_fc.plan.report import CHECKPOINT, OPEN_WEIGHTS, Report
from paddleformers_fc.plan.simulate import SimulatedModel, declared_model, stored_model
from paddleformers_fc.plan.sources import huggingface_source, resume_source, stored_tensors
from paddleformers_fc.plan.statements import statements_source
from paddleformers_fc.storage.dtypes import dtype_size, model_dtype
from paddleformers_fc.storage.executor import DEFAULT_OPTIONS, IMAGE_BYTES
from paddleformers_fc.storage.operations import DENSE_RUN, SHORT_RUN, bytes_read, row_major, strided_axes
from paddleformers_fc.text import natural

DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes that a target model can have."""

_MOST_RANKS = 1 << 16
"""Bound on the ranks of a plan, which lists every one of them."""

_RANK_FILE = re.compile(r"[^/]+/rank-0*(\d+)(-\d+)?\.safetensors")


class RankForecast(msgspec.Struct, frozen=True):
    """The forecast for one rank.

    Attributes:
        rank: its number.
        bytes: of the weights and states that it holds.
        read: bytes it reads from storage.
        items: read items of its plan.
        peak: bytes of its tensors and of the scratch memory that its reads need at a time.
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


class GridPlan(msgspec.Struct, frozen=True):
    """The forecast of a load onto a grid, with the sums of all ranks.

    Attributes:
        path: the directory as it was named.
        to: the target grid.
        dtype: the target model's dtype.
        world_size: number of target ranks.
        bytes: of the weights and states that all target ranks hold.
        read: bytes that all of them read.
        amplification: bytes read over bytes held.
        peak: maximum bytes that a rank needs for its tensors and its scratch memory.
        items: read items of all ranks.
        fresh: tensors that keep their initial values.
        dropped: stored tensors that no rank reads.
        cast: weights whose element type changes.
        ranks: by rank.
    """

    path: str
    to: str
    dtype: str
    world_size: int
    bytes: int
    read: int
    amplification: float
    peak: int
    items: int
    fresh: list[str]
    dropped: list[str]
    cast: list[CastFacts]
    ranks: list[RankForecast]


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


class _Cost(NamedTuple):
    """Bytes held and read, read items, and the largest scratch memory of a read."""

    held: int = 0
    read: int = 0
    items: int = 0
    scratch: int = 0


def _total(costs: Iterator[_Cost]) -> _Cost:
    held, read, items, scratch = zip(_Cost(), *costs, strict=True)
    return _Cost(sum(held), sum(read), sum(items), max(scratch))


class _Row(msgspec.Struct):
    """A parameter while it is collected."""

    shape: tuple[int, ...] = ()
    dtype: str = ""
    bytes: int = 0
    ranks: set[int] = set()
    shards: set[object] = set()
    writers: set[str] = set()
    states: dict[str, None] = {}


class PlannedLoad:
    """A load of a checkpoint onto every rank of a simulated model.

    Args:
        source: the stored tensors, and the mapping of their names to the model's.
        model: the model over its grid.
        report: the mismatches found before.
        may_be_left: stored parameters that no rank need read.
        optional: the names that open weights may have and a model lack; None for a flex checkpoint.
    """

    def __init__(
        self,
        source: ReadSource,
        model: SimulatedModel,
        report: Report,
        may_be_left: Collection[str] = (),
        optional: OptionalNames | None = None,
    ) -> None:
        self.source, self.model = source, model
        self._report, self._may_be_left, self._optional = report, may_be_left, optional
        self._roles = source.catalog.roles
        states = self._roles.get(OPTIMIZER_STATE, {})
        optimizer = stored_optimizer({name: (one.dtype, one.shape) for name, one in states.items()})
        self._states = structs.replace(
            optimizer, states=(*optimizer.states, StateDescriptor(EMA_STATE, dtype="float32"))
        )
        owners = source.stored_aliases
        self._averages = {owners.get(name, name) for name in self._roles.get(EMA_STATE, ())}
        self._planner = Planner(source)
        self._shards: dict[tuple[object, ...], _Cost] = {}
        self._patterns: dict[tuple[FillPattern, str], _Cost] = {}
        self._fresh: set[str] = set()
        self._cast: dict[str, CastFacts] = {}

    def plan(self) -> GridPlan:
        """Return the forecast of every rank.

        Raises:
            MismatchError: stored and wanted do not fit, with the report of a load.
        """
        grid, replicas = self.model.grid, dict[object, _Cost]()
        ranks: list[RankForecast] = []
        for rank in range(grid.world_size):
            place = structs.replace(grid.coordinates(rank), dp=0)
            if place not in replicas:
                replicas[place] = _total(self._cost(role, shard) for role, shard in self._wanted(rank))
            cost = replicas[place]
            peak = cost.held + DEFAULT_OPTIONS.threads * cost.scratch
            ranks.append(RankForecast(rank, cost.held, cost.read, cost.items, peak))
        dropped = self._dropped()
        held, read = sum(rank.bytes for rank in ranks), sum(rank.read for rank in ranks)
        return GridPlan(
            path=str(self.source.catalog.root),
            to=str(grid),
            dtype=model_dtype({tensor.dtype for tensor in self.model.tensors}),
            world_size=grid.world_size,
            bytes=held,
            read=read,
            amplification=round(read / held, 4) if held else 1.0,
            peak=max(rank.peak for rank in ranks),
            items=sum(rank.items for rank in ranks),
            fresh=sorted(self._fresh, key=natural),
            dropped=dropped,
            cast=list(self._cast.values()),
            ranks=ranks,
        )

    def flows(self) -> PlanFlows:
        """Return the forecast with the writers that every rank reads from.

        Raises:
            MismatchError: as :meth:`plan`.
        """
        plan, rows, reads = self.plan(), dict[str, _Row](), list[Counter[str]]()
        sources: dict[tuple[object, ...], Counter[str]] = {}
        for rank in range(plan.world_size):
            reads.append(Counter())
            for role, shard in self._wanted(rank):
                key = _key(role, shard)
                if key not in sources:
                    sources[key] = self._sources(role, shard)
                reads[rank].update(sources[key])
                state = split_state_name(role, shard.name, shard.global_shape)
                row = rows.setdefault(state.parameter, _Row())
                row.bytes += sources[key].total()
                row.writers.update(sources[key])
                row.ranks.add(rank)
                if role == MODEL_STATE:
                    row.shape, row.dtype = shard.global_shape, shard.dtype
                    row.shards.add(key)
                else:
                    row.states[state.suffix.lstrip(".") or role] = None
        writers = sorted({one for found in reads for one in found}, key=lambda name: natural(name.replace(" ", ".")))
        index = {name: number for number, name in enumerate(writers)}
        numbered = [{index[name]: count for name, count in sorted(found.items())} for found in reads]
        return PlanFlows(plan, writers, numbered, [self._flow(name, rows[name]) for name in sorted(rows, key=natural)])

    def _flow(self, name: str, row: _Row) -> ParameterFlow:
        dtype = f"{self._cast[name].stored} -> {row.dtype}" if name in self._cast else row.dtype
        counts = len(row.ranks), len(row.shards), len(row.writers)
        return ParameterFlow(name, row.shape, dtype, row.bytes, *counts, list(row.states))

    def _sources(self, role: str, shard: Shard) -> Counter[str]:
        """Return the bytes that are read for a shard, by writer."""
        found: Counter[str] = Counter()
        for item in self._planner.items(role, shard):
            saved = _RANK_FILE.fullmatch(item.stored.file)
            writer = f"rank {saved.group(1)}" if saved else item.stored.file
            found[writer] += cost_of(item, shard.dtype)[0]
        return found

    def _wanted(self, rank: int) -> Iterator[tuple[str, Shard]]:
        """Yield role and shard of the weights that one rank holds, and of the states that it keeps."""
        if MODEL_STATE in self._roles:
            yield from ((MODEL_STATE, shard) for shard in self.model.weights(rank).values())
        for role, state in self.model.states(rank, self._states):
            if role in self._roles and (role != EMA_STATE or self._has_average(state.name)):
                yield role, state

    def _has_average(self, parameter: str) -> bool:
        """Return whether there is an average of a wanted parameter; there is none of frozen ones."""
        made = self.source.mapping.made.get(self.source.wanted_aliases.get(parameter, parameter))
        return bool(self._averages) and made is not None and self._averages.issuperset(made.names)

    def _cost(self, role: str, shard: Shard) -> _Cost:
        key = _key(role, shard)
        if key not in self._shards:
            self._shards[key] = self._planned(role, shard)
        return self._shards[key]

    def _planned(self, role: str, shard: Shard) -> _Cost:
        filling, held = self._planner.filling(role, shard), shard_bytes(shard)
        if filling is None:
            # A shard that does not fit is in the report, and the report is an error.
            self._fresh.add(shard.name)
            return _Cost(held)
        for tensor in filling.tensors:
            if tensor.dtype != shard.dtype:
                self._cast[shard.name] = CastFacts(shard.name, tensor.dtype, shard.dtype)
        key = (filling.pattern, shard.dtype)
        if key not in self._patterns:
            costs = (cost_of(item, shard.dtype) for item in filling.items(role, shard.name))
            self._patterns[key] = _total(_Cost(0, read, 1, scratch) for read, scratch in costs)
        return self._patterns[key]._replace(held=held)

    def _dropped(self) -> list[str]:
        """Return the stored tensors that no rank reads.

        Raises:
            MismatchError: a rank must read one of them, or the report has another line.
        """
        touched, report = self._planner.touched, self._planner.report.merge([self._report])
        dropped = [name for role, names in self._roles.items() for name in names if name not in touched.get(role, ())]
        dropped.sort(key=natural)
        for name in self._unexpected(dropped):
            report.add("unexpected", name)
        stored = CHECKPOINT if self._optional is None else OPEN_WEIGHTS
        report.raise_error(str(self.source.catalog.root), stored=stored)
        return dropped

    def _unexpected(self, dropped: Sequence[str]) -> list[str]:
        if self._optional is not None:
            return self._optional.missed(dropped, self._roles[MODEL_STATE])
        return [name for name in dropped if split_state_name(MASTER_WEIGHT, name).parameter not in self._may_be_left]


def _key(role: str, shard: Shard) -> tuple[object, ...]:
    """Return what distinguishes the shards of one model."""
    return role, shard.name, shard.box.lo, shard.flat


def cost_of(item: ReadItem, dtype: str) -> tuple[int, int]:
    """Return the bytes read from storage for one item, and those of its scratch memory, with default options.

    Args:
        item: the item.
        dtype: element type of the wanted shard.
    """
    stored = item.stored
    size = stored.part.shape
    widths = dtype_size(stored.dtype), dtype_size(dtype)
    wanted = row_major(item.shape, widths[1])
    # A stored axis that no wanted axis reads has length one, and its stride means nothing.
    targets = {axis: wanted[index] for index, axis in enumerate(item.axes)}
    by_axis = tuple(targets.get(axis, 0) for axis in range(len(size)))
    if 0 in size:
        return 0, 0
    lengths, sources, strides = strided_axes(size, row_major(stored.shape, widths[0]), by_axis, widths)
    is_run = stored.dtype == dtype and strides[-1] == widths[1]
    is_dense = sources == row_major(lengths, widths[0])
    is_direct = is_run and (len(lengths) == 1 or lengths[-1] * widths[1] >= (DENSE_RUN if is_dense else SHORT_RUN))
    # An image of the file, and as much scratch memory.
    return bytes_read(lengths, sources, widths[0]), 0 if is_direct else 2 * IMAGE_BYTES


def plan_load(
    checkpoint: OpenedCheckpoint,
    to: str,
    dtype: str | None = None,
    aoa_config: Mapping[str, object] | None = None,
) -> PlannedLoad:
    """Plan a load of an opened checkpoint onto every rank of a grid.

    Args:
        checkpoint: a flex checkpoint, or open weights with their ``config.json``.
        to: the grid, such as ``tp=2,pp=2``.
        dtype: the target model's dtype; by default the stored one.
        aoa_config: statements from stored names to the model's; a flex checkpoint alone takes them.
    Raises:
        OptionError: the grid or the dtype is invalid, or the model cannot have the grid.
        NotACheckpoint: no model can be filled from a checkpoint of this format.
        MappingError: the model has no family.
        FlexError: the stored tensors do not fit the model of their configuration.
    """
    grid, root, format = _parse_target(to, dtype), checkpoint.catalog.root, checkpoint.format
    if not format.loadable:
        raise not_a_flex_checkpoint(format, root)
    if format is FLEX and "model_type" not in checkpoint.known.config:
        raise no_family(str(root))
    if format is not FLEX and not checkpoint.config:
        raise OptionError(
            "The target's layout follows from the model's configuration, and there is none.",
            where=str(root / CONFIG_NAME),
            next_step="Put the model's config.json beside its weights.",
        )
    described = described_by_file(checkpoint.config) if format.canonical else checkpoint.known
    family, stored = family_for(described.config), checkpoint.catalog.roles[MODEL_STATE]
    if format.canonical and aoa_config is not None:
        raise OptionError(
            "aoa_config applies to a resume, and open weights are read by the names of their family.",
            where=str(root),
            next_step="Leave out --aoa-config (aoa_config=), or name a flex checkpoint.",
        )
    if format.canonical:
        used = dtype or model_dtype({tensor.dtype for tensor in stored.values()})
        model = declared_model(family, described, grid, used)
        optional, aliases = OptionalNames(family, described), tied_sources(family, described)
        source, report = huggingface_source(checkpoint.catalog, model.rules, optional, aliases)
        return PlannedLoad(source, model, report, optional=optional)
    model = stored_model(family, described, grid, checkpoint.rules.targets, dtype)
    if aoa_config is None:
        source, report = resume_source(checkpoint, model.rules)
    else:
        tensors = {one.name: AoaTensor(one.shape, one.dtype, one.cuts) for one in stored_tensors(model.rules)}
        source, report = statements_source(checkpoint, described, aoa_config, tensors)
    for line in regrouped(source):
        report.add("shape", line)
    return PlannedLoad(source, model, report, source.mapping.dropped if aoa_config else checkpoint.rules.fresh)


def _parse_target(to: str, dtype: str | None) -> ParallelGrid:
    """Return the grid of a plan.

    Raises:
        OptionError: the grid is invalid, or the dtype unknown.
    """
    if not to.strip():
        raise OptionError(
            "The grid to plan for is empty.", where="--to", next_step="Write it as in tp=2,pp=2, or dp=1 for one rank."
        )
    if dtype not in (None, *DTYPES):
        raise OptionError(
            f"The dtype {dtype!r} is unknown.",
            where="--dtype",
            evidence=[f"known: {', '.join(DTYPES)}"],
            next_step="Give one of them.",
        )
    grid = parse_grid(to)
    if grid.world_size > _MOST_RANKS:
        raise OptionError(
            f"The grid {to!r} has {grid.world_size} ranks.",
            where="--to",
            evidence=[f"a plan has at most {_MOST_RANKS} ranks"],
            next_step="Choose smaller degrees.",
        )
    return grid
