"""Parallel grids: the degree of every axis, the coordinates of a rank, and Paddle's partitions on plain integers.

Ranks are ordered as in PaddleFormers' hybrid topology: ``dp, sharding, pp, tp`` with ``tp`` fastest, or
``dp, pp, sharding, tp`` if ``pp_first``. With expert parallelism, the sharding axis splits into ``moe_sharding`` and
``dense_sharding``: an expert group is ``dense_sharding x tp``, and only ``moe_sharding`` precedes ``pp``.

Partitions follow Paddle 3.3.1. A pipeline (``SegmentLayers``) divides layers equally, or else items; part ``i`` belongs
to stage ``i % stages``. Sharding stage 1 (``DygraphShardingOptimizer``) assigns each parameter, largest first, to the
rank with the fewest elements; stage 2 does so in parameter order. Version 2 of stage 1 (``FusedCommBuffer``) cuts
fused, padded buffers into equal ranges. Stage 3 pads and slices every parameter above a size.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from paddleformers_fc.errors import OptionError

MEBIBYTE = 1 << 20
_VALUES = {bool: re.compile("true|false|[01]", re.IGNORECASE), int: re.compile("-?[0-9]{1,9}")}
"""The valid texts of a field, by its type."""
_UNSUPPORTED = {"sep": "segment", "cp": "context"}
_AXIS_OF_ARGUMENT = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "expert_model_parallel_size": "ep",
    "sharding_parallel_size": "sharding",
    "split_param": "split",
}
"""Axes by the names of PaddleFormers' training arguments."""


class Coordinates(msgspec.Struct, frozen=True):
    """The coordinates of a rank, counted from 0 on every axis.

    Args:
        dp: data parallel rank.
        sharding: rank in the sharding group.
        pp: pipeline stage.
        tp: tensor parallel rank.
        ep: rank in the expert group.
        moe_sharding: rank among the ranks that hold the same experts of the same stage.
    """

    dp: int
    sharding: int
    pp: int
    tp: int
    ep: int
    moe_sharding: int


@dataclass(frozen=True, slots=True)
class ParallelGrid:
    """Degrees of parallelism.

    Args:
        dp: data parallel degree, without sharding.
        tp: tensor parallel degree.
        pp: pipeline stages.
        vpp: virtual stages per pipeline stage.
        ep: expert parallel degree.
        sharding: number of ranks that share optimizer states.
        stage: sharding stage, 1 to 3.
        split: whether stage 1 uses version 2, which divides fused buffers; version 1 assigns complete tensors.
        buffer: size in MiB at which version 2 closes a fused buffer.
        slice_above: number of elements above which stage 3 slices a parameter.
        alignment: bytes to which a sharded parameter is padded.
        pp_first: whether the pipeline axis precedes the sharding axis.
    Raises:
        OptionError: the degrees cannot be combined.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    sharding: int = 1
    stage: int = 1
    split: bool = False
    buffer: int = 256
    slice_above: int = 1 << 20
    alignment: int = 256
    pp_first: bool = False

    def __post_init__(self) -> None:
        faults = list(_faults(self))
        if faults:
            raise OptionError(
                f"Invalid grid {self}.",
                evidence=faults,
                next_step="Choose degrees that can be combined; the number of ranks is dp x sharding x pp x tp.",
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.sharding * self.pp * self.tp

    @property
    def data_ranks(self) -> int:
        """Number of data-parallel ranks, which read different samples."""
        return self.dp * self.sharding

    @property
    def moe_sharding(self) -> int:
        """Number of ranks in a stage that hold the same experts."""
        return self.dp * self.sharding if self.ep == 1 else self.sharding * self.tp // self.ep

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a rank.

        Args:
            rank: from 0 to :attr:`world_size` - 1.
        """
        rest, tp = divmod(rank, self.tp)
        inner = 1 if self.ep == 1 else self.ep // self.tp
        outer = self.sharding // inner
        rest, dense = divmod(rest, inner)
        if self.pp_first:
            rest, moe = divmod(rest, outer)
            dp, pp = divmod(rest, self.pp)
        else:
            rest, pp = divmod(rest, self.pp)
            dp, moe = divmod(rest, outer)
        sharding = moe * inner + dense
        return Coordinates(dp, sharding, pp, tp, 0 if self.ep == 1 else dense * self.tp + tp, moe)

    def __str__(self) -> str:
        """Return the text for :func:`parse_grid`, without default values."""
        values = [
            f"{field.name}={str(value).lower()}"
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        ]
        return ",".join(values) or "dp=1"


