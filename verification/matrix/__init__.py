"""The verification matrices: every layout saves, every layout resumes, and a table shows how equal the results are.

A tiny model is trained on a machine without an accelerator, through PaddleFormers' own Trainer, on real ranks with real
collectives. :mod:`.running` defines a cell, :mod:`.recipe` a recipe. The result is a document with a table for every
recipe. The matrix of all families has simulated layouts and no losses: :mod:`.simulated`.

Time: see :mod:`.running`; a matrix of 64 cells takes 3 to 5 minutes on two cores.
"""

from __future__ import annotations

import shlex
import time
from pathlib import Path

from paddleformers_fc.output import console
from verification.matrix import report
from verification.matrix.recipe import cells_of, chosen, read_recipe
from verification.matrix.running import CellOutcome, Workshop, file_name
from verification.matrix.simulated import read_simulated, run_simulated

PROGRAM = "python -m verification.matrix"


def run_matrix(path: Path, only: str | None, work: Path, documents: Path) -> int:
    """Run a matrix, or some of its cells, and write its document.

    Args:
        path: the recipe.
        only: a pattern of cells, such as ``tp2->*``; all by default.
        work: for runs; completed cells of this recipe in it are reused.
        documents: gets ``<recipe>.md``.
    Returns:
        0 when every cell that ran was right, else 1.
    Raises:
        OptionError: the recipe, or the choice of cells, cannot be used.
    """
    simulated = read_simulated(path)
    if simulated is not None:
        return run_simulated(simulated, path.stem, only, documents)
    recipe = read_recipe(path)
    cells = cells_of(recipe)
    wanted = chosen(cells, only)
    root = work.absolute() / path.stem
    started = time.monotonic()
    progress = console(stderr=True)
    outcomes: list[CellOutcome] = []
    with Workshop(recipe, root) as workshop:
        for outcome in workshop.run(wanted):
            outcomes.append(outcome)
            wrong = "" if outcome.right(recipe.tolerance) else f": WRONG, {report.reason(outcome)}"
            progress.print(f"{recipe.title}: {len(outcomes)} of {len(wanted)}, {outcome.name}{wrong}")
        found = [workshop.experiment(one) for one in recipe.experiments]
    known = {cell.name: workshop.known(cell) for cell in cells}
    report.write(recipe, known, found, documents / path.stem)
    faults = [outcome for outcome in outcomes if not outcome.right(recipe.tolerance)]
    right, equal = len(outcomes) - len(faults), sum(one not in faults and one.difference == 0 for one in outcomes)
    print(f"{recipe.title}: {right} of {len(outcomes)} cells right, {equal} of them with bitwise equal losses.")
    print(f"{documents / path.stem}.md: {time.monotonic() - started:.0f} s.")
    for outcome in faults:
        again = f"{PROGRAM} {shlex.join([str(path), '--only', outcome.name])}"
        print(f"WRONG: {outcome.name}: {report.reason(outcome)}")
        print(f"    logs: {root / 'cells' / file_name(outcome.name)}\n    again: {again}")
    return 1 if faults else 0
