"""The mapping of a model as AOA statements for Paddle's own FlexCheckpoint, in either direction.

The statements are derived from the rules of the model in a ``config.json``, or of a family's tiny configuration, and
verified by evaluating them. The family adds which layouts are fused per tensor-parallel rank. Some layouts, such as
those of Qwen 3.5, need different statements for each degree.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from paddleformers_fc.aoa import Hints, render
from paddleformers_fc.errors import MappingError, OptionError
from paddleformers_fc.families import (
    ModelDescription,
    ModelTensor,
    bind,
    described_by_file,
    enumerate_tensors,
    family_for,
)
from paddleformers_fc.families.declarations import DIVIDED, Family, Geometry
from paddleformers_fc.families.names import Names, family_sizes
from paddleformers_fc.families.registry import OWN, own_family, tiny_models
from paddleformers_fc.formats.registry import require_config
from paddleformers_fc.mapping import RuleSet
from paddleformers_fc.storage.files import is_directory
from paddleformers_fc.storage.paths import check_not_empty
from paddleformers_fc.text import fold

_PER_RANK = {Geometry.FUSED_FFN: "fused_ffn", Geometry.FUSED_QKV_PER_RANK: "fused_qkv_old"}


def aoa_text(
    family: Family, model: ModelDescription, tensors: Iterable[ModelTensor], *, reverse: bool = False
) -> list[str]:
    """Render the AOA statements from canonical tensors to a model's tensors.

    Args:
        family: the model's family.
        model: the description of the model.
        tensors: every tensor of the model.
        reverse: write the statements from the model's tensors to canonical ones instead.
    Raises:
        MappingError: the family does not declare a tensor, or the language cannot express the mapping.
    """
    known = list(tensors)
    rules = structs.replace(bind(family, model, known), cuts={tensor.name: tensor.cuts for tensor in known})
    return render(rules, _hints(family, model, rules), reverse=reverse)


def _hints(family: Family, model: ModelDescription, rules: RuleSet) -> Hints:
    sizes = family_sizes(family, model)
    known = sizes.defines("heads") and sizes.defines("kv_heads")
    index = Names(family, model)
    statements = ((name, kind.statement) for name in rules.targets for kind in index.find(name)[0])
    per_rank = {
        name: _PER_RANK[one.geometry] for name, one in statements if one.stack is None and one.geometry in _PER_RANK
    }
    return Hints(
        per_rank=per_rank,
        heads=(sizes.length("heads"), sizes.length("kv_heads")) if known else None,
    )


@dataclass(frozen=True)
class StatementList:
    """The statements of a mapping.

    Args:
        family: the family's name.
        direction: ``forward``, from open weights to the model, or ``reverse``.
        aoa_statements: the statements, for ``aoa_config``.
        tp: the tensor-parallel degree that they are for; None for any.
        toy_sizes: the tiny configuration of the family; None for the model of a directory.
    """

    family: str
    direction: str
    aoa_statements: list[str]
    tp: int | None = None
    toy_sizes: dict[str, Any] | None = None


def aoa_statements(model: str, *, reverse: bool, toy: bool = False, tp: int | None = None) -> StatementList:
    """Return the statements of a family, or of the model in a directory.

    Args:
        model: a ``model_type``, or a directory with ``config.json``.
        reverse: map from the model to open weights.
        toy: use the sizes of the family's tiny configuration; only for a family.
        tp: the tensor-parallel degree of the model; None for statements that are valid for any degree.

    Raises:
        OptionError: ``model`` is neither a family nor a directory, ``toy`` is missing for a family or set for a
            directory, or ``tp`` does not divide the model or is required.
        MappingError: no family declares the model, or the language cannot express its mapping.
    """
    check_not_empty(model)
    sizes = None
    if is_directory(Path(model)):
        if toy:
            raise OptionError(
                f"--toy is for families, and {model} is a directory.", where="--toy", next_step="Leave out --toy."
            )
        config = require_config(Path(model))
        family, built = family_for(config), described_by_file(config)
    else:
        if model not in OWN:
            raise OptionError(
                f"Unknown family {model!r}, and no such directory.",
                where="MODEL",
                evidence=[f"families: {', '.join(OWN)}"],
                next_step="Name a family, or a directory with a config.json.",
            )
        family = own_family(model)
        built, sizes = tiny_models(family)[0], {**family.defaults, **family.tiny}
        if not toy:
            raise OptionError(
                f"{model} is a family, and statements follow from the sizes of a model.",
                where="MODEL",
                evidence=[f"with --toy these are assumed: {sizes_text(sizes)}"],
                next_step="Name the directory of a model's config.json, or add --toy for statements of these sizes.",
            )
    statements = _statements(family, built, reverse, tp)
    return StatementList(family.name, "reverse" if reverse else "forward", statements, tp, sizes)


def _statements(family: Family, model: ModelDescription, reverse: bool, tp: int | None) -> list[str]:
    tensors, sizes = list(enumerate_tensors(family, model)), family_sizes(family, model)
    divided = {key: sizes.length(size) for size, key in DIVIDED.items() if sizes.defines(size)}
    divided |= {one.name: one.shape[one.cut] for one in tensors if one.cut is not None}

    def rendered(degree: int) -> list[str]:
        return aoa_text(family, model, [one.under(degree) for one in tensors], reverse=reverse)

    if tp is not None:
        faults = [f"{name}: {length}" for name, length in divided.items() if length % tp]
        if faults:
            raise OptionError(
                f"tp={tp} does not divide this model.",
                where="--tp",
                evidence=fold(faults),
                next_step="Choose a degree that divides the model.",
            )
        return rendered(tp)
    found, common = rendered(1), math.gcd(*divided.values())
    # If statements depend on the degree, they already differ between 1 and the smallest other degree.
    degree = next((one for one in range(2, common + 1) if common % one == 0), 1)
    try:
        others = rendered(degree)
    except MappingError as error:
        others = [error.what]
    if others != found:
        raise OptionError(
            "The statements of this model depend on the degree of tensor parallelism.",
            where="MODEL",
            evidence=[f"at tp={degree} and not at tp=1: {one}" for one in others if one not in found][:1],
            next_step="Name the degree of the training: --tp 1, --tp 2, ...",
        )
    return found


def sizes_text(sizes: Mapping[str, Any]) -> str:
    """Format sizes as ``key=value`` pairs."""
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in sizes.items())