def parse_grid(text: str) -> ParallelGrid:
    """Parse a grid such as ``tp=2,pp=2,sharding=2,stage=1,split=true``.

    Args:
        text: fields of :class:`ParallelGrid` in any order; omitted fields have their default.
    Raises:
        OptionError: an unknown or repeated field, an invalid value, or an invalid grid.
    """
    kinds = {field.name: field.default for field in fields(ParallelGrid)}
    values: dict[str, Any] = {}
    faults: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name in _UNSUPPORTED and value == "1":
            continue
        if name in _UNSUPPORTED:
            faults.append(f"{name}={value}: {_UNSUPPORTED[name]} parallelism is not supported")
        elif name not in kinds:
            hint = f"; write {_AXIS_OF_ARGUMENT[name]}" if name in _AXIS_OF_ARGUMENT else ""
            faults.append(f"{name}: unknown axis{hint}; known are {', '.join(kinds)}")
        elif name in values:
            faults.append(f"{name}: is given twice")
        else:
            kind = type(kinds[name])
            if not _VALUES[kind].fullmatch(value):
                faults.append(f"{name}: {value!r} is {'neither true nor false' if kind is bool else 'not an integer'}")
            else:
                values[name] = msgspec.convert(value.lower(), kind, strict=False)
    if faults:
        raise OptionError(f"Invalid grid {text!r}.", evidence=faults, next_step="Write it as in tp=2,pp=2,sharding=2.")
    return ParallelGrid(**values)


def _faults(grid: ParallelGrid) -> Iterator[str]:
    counted = [field.name for field in fields(grid) if not isinstance(field.default, bool)]
    small = [name for name in counted if getattr(grid, name) < (name != "slice_above")]
    if small:
        yield f"{', '.join(small)}: must be at least {'0' if small == ['slice_above'] else '1'}"
        return
    if grid.stage not in (1, 2, 3):
        yield f"stage={grid.stage}: the sharding stages are 1, 2 and 3"
    if grid.split and (grid.stage != 1 or grid.sharding == 1):
        yield f"split=true with sharding={grid.sharding}, stage={grid.stage}: only sharding stage 1 has a version 2"
    if grid.stage > 1 and (grid.sharding == 1 or grid.pp > 1 or grid.ep > 1):
        yield (
            f"stage={grid.stage} with sharding={grid.sharding}, pp={grid.pp}, ep={grid.ep}: stages 2 and 3 need "
            "sharding > 1, and support neither pipeline nor expert parallelism"
        )
    if grid.stage == 3 and grid.tp > 1:
        yield f"stage=3 with tp={grid.tp}: only stages 1 and 2 support tensor parallelism"
    if grid.vpp > 1 and grid.pp <= 2:
        yield f"vpp={grid.vpp} with pp={grid.pp}: virtual stages need more than 2 pipeline stages"
    if grid.ep > 1:
        if grid.dp > 1:
            yield f"ep={grid.ep} with dp={grid.dp}: expert groups span the sharding and tensor parallel axes only"
        if grid.ep % grid.tp or grid.tp * grid.sharding % grid.ep:
            yield (
                f"ep={grid.ep} with tp={grid.tp}, sharding={grid.sharding}: ep must be a multiple of tp that divides "
                f"tp x sharding = {grid.tp * grid.sharding}"
            )
        if grid.sharding > 1 and not grid.split:
            yield f"ep={grid.ep} with sharding={grid.sharding}: only version 2 shards experts; add split=true"


Range = tuple[int, int]

Share = list[tuple[int, Range | None]]
"""The parameters whose states one rank holds: index, and the range of its elements; None for all elements."""


