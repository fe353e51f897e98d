"""Forecast the cost of a load on every rank of a simulated grid, without a model, a tensor byte, or the ranks.

The target's layout is simulated from the checkpoint's own configuration. The plan of a rank is derived as in a load,
shard by shard. Its cost depends only on the pattern that fills a shard. A shard of many ranks is therefore looked up
once, and a pattern is costed once. Four numbers of a plan are kept.

Time: linear in the distinct shards of the grid, plus one sum per rank. Memory: the same, a few hundred bytes each.

The bytes that each rank of a grid reads from each writer, by tensor: the content of a plan's picture.

The shards are those of a forecast (:mod:`.forecast`). A flex checkpoint has one writer per saving rank; every other
format has one per file. Parameters are listed once, together with their states.

Time: one look-up per shard of every rank. Memory: the table of ranks by writers, and a row per parameter.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from paddleformers_fc.aoa import AoaTensor
from paddleformers_fc.errors import MappingError, OptionError
from paddleformers_fc.families import OptionalNames, described_by_file, family_for
from paddleformers_fc.families.bind import tied_sources
from paddleformers_fc.families.stated import no_family
from paddleformers_fc.formats import OpenedCheckpoint
from paddleformers_fc.formats.checkpoint import CONFIG_NAME, Format, not_a_flex_checkpoint
from paddleformers_fc.formats.registry import SAVED, require_format
from paddleformers_fc.layout.grid import ParallelGrid, parse_grid
from paddleformers_fc.layout.roles import (
    EMA_STATE,
    MASTER_WEIGHT,
    MODEL_STATE,
    OPTIMIZER_STATE,
    split_state_name,
    stored_optimizer,
)
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.plan.build import FillPattern, Planner, ReadSource, ShardFill, regrouped
from paddleformers_fc.plan.items import ReadItem
from paddleformers_fc.plan.report import Report
from paddleformers_fc.plan.simulate import SimulatedModel, declared_model, states_of, stored_model
from paddleformers_fc.plan.sources import huggingface_source, resume_source, stored_tensors
from paddleformers_fc.plan.statements import statements_source
from paddleformers_fc.storage.dtypes import dtype_size, model_dtype
from paddleformers_fc.storage.executor import IMAGE_BYTES
from paddleformers_fc.storage.operations import SHORT_RUN, bytes_read, row_major, strided_axes
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.text import natural

DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes that a target model can have."""

_MOST_RANKS = 1 << 16
"""Bound on the ranks of a plan, which lists every one of them."""

THREADS = 4
"""Default number of reading threads of a load."""


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


class Forecast(msgspec.Struct, frozen=True):
    """The forecast of a load onto a grid.

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
        source: the stored tensors, and the mapping of their names to the model's.
        model: the model over its grid.
        report: the mismatches found before.
        unexpected: of the stored tensors that no rank reads, those that a rank must read; by default all of them.
    Raises:
        MismatchError: stored and wanted do not fit, with the report of a load.
    """
    return PlannedShards(source).forecast(model, report, unexpected)


