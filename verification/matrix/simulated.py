"""The matrix of all families by simulated layouts: real bytes, no losses, a row per model.

Its models are the tiny ones on which the families are proved, of every class of PaddleFleet and PaddleFormers, whether
or not the class can be built here. The recipe names the layouts that save and those that resume, for models with
experts and for others. The question of a cell is that of :mod:`verification.simulate_ranks`.

Time: half a second per cell. Memory: one tiny model per simulated rank.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import msgspec
import yaml
from msgspec import structs

from paddleformers_fc.errors import OptionError
from paddleformers_fc.families import Family, ModelDescription, own_families
from paddleformers_fc.families.declarations import Stage
from paddleformers_fc.families.names import family_sizes
from paddleformers_fc.families.registry import NLP, family_classes, tiny_models
from paddleformers_fc.plan.simulate import SimulatedModel, declared_model
from verification import temporary_directory
from verification.matrix.layouts import parse_layout
from verification.matrix.recipe import ARROW, reading
from verification.matrix.report import EQUAL, WRONG
from verification.simulate_ranks import round_trips

SLICE_ABOVE = 100
"""Stage 3 slices what has more elements: every matrix of the tiny models."""

_LEGEND = """
    A cell is one conversion: simulated ranks of one layout save, ranks of another load and save, and ranks of the
    first load that again. *equal*: every tensor of every role is md5-equal under both, and so are the exports. `sd` is
    sharding: stage 1 is v1 of whole parameters and v2 of flattened ranges, `s3` is stage 3; `ep` spreads the experts.
"""


class SimulatedLayouts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The layouts of some models.

    Args:
        sources: names of those that save.
        targets: names of those that resume.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]


class SimulatedRecipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A matrix by simulated layouts.

    Args:
        title: of the document.
        text: a paragraph for its reader.
        simulated: the models.
        dense: layouts of models without experts.
        experts: layouts of models with experts.
    """

    title: str
    text: str
    simulated: Literal["families"]
    dense: SimulatedLayouts
    experts: SimulatedLayouts


class SimulatedOutcome(msgspec.Struct, frozen=True):
    """The results of the cells of one model.

    Args:
        name: family and class.
        cells: how many.
        tensors: canonical tensors of all roles, compared in every cell.
        wrong: cells that are not equal, with the first difference of each.
    """

    name: str
    cells: int
    tensors: int
    wrong: dict[str, str]

    @property
    def text(self) -> str:
        """The number of equal cells."""
        found = f"{self.cells - len(self.wrong)} of {self.cells} cells {EQUAL}"
        return f"{found}, **{WRONG}**: {', '.join(self.wrong)}" if self.wrong else found


def read_simulated(path: Path) -> SimulatedRecipe | None:
    """Return the recipe, or None where the file is a recipe of trained layouts.

    Raises:
        OptionError: it names models that are not simulated, or has other keys.
    """
    with reading(path):
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or "simulated" not in found:
            return None
        return msgspec.convert(found, SimulatedRecipe, strict=True)


def simulated_models() -> dict[str, tuple[Family, ModelDescription]]:
    """Return the tiny models of all families by family and class, such as ``qwen3 (PaddleFleet)``."""
    return {
        f"{family.name} ({kind})": (family, _whole_in_pipelines(family, model))
        for family in own_families()
        for kind, model in zip(family_classes(family), tiny_models(family), strict=True)
        if kind != NLP
    }


def _whole_in_pipelines(family: Family, model: ModelDescription) -> ModelDescription:
    """Return a model of which a pipeline holds every tensor once: without ties and parts that no pipeline builds."""
    untied = {"tie_word_embeddings": False}
    config = {**model.config, **untied}
    config |= {one.key: {**config[one.key], **untied} for one in family.towers if one.flat and one.key in config}
    if any(one.stage is Stage.ABSENT for one in family.statements):
        config["num_nextn_predict_layers"] = 0
    return structs.replace(model, config=config)


def run_simulated(recipe: SimulatedRecipe, stem: str, only: str | None, documents: Path) -> int:
    """Run the matrix, or that of some models, and write its document.

    Args:
        recipe: of the matrix.
        stem: of the document.
        only: a pattern of models, such as ``qwen3*``; the document is written when all of them ran.
        documents: gets ``<stem>.md``.
    Returns:
        0 when every cell that ran was equal, else 1.
    Raises:
        OptionError: no model is called that, or a layout does not fit a model.
    """
    models = simulated_models()
    chosen = [name for name in models if fnmatchcase(name, only or "*")]
    if not chosen:
        raise OptionError(
            f"Unknown model {only!r} of the matrix.",
            evidence=[f"models: {', '.join(models)}"],
            next_step="Write the name of a family and a class, in quotes; * matches any.",
        )
    started, found = time.monotonic(), []
    for name in chosen:
        found.append(outcome(recipe, name, *models[name]))
        print(f"{name}: {found[-1].text}, {found[-1].tensors} tensors each")
    if only is None:
        _write(recipe, found, documents / f"{stem}.md")
    print(f"{recipe.title}: {_equal(found)} cells bitwise equal, {time.monotonic() - started:.0f} s.")
    wrong = [f"{one.name}: {cell}: {difference}" for one in found for cell, difference in one.wrong.items()]
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


def outcome(recipe: SimulatedRecipe, name: str, family: Family, model: ModelDescription) -> SimulatedOutcome:
    """Run the cells of one model, of the layouts that the recipe has for it."""
    layouts = recipe.experts if family_sizes(family, model).defines("experts") else recipe.dense
    alone, rows, columns = (_laid_out(family, model, names) for names in (("dp1",), layouts.sources, layouts.targets))
    with temporary_directory() as directory:
        found = list(round_trips(alone["dp1"], rows, columns, directory))
    wrong = {f"{hop.source}{ARROW}{hop.target}": hop.differences[0] for hop in found if not hop.equal}
    return SimulatedOutcome(name, len(found), found[0].tensors, wrong)


def _laid_out(family: Family, model: ModelDescription, names: Iterable[str]) -> Mapping[str, SimulatedModel]:
    grids = {name: replace(parse_layout(name).grid, slice_above=SLICE_ABOVE) for name in names}
    return {name: declared_model(family, model, grid, "bfloat16") for name, grid in grids.items()}


def _equal(found: Sequence[SimulatedOutcome]) -> str:
    cells = sum(one.cells for one in found)
    return f"{cells - sum(len(one.wrong) for one in found)} of {cells}"


def _write(recipe: SimulatedRecipe, found: Sequence[SimulatedOutcome], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    compared = sum(one.cells * one.tensors for one in found)
    layouts = [
        f"* Models {kind} experts: {', '.join(one.sources)} save, and {', '.join(one.targets)} resume each of them."
        for kind, one in (("without", recipe.dense), ("with", recipe.experts))
    ]
    rows = [f"| {one.name} | {one.text} | {one.tensors} |" for one in found]
    parts = [
        f"# {recipe.title}: any layout to any layout",
        textwrap.fill(" ".join(recipe.text.split()), 120),
        f"* {_equal(found)} cells: every tensor md5-equal, A to B and back to A, and the exports of A and B too "
        f"({compared:,} tensors compared twice: weights, master weights, moments, powers of beta, averages).\n"
        + "\n".join(layouts),
        "\n".join(["| model | cells | tensors in each |", "|---|---|---|", *rows]),
        textwrap.fill(" ".join(_LEGEND.split()), 120) + "\n`make matrix` writes this page.",
    ]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
