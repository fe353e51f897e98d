"""Parallel grids: the number of ranks on every axis, and the coordinates of a rank.

The order of ranks is that of PaddleFormers' hybrid topology. Without expert parallelism it is ``dp, sharding, pp, tp``,
``tp`` changing fastest, or ``dp, pp, sharding, tp`` where the topology is ``pp_first``. With expert parallelism the
sharding axis is ``moe_sharding x dense_sharding``: the ranks of one expert group are ``dense_sharding x tp``, so that
``moe_sharding = sharding * tp / ep``, and only its outer part precedes ``pp``.

Paddle's assignment of layers to pipeline stages, and of optimizer states to the ranks of a sharding group.

Four rules of Paddle 3.3.1 on plain integers:

- pipeline (``SegmentLayers``): equal numbers of layers per part if they are divisible, otherwise of items; part ``i``
  belongs to stage ``i % stages``, which interleaves virtual stages.
- stage 1, version 1 (``DygraphShardingOptimizer``): whole parameters, largest first, to the rank with the fewest
  elements. Stage 2 does the same in the order of the parameters.
- stage 1, version 2 (``FusedCommBuffer``): parameters are in fused buffers, each padded. Every rank has an equal range
  of every buffer, and so a range of some parameters.
- stage 3: every parameter above a size is padded and cut into equal slices.

A partition is computed once for all ranks of a group.
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
"""The values that a field can have, by its type."""
_UNSUPPORTED = {"sep": "segment", "cp": "context"}
_OF_ARGUMENTS = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "expert_model_parallel_size": "ep",
    "sharding_parallel_size": "sharding",
    "split_param": "split",
}
"""Axes by the names that they have among the training arguments of PaddleFormers."""


class Coordinates(msgspec.Struct, frozen=True):
    """The coordinates of a rank, counted from 0 on every axis.

    Args:
        dp: data parallel rank.
        sharding: rank in the sharding group.
        pp: pipeline stage.
        tp: tensor parallel rank.
        ep: rank in the expert group.
        moe_sharding: rank among those that hold the same experts of the same stage.
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
        dp: data parallel degree, beside sharding.
        tp: tensor parallel degree.
        pp: pipeline stages.
        vpp: virtual stages per pipeline stage.
        ep: expert parallel degree.
        sharding: number of ranks that share optimizer states.
        stage: sharding stage, 1 to 3.
        split: stage 1 in version 2, where a state is a range of a fused buffer. Version 1 shares whole tensors.
        buffer: version 2 closes a fused buffer when it holds this many MiB.
        slice_above: stage 3 slices parameters of more elements.
        alignment: bytes to which a sharded parameter is padded.
        pp_first: the pipeline axis comes before the sharding axis.
    Raises:
        OptionError: degrees that no job can have together.
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
                f"No job can have the grid {self}.",
                evidence=faults,
                next_step="Choose degrees that go together; their product is the number of ranks.",
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.sharding * self.pp * self.tp

    @property
    def moe_sharding(self) -> int:
        """Number of ranks of a stage that hold the same experts."""
        return self.dp * self.sharding if self.ep == 1 else self.sharding * self.tp // self.ep

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a rank.

        Args:
            rank: from 0 to :attr:`world_size`.
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
        """Return the text that :func:`parse_grid` reads, without default values."""
        values = [
            f"{field.name}={str(value).lower()}"
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        ]
        return ",".join(values) or "dp=1"


