"""Layouts of a training over ranks, and their names in the verification matrices.

A name is parts joined by ``+``: ``dp2``, ``tp4``, ``pp2``, ``pp4vpp2``, ``sd2v1`` and ``sd2v2`` (sharding stage 1 of
whole parameters, and of flattened ranges), ``sd2s2`` and ``sd2s3`` (stages 2 and 3). ``sd2`` alone is version 2,
PaddleFormers' default. ``(ep2)`` behind a part spreads the experts over two ranks: ``sd2+tp2(ep2)``.

This module does not import Paddle.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paddleformers_fc.errors import OptionError
from paddleformers_fc.layout.grid import ParallelGrid


@dataclass(frozen=True)
class MatrixLayout:
    """The layout of a training over ranks.

    Args:
        name: as a person reads it.
        nproc: number of ranks; the factor beyond tp and pp is data parallel, of which ``sharding`` are sharded.
        tp: tensor parallel degree.
        pp: pipeline parallel degree.
        vpp: virtual pipeline stages per rank.
        sharding: sharding degree, 1 for none.
        stage: sharding stage.
        split_param: stage 1 in version 2.
        ep: expert parallel degree.
        bf16: bfloat16 O2 with master weights instead of float32.
    """

    name: str
    nproc: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    sharding: int = 1
    stage: int = 1
    split_param: bool = False
    ep: int = 1
    bf16: bool = False

    @property
    def data_parallel(self) -> int:
        """Number of ranks with different samples."""
        return self.nproc // (self.tp * self.pp)

    @property
    def grid(self) -> ParallelGrid:
        """The same layout as a grid of ranks.

        Raises:
            OptionError: no job can have these degrees together.
        """
        return ParallelGrid(
            dp=self.data_parallel // self.sharding,
            tp=self.tp,
            pp=self.pp,
            vpp=self.vpp,
            ep=self.ep,
            sharding=self.sharding,
            stage=self.stage,
            split=self.split_param,
        )

    def to_json(self) -> dict[str, Any]:
        """As keyword argument of a job; :func:`layout_from` reads it."""
        return asdict(self)


def layout_from(layout: MatrixLayout | Mapping[str, Any]) -> MatrixLayout:
    """Return a layout from the JSON in which a job received it."""
    return layout if isinstance(layout, MatrixLayout) else MatrixLayout(**layout)


_PART = re.compile(r"(?:(dp|tp)(\d+)|(sd)(\d+)(v1|v2|s2|s3)?|(pp)(\d+)(?:vpp(\d+))?)(?:\(ep(\d+)\))?")


def parse_layout(name: str) -> MatrixLayout:
    """Return the layout of a name.

    Raises:
        OptionError: the name has an unknown part, or one part twice.
    """
    degrees: dict[str, Any] = {"dp": 1, "tp": 1, "pp": 1, "vpp": 1, "sharding": 1, "ep": 1}
    seen: set[str] = set()
    for part in name.split("+"):
        found = _PART.fullmatch(part)
        axis = "" if found is None else found[1] or found[3] or found[6]
        if found is None or axis in seen:
            raise OptionError(
                f"Invalid layout {name!r}.",
                evidence=[f"{part}: unknown or duplicate part"],
                next_step="Join parts such as dp2, tp2, pp4vpp2, sd2v1, sd2v2, sd2s2, sd2s3 with +, experts as (ep2).",
            )
        seen.add(axis)
        if axis == "sd":
            kind = found[5] or "v2"
            degrees |= {"sharding": int(found[4]), "split_param": kind == "v2"}
            degrees["stage"] = int(kind[1]) if kind[0] == "s" else 1
        elif axis == "pp":
            degrees |= {"pp": int(found[7]), "vpp": int(found[8] or 1)}
        else:
            degrees[axis] = int(found[2])
        degrees["ep"] = max(degrees["ep"], int(found[9] or 1))
    ranks = degrees.pop("dp") * degrees["tp"] * degrees["pp"] * degrees["sharding"]
    return MatrixLayout(name, nproc=ranks, **degrees)