class PlannedShards:
    """The wanted shards of every rank, their costs, each computed once, and the mismatches found meanwhile.

    Args:
        source: the stored tensors, and the mapping of their names to the model's.
    Attributes:
        planner: plans their reads.
        fresh: names of those that keep their initial values.
        cast: weights whose element type changes, by name.
    """

    def __init__(self, source: ReadSource) -> None:
        self._source, self._roles = source, source.catalog.roles
        states = self._roles.get(OPTIMIZER_STATE, {})
        self._optimizer = stored_optimizer({name: (one.dtype, one.shape) for name, one in states.items()})
        owners = source.stored_aliases
        self._averages = {owners.get(name, name) for name in self._roles.get(EMA_STATE, ())}
        self._known: dict[tuple[object, ...], Cost] = {}
        self._patterns: dict[tuple[FillPattern, str], Cost] = {}
        self._weights: dict[tuple[int, ...], Cost] = {}
        self.planner = Planner(source)
        self.fresh: set[str] = set()
        self.cast: dict[str, CastFacts] = {}

    def of_rank(self, model: SimulatedModel, rank: int) -> Cost:
        """Return the cost of one rank: its weights, shared with others, and its own states."""
        place = model.grid.coordinates(rank)
        key = (place.pp, place.tp, place.ep, place.sharding if model.grid.stage == 3 else 0)
        if key not in self._weights:
            self._weights[key] = sum((self._of(role, shard) for role, shard in self.weights(model, rank)), Cost())
        return sum((self._of(role, shard) for role, shard in self.states(model, rank)), self._weights[key])

    def weights(self, model: SimulatedModel, rank: int) -> Iterator[tuple[str, Shard]]:
        """Yield role and shard of the weights that one rank holds."""
        if MODEL_STATE in self._roles:
            yield from ((MODEL_STATE, shard) for shard in model.weights(rank).values())

    def states(self, model: SimulatedModel, rank: int) -> Iterator[tuple[str, Shard]]:
        """Yield role and shard of the states that one rank keeps of its parameters."""
        for parameter in model.owned(rank).values() if len(self._roles) > 1 else ():
            for role, state in states_of(parameter, self._optimizer):
                if role in self._roles:
                    yield role, state
            if self._has_average(parameter.name):
                yield EMA_STATE, msgspec.structs.replace(parameter, dtype="float32")

    def _has_average(self, parameter: str) -> bool:
        """Return whether there is an average of a wanted parameter; there is none of frozen ones."""
        made = self._source.mapping.made.get(self._source.wanted_aliases.get(parameter, parameter))
        return bool(self._averages) and made is not None and self._averages.issuperset(made.names)

    def _of(self, role: str, shard: Shard) -> Cost:
        key = (role, shard.name, shard.box.lo, shard.flat)
        cost = self._known.get(key)
        if cost is None:
            cost = self._known[key] = self._planned(role, shard)
        return cost

    def _planned(self, role: str, shard: Shard) -> Cost:
        held = Cost(shard.size * dtype_size(shard.dtype))
        filling = self.planner.filling(role, shard)
        if filling is None:
            # A shard that does not fit is in the report, and the report is an error.
            self.fresh.add(shard.name)
            return held
        for tensor in filling.tensors:
            if tensor.dtype != shard.dtype:
                self.cast[shard.name] = CastFacts(shard.name, tensor.dtype, shard.dtype)
        key = (filling.pattern, shard.dtype)
        if key not in self._patterns:
            self._patterns[key] = sum(_costs(filling, shard.dtype), Cost())
        return held + self._patterns[key]

    def forecast(
        self, model: SimulatedModel, report: Report, unexpected: Callable[[Sequence[str]], Iterable[str]]
    ) -> Forecast:
        """As :func:`forecast`."""
        ranks = []
        for rank in range(model.grid.world_size):
            cost = self.of_rank(model, rank)
            peak = cost.held + THREADS * cost.staging
            ranks.append(RankForecast(rank, cost.held, cost.read, cost.items, peak))
        merged, touched = self.planner.report.merge([report]), self.planner.touched
        dropped = [name for role, names in self._roles.items() for name in names if name not in touched.get(role, ())]
        dropped.sort(key=natural)
        for name in unexpected(dropped):
            merged.add("unexpected", name)
        merged.refuse(str(self._source.catalog.root))
        return Forecast(ranks, sorted(self.fresh, key=natural), dropped, list(self.cast.values()))


def _costs(filling: ShardFill, dtype: str) -> Iterator[Cost]:
    for item in filling.items("", ""):
        read, staging = cost_of(item, dtype)
        yield Cost(0, read, 1, staging)


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
    is_direct = is_run and (len(lengths) == 1 or lengths[-1] * widths[1] >= SHORT_RUN)
    # An image of the file, and as much scratch memory.
    return bytes_read(lengths, sources, widths[0]), 0 if is_direct else 2 * IMAGE_BYTES


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