def layer_bounds(is_layer: Sequence[bool], parts: int) -> list[int]:
    """Return the bounds of a pipeline with equal numbers of layers per part.

    Args:
        is_layer: for every item, in order, whether it counts as a layer. Decoder layers and empty layers do; embedding,
            norm and head do not, and stay with their neighbours.
        parts: stages times virtual stages; divides the number of layers.
    Returns:
        first item of every part, and the number of items; part ``i`` belongs to stage ``i % stages``.
    """
    share, bounds, seen = sum(is_layer) // parts, [0], 0
    for index, counted in enumerate(is_layer):
        seen += counted
        if counted and seen % share == 0 and len(bounds) < parts:
            bounds.append(index + 1)
    return [*bounds, len(is_layer)]


def uniform_bounds(items: int, parts: int) -> list[int]:
    """Return the bounds of a pipeline with equal numbers of items; the last parts take the remainder, one item each."""
    share, extra = divmod(items, parts)
    bounds = [0]
    for part in range(1, parts):
        bounds.append(bounds[-1] + share + (1 if part > parts - extra else 0))
    return [*bounds, items]


def whole_shares(sizes: Sequence[int], ranks: int, largest_first: bool) -> list[Share]:
    """Return the share of every rank if each parameter is assigned to one rank.

    Args:
        sizes: elements per parameter, in the model's order.
        ranks: number of ranks in the sharding group.
        largest_first: True for sharding stage 1; stage 2 keeps the order.
    """
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index]) if largest_first else range(len(sizes))
    load = [(0, rank) for rank in range(ranks)]
    shares: list[Share] = [[] for _ in range(ranks)]
    for index in order:
        assigned, rank = load[0]
        shares[rank].append((index, None))
        heapq.heapreplace(load, (assigned + sizes[index], rank))
    return [sorted(share) for share in shares]


def fused_shares(
    sizes: Sequence[int], widths: Sequence[int], ranks: int, limit: int, alignment: int = 256
) -> list[Share]:
    """Return the share of every rank if fused buffers are cut into equal ranges.

    Args:
        sizes: elements per parameter, in the model's order.
        widths: bytes per element, by parameter. Parameters of equal width have the same dtype.
        ranks: number of ranks in the sharding group.
        limit: bytes at which a buffer is closed.
        alignment: bytes to which every rank's part of a parameter is padded.
    """
    shares: list[Share] = [[] for _ in range(ranks)]
    for group in fused_groups(sizes, widths, limit):
        unit = max(alignment // widths[group[0]], 1)
        padded = [-(-sizes[index] // (unit * ranks)) * unit for index in group]
        length, start = sum(padded), 0
        for index, part in zip(group, padded, strict=True):
            end = start + sizes[index]
            for rank in range(start // length, -(-end // length)):
                inside = max(rank * length, start) - start, min((rank + 1) * length, end) - start
                shares[rank].append((index, inside))
            start += part * ranks
    return shares


def fused_groups(sizes: Sequence[int], widths: Sequence[int], limit: int) -> list[list[int]]:
    """Return the parameter indices of each buffer. A buffer ends with the parameter that reaches the limit."""
    groups: list[list[int]] = []
    # Paddle sorts by dtype name: paddle.bfloat16 and paddle.float16 come before paddle.float32.
    for width in sorted(set(widths)):
        size, members = 0, list[int]()
        for index in (index for index, one in enumerate(widths) if one == width):
            members.append(index)
            size += sizes[index] * width
            if size >= limit:
                groups.append(members)
                size, members = 0, []
        if members:
            groups.append(members)
    return groups


def slice_range(size: int, width: int, rank: int, ranks: int, alignment: int = 256) -> Range | None:
    """Return one rank's range of a parameter under stage 3; None if its slice is only padding.

    Args:
        size: elements of the parameter.
        width: bytes per element.
        rank: rank in the sharding group.
        ranks: number of ranks in the sharding group.
        alignment: bytes to which the parameter is padded.
    """
    padded = size + -(size * width) % alignment // width
    length = -(-padded // ranks)
    begin, end = min(rank * length, size), min((rank + 1) * length, size)
    return (begin, end) if begin < end else None
