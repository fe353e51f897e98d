"""Forecast the cost of a load on every rank of a simulated grid, without building a model or reading tensors.

The target's layout is simulated from the checkpoint's configuration, and each rank is planned as in a load, shard by
shard. The cost of a shard depends only on the pattern that fills it, so each pattern, each distinct shard and each set
of replicas is computed once. The HTML page of a plan also shows the bytes that each rank reads from each writer: one
writer per saving rank of a flex checkpoint, or one per file of another format.

Time: one look-up per shard of the ranks that differ. Memory: a few hundred bytes per distinct shard; for a page, the
table of ranks by writers and a row per parameter.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec import structs

from paddleformers_fc.aoa import AoaTensor
from paddleformers_fc.errors import FormatError, OptionError
from paddleformers_fc.families import OptionalNames, described_by_file, family_for
from paddleformers_fc.families.names import tied_sources
from paddleformers_fc.families.stated import no_family
from paddleformers_fc.formats import OpenedCheckpoint
from paddleformers_fc.formats.checkpoint import CONFIG_NAME, DATA, NAME_CONFIG, not_a_flex_checkpoint
from paddleformers_fc.formats.flex import FLEX
from paddleformers_fc.layout.batch_sizes import BatchSizes, StepSamples, step_samples
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
from paddleformers_fc.plan.build import FillPattern, Planner, ReadSource
from paddleformers_fc.plan.items import ReadItem
from paddleformers_fc.plan.report import CHECKPOINT, OPEN_WEIGHTS, Report
from paddleformers_fc.plan.simulate import SimulatedModel, declared_model, stored_model
from paddleformers_fc.plan.sources import huggingface_source, regrouped, resume_source, stored_tensors
from paddleformers_fc.plan.statements import statements_source
from paddleformers_fc.storage.dtypes import dtype_size, model_dtype, parse_dtype
from paddleformers_fc.storage.executor import DEFAULT_OPTIONS, IMAGE_BYTES
from paddleformers_fc.storage.manifest import RESTORE
from paddleformers_fc.storage.operations import bytes_read, is_read_directly, row_major, strided_axes
from paddleformers_fc.storage.state_json import decode_object
from paddleformers_fc.text import natural

DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes that a target model can have."""

_MAX_RANKS = 1 << 16
"""Maximum number of ranks in a plan, which lists every rank."""

_RANK_FILE = re.compile(r"[^/]+/rank-0*(\d+)(-\d+)?\.safetensors")


class RankForecast(msgspec.Struct, frozen=True):
    """The forecast for one rank.

    Attributes:
        rank: the rank.
        bytes: bytes of the weights and states that it holds.
        read: bytes that it reads from storage.
        items: number of read items in its plan.
        peak: bytes of its tensors plus the scratch memory of its reads.
    """

    rank: int
    bytes: int
    read: int
    items: int
    peak: int


class CastFacts(msgspec.Struct, frozen=True):
    """A tensor that is cast.

    Attributes:
        name: its name in the model.
        stored: dtype in the checkpoint.
        wanted: dtype in the model.
    """

    name: str
    stored: str
    wanted: str


class GridPlan(msgspec.Struct, frozen=True):
    """The forecast of a load onto a grid, with the sums of all ranks.

    Attributes:
        path: the directory, as the user named it.
        to: the target grid.
        dtype: the target model's dtype.
        world_size: number of target ranks.
        bytes: bytes of the weights and states that all target ranks hold.
        read: bytes that all target ranks read.
        amplification: bytes read divided by bytes held.
        peak: maximum over all ranks of the bytes of tensors and scratch memory.
        items: number of read items of all ranks.
        fresh: tensors that keep their initial values.
        dropped: stored tensors that no rank reads.
        cast: weights that are cast.
        ranks: the forecast of each rank.
        samples: the samples per step; None if the checkpoint does not record them.
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
    samples: StepSamples | None = None


class ParameterFlow(msgspec.Struct, frozen=True):
    """One parameter with its states.

    Attributes:
        name: its name in the model.
        shape: global shape.
        dtype: dtype of the weight; ``float32 -> bfloat16`` if it is cast.
        bytes: bytes that all ranks read for it and its states.
        ranks: number of ranks that hold a part of it.
        shards: number of distinct shards of the weight.
        writers: number of writers it is read from.
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
    """A plan, with the bytes that each rank reads from each writer.

    Attributes:
        plan: the forecast of every rank.
        writers: names of the writers: ranks of the run that saved, or files.
        reads: for every rank, the bytes that it reads by index of the writer.
        parameters: in natural order.
    """

    plan: GridPlan
    writers: list[str]
    reads: list[dict[int, int]]
    parameters: list[ParameterFlow]


