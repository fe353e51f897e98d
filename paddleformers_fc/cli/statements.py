"""``aoa``: a family's mapping as statements that stock FlexCheckpoint reads, in either direction.

The statements are those of the family's tiny configuration, or of a model's own ``config.json``, and are read back and
compared with the mapping before they are shown. They hold at every degree of tensor parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paddleformers_fc.cli.opening import required_config
from paddleformers_fc.errors import OptionError
from paddleformers_fc.families import FAMILIES, Family, described_by_file, enumerate_tensors, family_for
from paddleformers_fc.families.text import aoa_text, tiny_aoa_text
from paddleformers_fc.storage.places import refuse_nothing

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Statements:
    """What the verb prints.

    Args:
        family: the family's name.
        direction: ``forward``, from open weights to the model, or ``reverse``.
        aoa_statements: as stock's ``aoa_config`` takes them.
    """

    family: str
    direction: str
    aoa_statements: list[str]


def statements(model: str, *, reverse: bool) -> Statements:
    """The statements of a family, or of the model in a directory.

    Args:
        model: a ``model_type``, a family's name, or a directory with ``config.json``.
        reverse: from the model to open weights.

    Raises:
        OptionError: no family has this name and there is no such directory.
        MappingError: no family declares the model, or the language cannot say its mapping.
    """
    refuse_nothing(model)
    direction = "reverse" if reverse else "forward"
    if Path(model).is_dir():
        config = required_config(Path(model))
        family = family_for(config)
        built = described_by_file(config)
        tensors = [tensor.under(tp=1) for tensor in enumerate_tensors(family, built)]
        return Statements(family.name, direction, aoa_text(family, built, tensors, reverse=reverse))
    family = _named(model)
    return Statements(family.name, direction, tiny_aoa_text(family, reverse=reverse))


def _named(name: str) -> Family:
    for family in FAMILIES:
        if name in (family.name, *family.model_types):
            return family
    raise OptionError(
        f"No family is called {name!r}, and there is no such directory.",
        where="MODEL",
        evidence=[f"families: {', '.join(family.name for family in FAMILIES)}"],
        next_step="Name a family, or a directory with a config.json.",
    )


def show(found: Statements, console: Console) -> None:
    """The statements, one per line, ready to be pasted."""
    from rich.text import Text

    for statement in found.aoa_statements:
        console.print(Text(statement), soft_wrap=True)
