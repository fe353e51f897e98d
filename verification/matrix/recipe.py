"""Recipes of verification matrices: YAML files, validated before anything runs.

A recipe names layouts (:mod:`.layouts`) for rows and columns and one tiny model; every cell follows from them. Layouts
that do not fit the model are refused in one error with the sizes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from paddleformers_fc.errors import OptionError
from paddleformers_fc.families import ModelDescription, family_for
from paddleformers_fc.plan.simulate import declared_model
from verification.matrix.layouts import MatrixLayout, parse_layout
from verification.matrix.tiny import keys

ARROW = "->"
SAVED_AT = 3
LAST_STEP = 6
_PREDICTIONS = "num_nextn_predict_layers"


class Experiment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Two layouts trained from the same weights, set by hand, with no checkpoint in between: the inherent difference.

    Args:
        title: of its paragraph.
        text: its meaning.
        layouts: names of the two.
        variants: name -> keys that are changed; ``arguments`` and ``model``.
    """

    title: str
    text: str
    layouts: tuple[str, str]
    variants: dict[str, dict[str, dict[str, Any]]]


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A matrix.

    Args:
        title: of the document.
        text: a paragraph for its reader.
        model_type: of the tiny model.
        model: of the tiny model's configuration.
        sources: rows, names of layouts.
        targets: columns.
        arguments: training arguments.
        micro_batch: samples per forward; as many as fit by default.
        bf16: bfloat16 O2 with master weights in the place of float32.
        tolerance: the largest difference of a loss that needs no explanation.
        experiments: differences that are there without a checkpoint.
        adapters: settings of LoRA adapters that are trained in place of the model; empty for none.
        saved_at: the step at which the sources save.
        last_step: the step at which all runs end.
    """

    title: str
    text: str
    model_type: Literal["llama", "ernie4_5_moe", "qwen3", "qwen3_moe", "qwen2_5_vl"]
    model: dict[str, Any]
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    arguments: dict[str, Any] = {}
    micro_batch: int | None = None
    bf16: bool = False
    tolerance: float = 1e-6
    experiments: tuple[Experiment, ...] = ()
    adapters: dict[str, Any] = {}
    saved_at: int = SAVED_AT
    last_step: int = LAST_STEP

    @property
    def fingerprint(self) -> str:
        """The digest of everything that a cell's outcome depends on, apart from its two layouts."""
        relevant: tuple[object, ...] = (self.model_type, self.model, self.arguments, self.micro_batch, self.bf16)
        relevant += (self.adapters,) if self.adapters else ()
        relevant += (self.saved_at, self.last_step) if self.last_step != LAST_STEP else ()
        return hashlib.sha256(msgspec.json.encode(relevant, order="sorted")).hexdigest()[:16]


class Cell(msgspec.Struct, frozen=True):
    """One conversion.

    Args:
        source: the layout that saves.
        target: the layout that resumes.
        hold_predictions: multi-token prediction layers are held by both and trained by neither.
    """

    source: MatrixLayout
    target: MatrixLayout
    hold_predictions: bool

    @property
    def name(self) -> str:
        """``tp2->pp4``."""
        return f"{self.source.name}{ARROW}{self.target.name}"


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Context manager around reading a recipe of either form, whose faults become errors of this package."""
    try:
        yield
    except (OSError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise OptionError(
            "Invalid recipe of a verification matrix.",
            where=str(path),
            evidence=[str(error)],
            next_step="See recipes/verification for the two forms of a recipe.",
        ) from error


def read_recipe(path: Path) -> Recipe:
    """Return a recipe from its file.

    Raises:
        OptionError: the file is not a recipe, or its model cannot have one of the layouts.
    """
    with reading(path):
        recipe = msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")), Recipe, strict=True)
    names = (*recipe.sources, *recipe.targets, *(name for one in recipe.experiments for name in one.layouts))
    faults = [fault for name in dict.fromkeys(names) for fault in _faults(recipe, parse_layout(name))]
    if faults:
        raise OptionError(
            "The model of this recipe does not fit the layouts.",
            where=str(path),
            evidence=faults,
            next_step="Change the layouts or the model's configuration.",
        )
    return recipe


def _faults(recipe: Recipe, layout: MatrixLayout) -> list[str]:
    """Return the reason why the recipe's model does not fit this layout, with the numbers."""
    config = keys(recipe.model_type, **recipe.model)
    try:
        declared_model(family_for(config), ModelDescription(config, is_fleet=False), layout.grid)
    except OptionError as error:
        return [f"{layout.name}: {fault}" for fault in error.evidence]
    return []


def cells_of(recipe: Recipe) -> list[Cell]:
    """Return every cell, row by row."""
    rows, columns = (
        [replace(parse_layout(name), bf16=recipe.bf16) for name in names] for names in (recipe.sources, recipe.targets)
    )
    predicts = bool(recipe.model.get(_PREDICTIONS))
    return [Cell(row, column, predicts and max(row.pp, column.pp) > 1) for row in rows for column in columns]


def chosen(cells: list[Cell], pattern: str | None) -> list[Cell]:
    """Return the cells whose names match, such as ``tp2->*``; all without a pattern.

    Raises:
        OptionError: none does.
    """
    if pattern is None:
        return cells
    source, arrow, target = pattern.partition(ARROW)
    found = [
        cell
        for cell in cells
        if fnmatchcase(cell.source.name, source) and fnmatchcase(cell.target.name, target if arrow else "*")
    ]
    if not found:
        raise OptionError(
            f"Unknown cell {pattern!r} of the matrix.",
            evidence=[cell.name for cell in cells[:3]],
            next_step="Write SOURCE->TARGET, in quotes; * matches any.",
        )
    return found