def plan_for_grid(
    checkpoint: OpenedCheckpoint,
    to: str,
    dtype: str | None = None,
    aoa_config: Mapping[str, object] | None = None,
) -> GridPlan:
    """Plan a load for every rank of a grid.

    Args:
        checkpoint: a flex checkpoint, or open weights with their ``config.json``.
        to: the grid, such as ``tp=2,pp=2``.
        dtype: the target model's dtype; by default the stored one.
        aoa_config: see :func:`forecast_load`.
    Raises:
        OptionError: the grid or the dtype is invalid, or the model cannot have the grid.
        NotACheckpoint: no model can be filled from a checkpoint of this format.
        MappingError: the model has no family.
        FlexError: the stored tensors do not fit the target.
    """
    target = plan_target(checkpoint, parse_plan_target(to, dtype), dtype, aoa_config)
    return _grid_plan(target, PlannedShards(target.source))


def _grid_plan(target: PlanTarget, shards: PlannedShards) -> GridPlan:
    found = shards.forecast(target.model, target.report, target.unexpected)
    return GridPlan(
        path=str(target.source.catalog.root),
        to=str(target.model.grid),
        dtype=target.dtype,
        world_size=target.model.grid.world_size,
        bytes=sum(rank.bytes for rank in found.ranks),
        read=sum(rank.read for rank in found.ranks),
        amplification=round(found.amplification, 4),
        peak=max(rank.peak for rank in found.ranks),
        items=sum(rank.items for rank in found.ranks),
        fresh=found.fresh,
        dropped=found.dropped,
        cast=found.cast,
        ranks=found.ranks,
    )


def refuse_impossible_grid(directory: AnyPath, to: str, dtype: str | None = None) -> None:
    """Refuse a grid by the configuration alone: an impossible one must not cost the opening of a large checkpoint.

    Raises:
        OptionError: the grid or the dtype is invalid, the model cannot have it, or there is no configuration.
        NotACheckpoint: the directory is not a checkpoint, or no model can be filled from its format.
        MappingError: a flex checkpoint was saved without a family.
    """
    grid = parse_plan_target(to, dtype)
    format = require_format(directory)
    if not format.loadable:
        raise not_a_flex_checkpoint(format, directory)
    config = format.read_config(directory)
    _require_config(config, directory, format)
    with contextlib.suppress(MappingError):  # It may lack keys that the stored description has.
        declared_model(family_for(config), described_by_file(config), grid)


def parse_plan_target(to: str, dtype: str | None) -> ParallelGrid:
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


def _require_config(config: Mapping[str, Any], directory: AnyPath, format: Format) -> None:
    if format is SAVED and "model_type" not in config:
        raise no_family(str(directory))
    if not config:
        raise OptionError(
            "The target's layout follows from the model's configuration, and there is none.",
            where=str(directory / CONFIG_NAME),
            next_step="Put the model's config.json beside its weights.",
        )


def forecast_load(
    checkpoint: OpenedCheckpoint,
    grid: ParallelGrid,
    dtype: str | None = None,
    aoa_config: Mapping[str, object] | None = None,
) -> tuple[Forecast, str]:
    """Forecast a load of an opened checkpoint onto a grid.

    Args:
        checkpoint: a flex checkpoint, or open weights with their ``config.json``.
        grid: the target ranks.
        dtype: the target model's dtype; by default the stored one.
        aoa_config: statements from stored names to the model's; a flex checkpoint alone takes them.
    Returns:
        the forecast, and the target model's dtype.
    Raises:
        FlexError: the stored tensors do not fit the model of their configuration.
    """
    target = plan_target(checkpoint, grid, dtype, aoa_config)
    return forecast(target.source, target.model, target.report, target.unexpected), target.dtype


