"""Run the trainings of the longer proof as cells of matrices.

Every training leaves a JSON file when it is finished; a second run starts with the first one that has none.

Time: 250 steps of four ranks take about a minute on two free cores. Memory: 400 MB, and about 50 MB per rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from paddleformers_fc.errors import PeerError
from verification.matrix.recipe import Recipe, cells_of
from verification.matrix.report import reason
from verification.matrix.running import Workshop

SAVED_AT = 50
LAST_STEP = 250
Losses = dict[int, float]

_LLAMA = Recipe(
    title="Llama",
    text="",
    model_type="llama",
    model={"num_key_value_heads": 4},
    sources=("sd2+tp2",),
    targets=("tp2+pp2", "sd2v1", "dp1"),
    arguments={"learning_rate": 0.002},
    tolerance=1.0,
    saved_at=SAVED_AT,
    last_step=LAST_STEP,
)
_ERNIE = structs.replace(
    _LLAMA,
    title="ERNIE 4.5 MoE",
    model_type="ernie4_5_moe",
    sources=("sd2+tp2(ep2)",),
    targets=("tp2(ep2)+pp2", "sd2(ep2)", "dp1"),
    # Under expert parallelism Paddle clips by a norm that depends on the layout.
    arguments={**_LLAMA.arguments, "max_grad_norm": 0.0},
)
RECIPES = (_LLAMA, _ERNIE)
"""Matrices of one source, whose differences are shown and not judged."""


@dataclass(frozen=True)
class Findings:
    """The results of a matrix.

    Args:
        title: of its part of the page.
        source: name of the layout of the uninterrupted run.
        whole: losses of that run by step.
        resumed: those of the resumed runs by layout.
    """

    title: str
    source: str
    whole: Losses
    resumed: dict[str, Losses]

    def difference(self, layout: str) -> tuple[float, int]:
        """Return the largest difference of a loss to that of the uninterrupted run, and the step at which it is."""
        losses = self.resumed[layout]
        return max((abs(losses[step] - self.whole[step]), -step) for step in losses)


def run(recipe: Recipe, root: Path) -> Findings:
    """Run a matrix, or the rest of it, and print a line per training.

    Args:
        recipe: of the matrix.
        root: the directory of all runs.
    Raises:
        PeerError: a training failed, or a tensor is not as saved.
    """
    place, cells = root / recipe.model_type, cells_of(recipe)
    resumed: dict[str, Losses] = {}
    with Workshop(recipe, place) as workshop:
        for cell, outcome in zip(cells, workshop.run(cells), strict=True):
            if not outcome.right(recipe.tolerance):
                raise PeerError(f"{outcome.name}: {reason(outcome)}.", where=str(place), next_step="Read the logs.")
            resumed[cell.target.name] = dict(enumerate(outcome.losses, SAVED_AT + 1))
            print(f"{recipe.title}, {outcome.name}: last loss {outcome.losses[-1]}", flush=True)
        whole = dict(enumerate(workshop.saved(cells[0]).losses, 1))
    return Findings(recipe.title, recipe.sources[0], whole, resumed)
