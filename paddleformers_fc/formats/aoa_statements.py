"""The mapping of a model as statements that Paddle's FlexCheckpoint reads, in either direction.

The statements follow from the sizes in ``config.json``, or for a family alone from its tiny configuration. They are
read back and compared with the mapping first, and hold at every tensor-parallel degree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddleformers_fc.errors import OptionError
from paddleformers_fc.families import FAMILIES, Family, described_by_file, enumerate_tensors, family_for
from paddleformers_fc.families.aoa_text import aoa_text, tiny_aoa_text
from paddleformers_fc.formats.registry import require_config
from paddleformers_fc.storage.files import is_directory
from paddleformers_fc.storage.paths import refuse_empty


@dataclass(frozen=True)
class StatementList:
    """The statements of a mapping.

    Args:
        family: the family's name.
        direction: ``forward``, from open weights to the model, or ``reverse``.
        aoa_statements: for ``aoa_config``.
        toy_sizes: the tiny configuration of the family; None for the model of a directory.
    """

    family: str
    direction: str
    aoa_statements: list[str]
    toy_sizes: dict[str, Any] | None = None


def aoa_statements(model: str, *, reverse: bool, toy: bool = False) -> StatementList:
    """Return the statements of a family, or of the model in a directory.

    Args:
        model: a ``model_type``, a family's name, or a directory with ``config.json``.
        reverse: from the model to open weights.
        toy: assume the sizes of the family's tiny configuration; for a family alone.

    Raises:
        OptionError: no family has this name and there is no such directory; a family without ``toy``, or a directory
            with it.
        MappingError: no family declares the model, or the language cannot express its mapping.
    """
    refuse_empty(model)
    direction = "reverse" if reverse else "forward"
    if is_directory(Path(model)):
        if toy:
            raise OptionError(
                f"{model} is a directory with sizes of its own.", where="--toy", next_step="Leave out --toy."
            )
        config = require_config(Path(model))
        family = family_for(config)
        built = described_by_file(config)
        tensors = [tensor.under(tp=1) for tensor in enumerate_tensors(family, built)]
        return StatementList(family.name, direction, aoa_text(family, built, tensors, reverse=reverse))
    family = _named(model)
    sizes = {**family.defaults, **family.tiny}
    if not toy:
        raise OptionError(
            f"{model} is a family, and statements follow from the sizes of a model.",
            where="MODEL",
            evidence=[f"with --toy these are assumed: {sizes_text(sizes)}"],
            next_step="Name the directory of a model's config.json, or add --toy for the statements of these sizes.",
        )
    return StatementList(family.name, direction, tiny_aoa_text(family, reverse=reverse), sizes)


def sizes_text(sizes: Mapping[str, Any]) -> str:
    """Format sizes as ``key=value`` pairs."""
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in sizes.items())


def _named(name: str) -> Family:
    for family in FAMILIES:
        if name in (family.name, *family.model_types):
            return family
    raise OptionError(
        f"Unknown family {name!r}, and no such directory.",
        where="MODEL",
        evidence=[f"families: {', '.join(family.name for family in FAMILIES)}"],
        next_step="Name a family, or a directory with a config.json.",
    )
