"""The results of the demo: the tables and the picture.

This module only presents. :class:`LossComparison` decides what is equal, from numbers alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from paddleformers_fc.text import count_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TOLERANCE = 1e-6
"""Largest difference of a loss from the uninterrupted run's that counts as the same training."""

_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#aa3377")
_NOTHING = 1e-9
"""Zero has no place on a logarithmic axis; it is drawn here and called 0."""
_ABOVE: dict[str, Any] = {
    "xytext": (-4, 2),
    "textcoords": "offset points",
    "ha": "right",
    "va": "bottom",
    "color": "0.4",
    "fontsize": 8,
}
_MARKERS = ("o", "s", "D", "^", "v")


@dataclass(frozen=True)
class LossLine:
    """One training after the resume, beside the uninterrupted one.

    Args:
        layout: its name.
        losses: step -> loss.
        compared: the steps at which the loss must be that of the uninterrupted run.
        export_md5: md5 of the export of the run's state before its first step after the resume, as ``export`` prints
            it.
        unequal_tensors: tensors that were then not bitwise as saved: model, master weights and moments.
        stock: trained without this package, for comparison; it may differ.
    """

    layout: str
    losses: Mapping[int, float]
    compared: tuple[int, ...]
    export_md5: str | None = None
    unequal_tensors: tuple[str, ...] = ()
    stock: bool = False


@dataclass(frozen=True)
class LossComparison:
    """A model under several layouts.

    Args:
        model: its name.
        resumed_at: the step at which the layouts resumed.
        reference: the uninterrupted run.
        lines: the resumed runs.
        reloaded: loss at the first step after the resume when training starts from the export.
    """

    model: str
    resumed_at: int
    reference: LossLine
    lines: tuple[LossLine, ...]
    reloaded: float | None = None

    def difference(self, line: LossLine, step: int) -> float:
        """Return the difference of a step's loss from the uninterrupted run's; infinite for a missing loss or NaN."""
        difference = abs(line.losses.get(step, math.nan) - self.reference.losses.get(step, math.nan))
        return math.inf if math.isnan(difference) else difference

    def largest_difference(self, line: LossLine) -> float:
        """Return the largest difference over the compared steps."""
        return max(self.difference(line, step) for step in line.compared)

    def faults(self) -> list[str]:
        """Return the faults, one sentence each."""
        found = []
        for line in self.lines:
            if line.stock:
                continue
            if self.largest_difference(line) > TOLERANCE:
                found.append(
                    f"{self.model}, {line.layout}: the loss differs by {self.largest_difference(line):.1e} from the "
                    f"uninterrupted run's; allowed are {TOLERANCE:.0e}."
                )
            if line.unequal_tensors:
                found.append(
                    f"{self.model}, {line.layout}: {count_text(len(line.unequal_tensors), 'tensor')} not as saved, "
                    f"the first is {line.unequal_tensors[0]}."
                )
            if line.export_md5 != self.reference.export_md5:
                found.append(f"{self.model}, {line.layout}: the export of what was loaded is not md5-equal.")
        return found + self._reload_faults()

    def _reload_faults(self) -> list[str]:
        first = self.resumed_at + 1
        expected = self.reference.losses.get(first, float("nan"))
        if self.reloaded is None or abs(self.reloaded - expected) <= TOLERANCE:
            return []
        return [
            f"{self.model}: the reloaded export gives loss {self.reloaded:.8f} at step {first}, not {expected:.8f}."
        ]

    def to_json(self) -> dict[str, Any]:
        """Return everything in this comparison, for ``summary.json`` and ``--json``."""
        return {
            "model": self.model,
            "resumed_at": self.resumed_at,
            "runs": [
                {
                    "layout": line.layout,
                    "stock": line.stock,
                    "losses": {str(step): _finite(loss) for step, loss in sorted(line.losses.items())},
                    "largest_difference": None if line is self.reference else _finite(self.largest_difference(line)),
                    "export_md5": line.export_md5,
                    "unequal_tensors": list(line.unequal_tensors),
                }
                for line in (self.reference, *self.lines)
            ],
            "reloaded_export_loss": None if self.reloaded is None else _finite(self.reloaded),
            "faults": self.faults(),
        }