def parse_grid(text: str) -> ParallelGrid:
    """Parse a grid such as ``tp=2,pp=2,sharding=2,stage=1,split=true``.

    Args:
        text: fields of :class:`ParallelGrid` in any order; others have their default.
    Raises:
        OptionError: an unknown or repeated field, an invalid value, or an impossible grid.
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
            hint = f"; it is {_OF_ARGUMENTS[name]} here" if name in _OF_ARGUMENTS else ""
            faults.append(f"{name}: unknown axis{hint}; known are {', '.join(kinds)}")
        elif name in values:
            faults.append(f"{name}: is given twice")
        else:
            kind = type(kinds[name])
            if not _VALUES[kind].fullmatch(value):
                faults.append(f"{name}: {value!r} is {'neither true nor false' if kind is bool else 'no whole number'}")
            else:
                values[name] = msgspec.convert(value.lower(), kind, strict=False)
    if faults:
        raise OptionError(
            f"The grid {text!r} cannot be read.", evidence=faults, next_step="Write it as in tp=2,pp=2,sharding=2."
        )
    return ParallelGrid(**values)


def _faults(grid: ParallelGrid) -> Iterator[str]:
    counted = [field.name for field in fields(grid) if not isinstance(field.default, bool)]
    small = [name for name in counted if getattr(grid, name) < (name != "slice_above")]
    if small:
        yield f"{', '.join(small)}: must be at least {'0' if small == ['slice_above'] else '1'}"
        return
    if grid.stage not in (1, 2, 3):
        yield f"stage={grid.stage}: sharding has the stages 1, 2 and 3"
    if grid.split and (grid.stage != 1 or grid.sharding == 1):
        yield f"split=true with sharding={grid.sharding}, stage={grid.stage}: only sharding stage 1 has a version 2"
    if grid.stage > 1 and (grid.sharding == 1 or grid.pp > 1 or grid.ep > 1):
        yield (
            f"stage={grid.stage} with sharding={grid.sharding}, pp={grid.pp}, ep={grid.ep}: stages 2 and 3 need a "
            "sharding degree, and go with neither a pipeline nor expert parallelism"
        )
    if grid.stage == 3 and grid.tp > 1:
        yield f"stage=3 with tp={grid.tp}: tensor parallelism goes with the stages 1 and 2 alone"
    if grid.vpp > 1 and grid.pp == 1:
        yield f"vpp={grid.vpp} with pp=1: virtual stages belong to a pipeline"
    if grid.ep > 1:
        if grid.dp > 1:
            yield f"ep={grid.ep} with dp={grid.dp}: expert groups lie within the sharding and tensor parallel axes"
        if grid.ep % grid.tp or grid.tp * grid.sharding % grid.ep:
            yield (
                f"ep={grid.ep} with tp={grid.tp}, sharding={grid.sharding}: ep must be a multiple of tp that divides "
                f"tp x sharding = {grid.tp * grid.sharding}"
            )
        if grid.sharding > 1 and not grid.split:
            yield f"ep={grid.ep} with sharding={grid.sharding}: experts are shared by version 2 alone; add split=true"


Range = tuple[int, int]

Share = list[tuple[int, Range | None]]
"""The parameters whose states one rank has: index, and the range of its elements if it has not all of them."""


def layer_bounds(is_layer: Sequence[bool], parts: int) -> list[int]:
    """Return the bounds of a pipeline with equal numbers of layers per part.

    Args:
        is_layer: for every item, in order, whether it is counted: decoder layers and empty layers are; embedding, norm
            and head are not, and go with their neighbours.
        parts: stages times virtual stages; divides the number of layers.
    Returns:
        first item of every part, and one past the last item; part ``i`` belongs to stage ``i % stages``.
    """
    share, bounds, seen = sum(is_layer) // parts, [0], 0
    for index, counted in enumerate(is_layer):
        seen += counted
        if counted and seen % share == 0 and len(bounds) < parts:
            bounds.append(index + 1)
    return [*bounds, len(is_layer)]


def uniform_bounds(items: int, parts: int) -> list[int]:
    """Return the bounds of a pipeline with equal numbers of items; if not divisible, the last parts have one more."""
    share, extra = divmod(items, parts)
    bounds = [0]
    for part in range(1, parts):
        bounds.append(bounds[-1] + share + (1 if part > parts - extra else 0))
    return [*bounds, items]


def whole_shares(sizes: Sequence[int], ranks: int, largest_first: bool) -> list[Share]:
    """Return the share of every rank, if parameters are assigned whole.

    Args:
        sizes: elements per parameter, in the model's order.
        ranks: of the sharding group.
        largest_first: sharding stage 1; stage 2 keeps the order.
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
    """Return the share of every rank, if parameters are in fused buffers that are cut into equal ranges.

    Args:
        sizes: elements per parameter, in the model's order.
        widths: bytes per element of each. Parameters of one width are of one dtype.
        ranks: of the sharding group.
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
    """Return the indices of each buffer. A buffer has one dtype and includes the parameter that reaches the limit."""
    groups: list[list[int]] = []
    # Paddle sorts by the dtype's name, and paddle.bfloat16 and paddle.float16 come before paddle.float32.
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
    """Return one rank's range of a parameter under stage 3; None if its slice is all padding.

    Args:
        size: elements of the parameter.
        width: bytes per element.
        rank: rank in the sharding group.
        ranks: of the sharding group.
        alignment: bytes to which the parameter is padded.
    """
    padded = size + -(size * width) % alignment // width
    length = -(-padded // ranks)
    begin, end = min(rank * length, size), min((rank + 1) * length, size)
    return (begin, end) if begin < end else None
