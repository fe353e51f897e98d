"""Draw the losses of resumed runs across the resume, and below them their distance to the uninterrupted run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LOWEST = 1e-9
"""Drawn for losses that are equal: zero has no place on a logarithmic axis."""
_MARKERS = ("o", "s", "D", "^", "v")

Losses = Mapping[int, float]


@dataclass(frozen=True)
class Curves:
    """The losses of one model, by step.

    Args:
        title: of its column.
        reference: name of the uninterrupted run.
        expected: its losses.
        resumed: those of the other runs by name.
        resumed_at: the step at which they resumed.
        dashed: names of runs that are shown for comparison only.
    """

    title: str
    reference: str
    expected: Losses
    resumed: Mapping[str, Losses]
    resumed_at: int
    dashed: Sequence[str] = ()


def draw(columns: Sequence[Curves], path: Path) -> None:
    """Write a PNG with a column per model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (6.4 * len(columns), 6.4)
    figure, axes = pyplot.subplots(2, len(columns), sharex="col", squeeze=False, figsize=size, height_ratios=(2, 1))
    for above, below, one in zip(*axes, columns, strict=True):
        label = f"{one.reference}, uninterrupted"
        above.plot(*zip(*sorted(one.expected.items()), strict=True), color="0.75", linewidth=6, label=label)
        for number, (name, losses) in enumerate(one.resumed.items()):
            # Runs that agree lie on top of each other: hollow markers of falling size keep all of them visible.
            style: dict[str, Any] = {}
            if len(losses) < 20:
                marker = _MARKERS[number % len(_MARKERS)]
                style = {"marker": marker, "markersize": 16 - 4 * number, "markerfacecolor": "none"}
            steps = sorted(losses)
            line = "--" if name in one.dashed else "-"
            above.plot(steps, [losses[step] for step in steps], linestyle=line, label=name, **style)
            after = [step for step in steps if step > one.resumed_at]
            apart = [max(abs(losses[step] - one.expected[step]), _LOWEST) for step in after]
            below.plot(after, apart, linestyle=line, **style)
        for plot in (above, below):
            plot.axvline(one.resumed_at, color="0.4", linestyle="--", linewidth=0.8)
        above.set(title=one.title, ylabel="loss")
        below.set(xlabel="step", ylabel="distance to uninterrupted", yscale="log", ylim=(_LOWEST / 8, 0.1))
        above.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
