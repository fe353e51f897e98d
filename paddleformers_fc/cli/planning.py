"""``plan``: what loading a checkpoint onto other ranks would do, for every one of them, without any of them.

The target's layout is simulated from the checkpoint's own configuration, so that neither a model nor Paddle is needed.
A grid that the model cannot have is refused by the configuration alone, before the checkpoint is opened.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from paddleformers_fc.cli.opening import PADDLE, Opened, config_beside, kind_of, open_directory
from paddleformers_fc.errors import MappingError, NotACheckpoint, OptionError
from paddleformers_fc.families import OptionalNames, described_by_file, family_for
from paddleformers_fc.families.bind import tied_sources
from paddleformers_fc.layout.grid import ParallelGrid, parse_grid
from paddleformers_fc.layout.roles import MASTER_WEIGHT, MODEL_STATE, split_state_name
from paddleformers_fc.mapping.folding import fold
from paddleformers_fc.plan import huggingface_source, resume_source
from paddleformers_fc.plan.forecast import CastFacts, Forecast, RankForecast, forecast
from paddleformers_fc.plan.simulate import SimulatedModel, declared_model, stored_model
from paddleformers_fc.plan.sources import described_model
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.text import count_text, size_text

if TYPE_CHECKING:
    from rich.console import Console

DTYPES = ("float32", "bfloat16", "float16")
_SHOWN = 24


class Plan(msgspec.Struct, frozen=True):
    """Everything that ``plan`` says.

    Attributes:
        path: the directory as it was named.
        to: the target grid.
        dtype: the target model's dtype.
        world_size: number of target ranks.
        bytes: of the weights and states that all target ranks hold.
        read: bytes that all of them read.
        amplification: bytes read over bytes held.
        peak: the most that a rank needs for what it holds and its scratch memory, in bytes.
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


def plan(directory: AnyPath, to: str, dtype: str | None = None) -> Plan:
    """Plan a load for every rank of a grid.

    Args:
        directory: a flex checkpoint, or open weights with their ``config.json``.
        to: the grid, such as ``tp=2,pp=2``.
        dtype: the target model's dtype; by default the stored one.
    Raises:
        OptionError: the grid cannot be read, or the model cannot have it.
        FlexError: the directory cannot be opened, or what is stored does not fit the target.
    """
    if not to.strip():
        raise OptionError(
            "The grid to plan for is empty.", where="--to", next_step="Write it as in tp=2,pp=2, or dp=1 for one rank."
        )
    grid = parse_grid(to)
    if dtype not in (None, *DTYPES):
        raise OptionError(f"The dtype {dtype!r} is unknown.", evidence=[f"known: {', '.join(DTYPES)}"])
    if kind_of(directory) == PADDLE:
        raise NotACheckpoint(
            f"{directory} was written by Paddle's own FlexCheckpoint, from which no run of this package goes on.",
            where=str(directory),
            next_step="Export its weights, and plan a start from those.",
        )
    config = config_beside(directory)
    if not config:
        raise OptionError(
            "The target's layout follows from the model's configuration, and there is none.",
            where=str(directory / "config.json"),
            next_step="Put the model's config.json beside its weights.",
        )
    # By the configuration alone: an impossible grid must not cost the opening of a large checkpoint.
    with contextlib.suppress(MappingError):  # It may lack what the checkpoint's description holds.
        declared_model(family_for(config), described_by_file(config), grid)
    found, used = planned(open_directory(directory, "size"), grid, dtype)
    return Plan(
        path=str(directory),
        to=str(grid),
        dtype=used,
        world_size=grid.world_size,
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


def planned(opened: Opened, grid: ParallelGrid, dtype: str | None) -> tuple[Forecast, str]:
    """What a load of an opened directory onto a grid would do, and the model's dtype.

    Raises:
        FlexError: what is stored does not fit the model of its configuration.
    """
    checkpoint = opened.checkpoint
    described = described_by_file(opened.config) if checkpoint is None else described_model(checkpoint)
    family = family_for(described.config)
    stored = opened.catalog.roles[MODEL_STATE]
    # A router is float32 whatever the model is; the model is what its other weights are.
    used = dtype or min({tensor.dtype for tensor in stored.values()}, key=lambda name: (name == "float32", name))
    model: SimulatedModel
    if checkpoint is None:
        model = declared_model(family, described, grid, used)
        optional, aliases = OptionalNames(family, described), tied_sources(family, described)
        source, report = huggingface_source(opened.catalog, model.rules, optional, aliases)
        return forecast(source, model, report, lambda untouched: optional.missed(untouched, stored)), used
    model = stored_model(family, described, grid, checkpoint.rules.targets, dtype)
    source, report = resume_source(checkpoint, model.rules)
    fresh = frozenset(checkpoint.rules.fresh)

    def unexpected(untouched: Sequence[str]) -> list[str]:
        return [name for name in untouched if split_state_name(MASTER_WEIGHT, name).parameter not in fresh]

    return forecast(source, model, report, unexpected), used


def show(found: Plan, console: Console) -> None:
    """The plan as text."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console.print(Text(f"{found.path} -> {found.to}", "bold"))
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    facts.add_row("  ranks", f"{found.world_size:,}, {found.dtype}")
    facts.add_row("  held", f"{size_text(found.bytes)} by all ranks together")
    facts.add_row("  read", f"{size_text(found.read)}, {found.amplification:.3g} times what is held")
    facts.add_row("  items", f"{found.items:,}")
    facts.add_row(
        "  peak", f"{size_text(found.peak)} on the rank that needs most: what it holds, and scratch memory to read it"
    )
    console.print(facts)
    console.print()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=True)
    table.add_column("ranks", style="cyan")
    for heading in ("held", "read", "items", "peak"):
        table.add_column(heading, justify="right")
    rows = _alike(found.ranks)
    for numbers, rank in rows[:_SHOWN]:
        table.add_row(numbers, size_text(rank.bytes), size_text(rank.read), f"{rank.items:,}", size_text(rank.peak))
    console.print(table)
    if len(rows) > _SHOWN:
        console.print(f"and {count_text(len(rows) - _SHOWN, 'row')} more; --json has all ranks")
    casts = [f"{cast.name}: {cast.stored} to {cast.wanted}" for cast in found.cast]
    for heading, lines in (("fresh", found.fresh), ("dropped", found.dropped), ("cast", casts)):
        if lines:
            console.print(Text.assemble((f"{heading}  ", "dim"), count_text(len(lines), "tensor")))
        for line in fold(lines):
            console.print(Text(f"  {line}"), soft_wrap=True)


def _alike(ranks: Iterable[RankForecast]) -> list[tuple[str, RankForecast]]:
    """Ranks that do the same as their neighbours, as one row."""
    rows: list[tuple[int, RankForecast]] = []
    for rank in ranks:
        first, last = rows[-1] if rows else (rank.rank, None)
        if last is not None and (last.bytes, last.read, last.items) == (rank.bytes, rank.read, rank.items):
            rows[-1] = (first, rank)
        else:
            rows.append((rank.rank, rank))
    return [(str(first) if first == last.rank else f"{first}-{last.rank}", last) for first, last in rows]