class _Cost(NamedTuple):
    """Bytes held and read, number of read items, and the largest scratch memory of a read."""

    held: int = 0
    read: int = 0
    items: int = 0
    scratch: int = 0


def _total(costs: Iterator[_Cost]) -> _Cost:
    held, read, items, scratch = zip(_Cost(), *costs, strict=True)
    return _Cost(sum(held), sum(read), sum(items), max(scratch))


class _Row(msgspec.Struct):
    """The figures of one parameter while they are collected."""

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
        source: the stored tensors, and their mapping to the model.
        model: the model on its grid.
        report: the mismatches found so far.
        may_stay_unread: stored parameters that no rank has to read.
        optional: the names in open weights that a model may lack; None for a flex checkpoint.
        samples: the samples per step of the run; None if unknown.
    """

    def __init__(
        self,
        source: ReadSource,
        model: SimulatedModel,
        report: Report,
        may_stay_unread: Collection[str] = (),
        optional: OptionalNames | None = None,
        samples: StepSamples | None = None,
    ) -> None:
        self.source, self.model = source, model
        self._report, self._may_stay_unread, self._optional = report, may_stay_unread, optional
        self._roles, self._samples = source.catalog.roles, samples
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
            MismatchError: the checkpoint does not match the model, with the same report as a load.
        """
        grid, replicas = self.model.grid, dict[object, _Cost]()
        ranks: list[RankForecast] = []
        for rank in range(grid.world_size):
            place = structs.replace(grid.coordinates(rank), dp=0)
            if place not in replicas:
                replicas[place] = _total(self._cost(role, shard) for role, shard in self._target_shards(rank))
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
            samples=self._samples,
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
            for role, shard in self._target_shards(rank):
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

    def _target_shards(self, rank: int) -> Iterator[tuple[str, Shard]]:
        """Yield role and shard of the weights and states that one rank holds."""
        if MODEL_STATE in self._roles:
            yield from ((MODEL_STATE, shard) for shard in self.model.weights(rank).values())
        for role, state in self.model.states(rank, self._states):
            is_created = role == MASTER_WEIGHT and self.source.may_cast and OPTIMIZER_STATE in self._roles
            if is_created or (role in self._roles and (role != EMA_STATE or self._has_average(state.name))):
                yield role, state

    def _has_average(self, parameter: str) -> bool:
        """Return whether a moving average of a parameter is stored; frozen parameters have none."""
        made = self.source.mapping.made.get(self.source.target_aliases.get(parameter, parameter))
        return bool(self._averages) and made is not None and self._averages.issuperset(made.names)

    def _cost(self, role: str, shard: Shard) -> _Cost:
        key = _key(role, shard)
        if key not in self._shards:
            self._shards[key] = self._planned(role, shard)
        return self._shards[key]

    def _planned(self, role: str, shard: Shard) -> _Cost:
        filling, held = self._planner.filling(role, shard), shard_bytes(shard)
        if filling is None:
            # It may also be a mismatch, which the report raises later.
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
            MismatchError: a rank should have read one of them, or the report has other lines.
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
        return [
            name for name in dropped if split_state_name(MASTER_WEIGHT, name).parameter not in self._may_stay_unread
        ]


def _key(role: str, shard: Shard) -> tuple[object, ...]:
    return role, shard.name, shard.box.lo, shard.flat


def cost_of(item: ReadItem, dtype: str) -> tuple[int, int]:
    """Return the bytes that one item reads from storage and its bytes of scratch memory, with default options.

    Args:
        item: the item.
        dtype: dtype of the target shard.
    """
    stored = item.stored
    size = stored.part.shape
    widths = dtype_size(stored.dtype), dtype_size(dtype)
    strides = row_major(stored.shape, widths[0]), item.target_strides(widths[1])
    lengths, sources, targets = strided_axes(size, *strides, widths)
    is_run = stored.dtype == dtype and targets[-1] == widths[1]
    is_direct = is_run and (len(lengths) == 1 or is_read_directly(lengths, sources, widths[0]))
    # Scratch memory: an image of the file, and as much again for a transpose.
    return bytes_read(lengths, sources, widths[0]), 0 if is_direct else 2 * IMAGE_BYTES


