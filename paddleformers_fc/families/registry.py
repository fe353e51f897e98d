"""Which family a configuration belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddleformers_fc.errors import MappingError
from paddleformers_fc.families import ernie4_5, ernie4_5_moe, llama
from paddleformers_fc.families.declarations import Family

FAMILIES: tuple[Family, ...] = (llama.FAMILY, ernie4_5.FAMILY, ernie4_5_moe.FAMILY)


def family_for(config: Mapping[str, Any]) -> Family:
    """The family that declares this configuration's ``model_type``.

    Raises:
        MappingError: where no family declares it.
    """
    model_type = config.get("model_type")
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = sorted(name for family in FAMILIES for name in family.model_types)
    raise MappingError(
        f"No family declares model_type {model_type!r}.",
        where="config.json",
        evidence=[f"known model types: {', '.join(known)}"],
        next_step="Declare the family: one statement per kind of tensor, as in paddleformers_fc/families/llama.py.",
    )