def _finite(number: float) -> float | None:
    """JSON has no literal for infinity or NaN."""
    return number if math.isfinite(number) else None


def table(comparison: LossComparison) -> Table:
    """Return one comparison as a table: a row per run, the steps after the resume in columns."""
    last = max(comparison.reference.losses, default=comparison.resumed_at)
    steps = range(comparison.resumed_at + 1, last + 1)
    shown = Table(title=comparison.model, title_justify="left")
    shown.add_column("layout", no_wrap=True)
    for step in steps:
        shown.add_column(f"loss at {step}", justify="right")
    compared = sorted({step for line in comparison.lines for step in line.compared})
    shown.add_column("difference at " + ", ".join(map(str, compared)), justify="right")
    shown.add_column("md5 of the export", no_wrap=True)
    for line in (comparison.reference, *comparison.lines):
        losses = [f"{line.losses[step]:.8f}" if step in line.losses else "-" for step in steps]
        difference = "" if line is comparison.reference else f"{comparison.largest_difference(line):.1e}"
        style = "red" if line.stock else None
        shown.add_row(line.layout, *losses, difference, line.export_md5 or "", style=style)
    return shown


def draw(comparisons: Sequence[LossComparison], path: Path) -> None:
    """Draw per model the losses across the resume, and below them the distance to the uninterrupted run.

    Args:
        comparisons: one column each.
        path: the PNG to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        2, len(comparisons), sharex="col", squeeze=False, figsize=(6.4 * len(comparisons), 6.4), height_ratios=(2, 1)
    )
    for column, comparison in enumerate(comparisons):
        _draw_losses(axes[0][column], comparison)
        _draw_differences(axes[1][column], comparison)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_losses(axes: Axes, comparison: LossComparison) -> None:
    reference = sorted(comparison.reference.losses.items())
    label = f"{comparison.reference.layout}, uninterrupted"
    axes.plot(*zip(*reference, strict=True), color="0.75", linewidth=6, solid_capstyle="round", label=label)
    for index, line in enumerate(comparison.lines):
        points = sorted(line.losses.items())
        # Runs that agree lie on top of each other: hollow markers of falling size keep all of them visible.
        axes.plot(
            *zip(*points, strict=True),
            color=_COLOURS[index % len(_COLOURS)],
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=16 - 4 * index,
            markerfacecolor="none",
            linestyle="--" if line.stock else "-",
            label=line.layout,
        )
    _mark_resume(axes, comparison)
    axes.set_title(comparison.model)
    axes.set_ylabel("loss")
    axes.legend()


def _draw_differences(axes: Axes, comparison: LossComparison) -> None:
    steps = range(comparison.resumed_at + 1, max(comparison.reference.losses) + 1)
    for index, line in enumerate(comparison.lines):
        distances = [max(comparison.difference(line, step), _NOTHING) for step in steps]
        colour, marker = _COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)]
        axes.semilogy(
            list(steps), distances, color=colour, marker=marker, markersize=16 - 4 * index, markerfacecolor="none"
        )
    axes.axhline(TOLERANCE, color="0.6", linewidth=1, linestyle=":")
    axes.annotate(f"allowed: {TOLERANCE:.0e}", (1, TOLERANCE), xycoords=("axes fraction", "data"), **_ABOVE)
    axes.set_ylim(_NOTHING / 8, 1e-1)
    ticks = [10.0**power for power in range(-8, 0, 2)]
    axes.set_yticks([_NOTHING, *ticks], ["0", *(f"{tick:.0e}" for tick in ticks)])
    _mark_resume(axes, comparison)
    axes.set_xlabel("step")
    axes.set_ylabel("distance to uninterrupted")


def _mark_resume(axes: Axes, comparison: LossComparison) -> None:
    axes.axvline(comparison.resumed_at, color="0.3", linewidth=1, linestyle="--")
    axes.annotate(
        "resume",
        (comparison.resumed_at, 0.96),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        va="top",
        color="0.3",
    )