def plan_load(
    checkpoint: OpenedCheckpoint,
    to: str,
    dtype: str | None = None,
    aoa_config: Mapping[str, object] | None = None,
) -> PlannedLoad:
    """Plan a load of an opened checkpoint onto every rank of a grid.

    Args:
        checkpoint: a flex checkpoint, or open weights with the model's configuration.
        to: the grid, such as ``tp=2,pp=2``.
        dtype: the target model's dtype; the stored dtype by default. A flex checkpoint is planned for another one as it
            is resumed under ``flex_allow_casts``.
        aoa_config: statements from stored names to the model's names; only for flex checkpoints.
    Raises:
        OptionError: the grid or the dtype is invalid, or the grid does not divide the model.
        NotACheckpoint: checkpoints of this format cannot be loaded into a model.
        MappingError: the model has no family.
        FlexError: the stored tensors do not match the model of their configuration.
    """
    dtype = None if dtype is None else parse_dtype(dtype, DTYPES)
    grid, root, format = _parse_target(to), checkpoint.catalog.root, checkpoint.format
    if not format.loadable:
        raise not_a_flex_checkpoint(format, root)
    if format is FLEX and "model_type" not in checkpoint.known.config:
        raise no_family(str(root))
    if format is not FLEX and not checkpoint.config:
        raise OptionError(
            "The target's layout follows from the model's configuration, which is missing.",
            where=str(root / CONFIG_NAME),
            next_step=NAME_CONFIG,
        )
    described = described_by_file(checkpoint.config) if format.canonical else checkpoint.known
    family, stored = family_for(described.config), checkpoint.catalog.roles[MODEL_STATE]
    if format.canonical and aoa_config is not None:
        raise OptionError(
            "aoa_config applies only to a resume from a flex checkpoint, and this directory contains open weights.",
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
    may_cast = dtype not in (None, model_dtype({tensor.dtype for tensor in stored.values()}))
    if aoa_config is None:
        source, report = resume_source(checkpoint, model.rules)
    else:
        tensors = {one.name: AoaTensor(one.shape, one.dtype, one.cuts) for one in stored_tensors(model.rules)}
        source, report = statements_source(checkpoint, described, aoa_config, tensors, may_cast)
    source = structs.replace(source, may_cast=may_cast)
    for line in regrouped(source):
        report.add("shape", line)
    unread = source.mapping.dropped if aoa_config else checkpoint.rules.fresh
    return PlannedLoad(source, model, report, unread, samples=_samples(checkpoint, grid))


def _samples(checkpoint: OpenedCheckpoint, grid: ParallelGrid) -> StepSamples | None:
    """Return the samples per step of the run and on a grid; None if the checkpoint has no record of them.

    Raises:
        FormatError: the record is invalid.
    """
    if DATA not in checkpoint.documents:
        return None
    where = str(checkpoint.catalog.root / DATA)
    saved = decode_object(checkpoint.document(DATA), where).get("pace")
    try:
        return None if saved is None else step_samples(msgspec.convert(saved, BatchSizes), grid.data_ranks)
    except msgspec.ValidationError as error:
        raise FormatError(f"The batch sizes in {DATA} are invalid: {error}.", where=where, next_step=RESTORE) from error


def _parse_target(to: str) -> ParallelGrid:
    """Return the grid of a plan.

    Raises:
        OptionError: the grid is invalid.
    """
    if not to.strip():
        raise OptionError(
            "The grid to plan for is empty.", where="--to", next_step="Write it as in tp=2,pp=2, or dp=1 for one rank."
        )
    grid = parse_grid(to)
    if grid.world_size > _MAX_RANKS:
        raise OptionError(
            f"The grid {to!r} has too many ranks: {grid.world_size}.",
            where="--to",
            evidence=[f"a plan has at most {_MAX_RANKS} ranks"],
            next_step="Choose smaller degrees.",
        )
    return grid