@dataclass(frozen=True)
class PlanTarget:
    """The source and the target of a planned load.

    Args:
        source: the stored tensors, and the mapping of their names to the model's.
        model: the model over its grid.
        report: the mismatches found before.
        unexpected: of the stored tensors that no rank reads, those that a rank must read.
        dtype: of the model.
    """

    source: ReadSource
    model: SimulatedModel
    report: Report
    unexpected: Callable[[Sequence[str]], Iterable[str]]
    dtype: str


def plan_target(
    checkpoint: OpenedCheckpoint,
    grid: ParallelGrid,
    dtype: str | None = None,
    aoa_config: Mapping[str, object] | None = None,
) -> PlanTarget:
    """Return the model of a checkpoint over a grid, and how it is read; see :func:`forecast_load`."""
    if not checkpoint.format.loadable:
        raise not_a_flex_checkpoint(checkpoint.format, checkpoint.catalog.root)
    known = checkpoint.known.config if checkpoint.format is SAVED else checkpoint.config
    _require_config(known, checkpoint.catalog.root, checkpoint.format)
    canonical, stored = checkpoint.format.canonical, checkpoint.catalog.roles[MODEL_STATE]
    described = described_by_file(checkpoint.config) if canonical else checkpoint.known
    family = family_for(described.config)
    used = dtype or model_dtype({tensor.dtype for tensor in stored.values()})
    if canonical and aoa_config is not None:
        raise OptionError(
            "aoa_config applies to a resume, and open weights are read by the names of their family.",
            where=str(checkpoint.catalog.root),
            next_step="Leave out --aoa-config (aoa_config=), or name a flex checkpoint.",
        )
    if canonical:
        model: SimulatedModel = declared_model(family, described, grid, used)
        optional, aliases = OptionalNames(family, described), tied_sources(family, described)
        source, report = huggingface_source(checkpoint.catalog, model.rules, optional, aliases)
        return PlanTarget(source, model, report, lambda untouched: optional.missed(untouched, stored), used)
    model = stored_model(family, described, grid, checkpoint.rules.targets, dtype)
    if aoa_config is None:
        source, report = resume_source(checkpoint, model.rules)
    else:
        tensors = {one.name: AoaTensor(one.shape, one.dtype, one.cuts) for one in stored_tensors(model.rules)}
        source, report = statements_source(checkpoint, described, aoa_config, tensors)
    for line in regrouped(source):
        report.add("shape", line)
    may_be_left = source.mapping.dropped if aoa_config else frozenset(checkpoint.rules.fresh)

    def unexpected(untouched: Sequence[str]) -> list[str]:
        return [name for name in untouched if split_state_name(MASTER_WEIGHT, name).parameter not in may_be_left]

    return PlanTarget(source, model, report, unexpected, used)


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
    target = plan_target(checkpoint, parse_plan_target(to, dtype), dtype, aoa_config)
    shards = PlannedShards(target.source)
    plan = _grid_plan(target, shards)
    collector = _Collector(shards, target.model)
    reads = [collector.rank(rank) for rank in range(plan.world_size)]
    writers = sorted({writer for found in reads for writer in found}, key=lambda name: natural(name.replace(" ", ".")))
    index = {name: number for number, name in enumerate(writers)}
    numbered = [{index[name]: count for name, count in sorted(found.items())} for found in reads]
    return PlanFlows(plan, writers, numbered, list(collector.parameters()))


class _Collector:
    """Adds up the reads of ranks; the sources of a shard are worked out once."""

    def __init__(self, shards: PlannedShards, model: SimulatedModel) -> None:
        self._shards, self._model = shards, model
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
            cast = self._shards.cast.get(name)
            dtype = row.dtype if cast is None else f"{cast.stored} -> {row.dtype}"
            yield ParameterFlow(
                name, row.shape, dtype, row.bytes, row.ranks, len(row.shards), len(row.writers), list(row.states)
            )


def _writer(file: str) -> str:
    found = _RANK_FILE.fullmatch(file)
    return f"rank {found.group(1)}" if found else file
