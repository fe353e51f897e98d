"""Parallel grids: the number of ranks on every axis, and the coordinates of a rank.

The order of ranks is that of PaddleFormers' hybrid topology. Without expert parallelism it is ``dp, sharding, pp, tp``,
``tp`` changing fastest, or ``dp, pp, sharding, tp`` where the topology is ``pp_first``. With expert parallelism the
sharding axis is ``moe_sharding x dense_sharding``: the ranks of one expert group are ``dense_sharding x tp``, so that
``moe_sharding = sharding * tp / ep``, and only its outer part precedes ``pp``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from paddleformers_fc.errors import OptionError

MEBIBYTE = 1 << 20
_UNSUPPORTED = {"sep": "segment", "cp": "context"}
_OF_ARGUMENTS = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "expert_model_parallel_size": "ep",
    "sharding_parallel_size": "sharding",
    "split_param": "split",
}
"""Axes by the names that they have among the training arguments of PaddleFormers."""
_TRUTHS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, slots=True)
class Coordinates:
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
    values: dict[str, int] = {}
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
        elif isinstance(kinds[name], bool):
            if value.lower() in _TRUTHS:
                values[name] = _TRUTHS[value.lower()]
            else:
                faults.append(f"{name}: {value!r} is neither true nor false")
        elif value.isdecimal():
            values[name] = int(value)
        elif value.startswith("-") and value[1:].isdecimal():
            faults.append(f"{name}: {value} is below {0 if name == 'slice_above' else 1}")
        else:
            faults.append(f"{name}: {value!r} is no whole number")
    if faults:
        raise OptionError(
            f"The grid {text!r} cannot be read.", evidence=faults, next_step="Write it as in tp=2,pp=2,sharding=2."
        )
    return ParallelGrid(**values)  # type: ignore[arg-type]  # Booleans are kept apart above.


def _faults(grid: ParallelGrid) -> Iterator[str]:
    small = [
        name for name in ("dp", "tp", "pp", "vpp", "ep", "sharding", "buffer", "alignment") if getattr(grid, name) < 1
    ]
    if small:
        yield f"{', '.join(small)}: must be at least 1"
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
