"""Options as AOA lines that a person can give back: with placeholders, where that means all tensors of a kind."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from paddleformers_fc.aoa import Hints, render
from paddleformers_fc.aoa.names import EXPERT, LAYER, NameIndex
from paddleformers_fc.errors import MappingError
from paddleformers_fc.mapping import Shape, TensorMapping, TensorSpec
from paddleformers_fc.verification.derivation.options import Option

_NAME = re.compile(r"[A-Za-z_][\w.]*\.\w*")
_FIRST = re.compile(r"\^T| -> |, ")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|\b)")


def answer_lines(
    options: Sequence[Option],
    shapes: Mapping[str, Shape],
    canonical: Mapping[str, TensorSpec],
    cuts: Mapping[str, Shape],
) -> tuple[str, ...]:
    """Return the AOA lines that choose one layout for several tensors of one kind: one line if one statement suffices.

    Args:
        options: the option of every tensor.
        shapes: of the model's tensors.
        canonical: the canonical side, from whose names placeholders take their numbers.
        cuts: into how many shards the model's tensors are cut.
    """
    first = options[0]
    if not first.text:
        return _rendered(first, shapes, canonical, cuts)
    general = {_general(option.text) for option in options}
    (one,) = general if len(general) == 1 else ("",)
    matched = NameIndex(canonical).matches(_FIRST.split(one)[0]) if "$" in one else []
    return (one if len(matched) == len(options) else first.text,)


def _general(text: str) -> str:
    """Return the text with placeholders for its numbers if all its names have the same one or two; else unchanged."""
    names = _NAME.findall(text)
    numbers = {tuple(_NUMBER.findall(name)) for name in names}
    if len(numbers) != 1 or len(min(numbers)) not in (1, 2):
        return text
    return _NAME.sub(lambda found: _placed(found.group()), text)


def _placed(name: str) -> str:
    known = iter((LAYER, EXPERT))
    return _NUMBER.sub(lambda _: next(known), name)


def _rendered(
    option: Option,
    shapes: Mapping[str, Shape],
    canonical: Mapping[str, TensorSpec],
    cuts: Mapping[str, Shape],
) -> tuple[str, ...]:
    rules = option.rules
    targets = {name: TensorSpec(shapes[name], "float32") for rule in rules for name in rule.targets}
    items = tuple(
        item for rule in rules for item in rule.correspondences([targets[name].shape for name in rule.targets])
    )
    sources = {name: TensorSpec(spec.shape, "float32") for name, spec in canonical.items()}
    try:
        return tuple(render(TensorMapping.of(sources, targets, items), Hints(right=dict(cuts))))
    except MappingError as error:
        return (error.what,)
