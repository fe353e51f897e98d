"""The results of the demo: the tables and the picture.

This module only presents. :class:`LossComparison` decides what is equal, from numbers alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from paddleformers_fc.text import count_text
from verification import curves
from verification.demo.settings import STEPS

TOLERANCE = 1e-6
"""Largest difference of a loss from the uninterrupted run's that counts as the same training."""


@dataclass(frozen=True)
class LossLine:
    """One training after the resume, beside the uninterrupted one.

    Args:
        layout: its name.
        losses: step -> loss.
        export_md5: md5 of the export of the run's state before its first step after the resume, as ``export`` prints
            it.
        unequal_tensors: tensors that were then not bitwise as saved: model, master weights and moments.
        stock: trained without this package, for comparison; it may differ.
    """

    layout: str
    losses: Mapping[int, float]
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

    @property
    def compared(self) -> range:
        """The steps at which the loss must be that of the uninterrupted run."""
        return range(self.resumed_at + 1, STEPS + 1)

    def largest_difference(self, line: LossLine) -> float:
        """Return the largest difference to the uninterrupted run's loss; infinite if a loss is missing or NaN."""
        expected = self.reference.losses
        apart = [abs(line.losses.get(step, math.nan) - expected.get(step, math.nan)) for step in self.compared]
        return max(math.inf if math.isnan(one) else one for one in apart)

    def faults(self) -> list[str]:
        """Return the faults, one sentence each."""
        return [
            *(f"{self.model}, {line.layout}: {fault}" for line in self.lines for fault in self._faults_of(line)),
            *self._reload_faults(),
        ]

    def _faults_of(self, line: LossLine) -> Iterator[str]:
        if line.stock:
            return
        difference = self.largest_difference(line)
        if difference > TOLERANCE:
            yield (f"the loss differs by {difference:.1e} from the uninterrupted run's; allowed are {TOLERANCE:.0e}.")
        if line.unequal_tensors:
            count = count_text(len(line.unequal_tensors), "tensor")
            yield f"{count} not as saved, the first is {line.unequal_tensors[0]}."
        if line.export_md5 != self.reference.export_md5:
            yield "the export of what was loaded is not md5-equal."

    def _reload_faults(self) -> Iterator[str]:
        first = self.resumed_at + 1
        expected = self.reference.losses.get(first, math.nan)
        if self.reloaded is not None and not abs(self.reloaded - expected) <= TOLERANCE:
            yield (
                f"{self.model}: the reloaded export gives loss {self.reloaded:.8f} at step {first}, not {expected:.8f}."
            )


def table(comparison: LossComparison) -> Table:
    """Return one comparison as a table: a row per run, the steps after the resume in columns."""
    steps = comparison.compared
    shown = Table(title=comparison.model, title_justify="left")
    shown.add_column("layout", no_wrap=True)
    for step in steps:
        shown.add_column(f"loss at {step}", justify="right")
    shown.add_column("difference at " + ", ".join(map(str, steps)), justify="right")
    shown.add_column("md5 of the export", no_wrap=True)
    for line in (comparison.reference, *comparison.lines):
        losses = [f"{line.losses[step]:.8f}" if step in line.losses else "-" for step in steps]
        difference = "" if line is comparison.reference else f"{comparison.largest_difference(line):.1e}"
        style = "red" if line.stock else None
        shown.add_row(line.layout, *losses, difference, line.export_md5 or "", style=style)
    return shown


def draw(comparisons: Sequence[LossComparison], path: Path) -> None:
    """Draw the losses of each model across the resume, and their distance to the uninterrupted run."""
    columns = []
    for one in comparisons:
        resumed = {line.layout: line.losses for line in one.lines}
        stock = [line.layout for line in one.lines if line.stock]
        columns.append(
            curves.Curves(one.model, one.reference.layout, one.reference.losses, resumed, one.resumed_at, stock)
        )
    curves.draw(columns, path)
