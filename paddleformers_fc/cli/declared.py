"""``families``: the declared families, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from paddleformers_fc.families.registry import FAMILIES, family_classes

if TYPE_CHECKING:
    from rich.console import Console


class FamilyFacts(msgspec.Struct, frozen=True):
    """A model family.

    Attributes:
        family: the ``model_type``.
        classes: libraries of its model classes.
    """

    family: str
    classes: list[str]


class FamilyTable(msgspec.Struct, frozen=True):
    """The families of this package.

    Attributes:
        families: in order of their names.
    """

    families: list[FamilyFacts]


def family_table() -> FamilyTable:
    """Return every declared family."""
    return FamilyTable([FamilyFacts(one.name, family_classes(one)) for one in FAMILIES])


def show(found: FamilyTable, console: Console) -> None:
    """Print a row per family."""
    from rich import box
    from rich.table import Table

    table = Table("family", "classes", box=box.SIMPLE_HEAD, pad_edge=False)
    for one in found.families:
        table.add_row(one.family, ", ".join(one.classes))
    console.print(table)
