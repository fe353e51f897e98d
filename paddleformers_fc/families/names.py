"""Look up the statements and canonical names of a model's tensors by name, with one dictionary access each.

This module also derives the sizes, numbers, configuration keys, ties and heads of a model from its family and its
configuration.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from paddleformers_fc.errors import MappingError
from paddleformers_fc.families.declarations import NUMBER, PLACEHOLDER, SIZES, Family, Numbers, Statement, Tower
from paddleformers_fc.families.description import IS_FLEET, ModelDescription, with_adapters
from paddleformers_fc.families.sizes import Sizes, names_of, value_at
from paddleformers_fc.mapping import Shape, TensorSpec

_TOKEN = re.compile(r"\{\w+\}|(?<=\.)[0-9]{1,18}(?=\.|\Z)")
_HOLE = "{}"
_PREFIXES = {"visual.": "model.visual.", "model.": "model.language_model."}
"""Prefixes in files of Qwen 2.5 VL, and the prefixes in its models."""
_DELTA = "linear_num_key_heads"
_HEADS = {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", _DELTA: _DELTA}
_USERS = {"heads": {"heads", "q"}, "kv_heads": {"kv_heads", "kv"}, _DELTA: {_DELTA}}
_OF_HEADS = frozenset[str]().union(*_USERS.values())
_NO_CLASS = (
    "is unknown: `architectures` of the configuration names no class, and this family has a PaddleFleet class and a "
    "PaddleFormers class (whose name ends in Deprecated)"
)


class Kind(msgspec.Struct, frozen=True):
    """A statement under one configuration.

    Args:
        statement: the statement.
        sizes: the sizes of its tower.
        sources: its canonical names, as format strings for the numbers.
        holes: the numbers of its name: placeholders and digits; ``shifts`` and ``spans`` have the same order.
        shifts: numbers in the model minus canonical numbers.
        spans: the canonical numbers; None if the configuration does not determine them.
        expert_shift: the shift of ``expert``.
        whole: the global length of the axis that tensor parallelism cuts; None if the configuration does not determine
            it.
        layouts: cache of :mod:`.bind`: the layout by shape and cuts.
    """

    statement: Statement
    sizes: Sizes
    sources: tuple[str, ...]
    holes: tuple[str, ...]
    shifts: tuple[int, ...]
    spans: tuple[range | None, ...]
    expert_shift: int
    whole: int | None
    layouts: dict[tuple[Shape, Shape], Any] = msgspec.field(default_factory=dict)

    def numbers(self, texts: Sequence[str]) -> dict[str, int]:
        """Return the canonical numbers of a name, by placeholder."""
        return {hole: int(text) - shift for hole, text, shift in zip(self.holes, texts, self.shifts, strict=True)}

    def shape(self, numbers: Mapping[str, int]) -> Shape | None:
        """Return the declared shape of the tensor with these numbers; None if the configuration is not sufficient."""
        known, statement = with_layer(self.statement, self.sizes, numbers), self.statement
        needed = statement.shape if statement.stack is None else (*statement.shape, "experts")
        if not all(self.sizes.defines(size, known) for size in needed):
            return None
        return shape_of(statement, self.sizes, known)

    def holds(self, numbers: Mapping[str, int]) -> bool | None:
        """Return whether the statement's conditions hold; None if the configuration lacks a key for them."""
        try:
            return self.sizes.holds(self.statement.where, with_layer(self.statement, self.sizes, numbers))
        except MappingError:
            return None


def with_layer(statement: Statement, sizes: Sizes, numbers: Mapping[str, int]) -> Mapping[str, int]:
    """Return the numbers of a name, with the ``layer`` that the statement's conditions get."""
    return {**numbers, "layer": sizes.length(statement.layer, numbers)} if statement.layer else numbers


def shape_of(statement: Statement, sizes: Sizes, numbers: Mapping[str, int]) -> Shape:
    """Return the shape of the tensor with these numbers; for a stack, including all experts of the layer.

    Raises:
        MappingError: the configuration lacks a key.
    """
    shape = tuple(sizes.length(size, numbers) for size in statement.shape)
    if statement.stack is None:
        return shape
    count = sizes.length("experts")
    return (count, *shape) if statement.rank > len(shape) else (count * shape[0], *shape[1:])


class Names:
    """The statements of a model by the names of its tensors.

    Args:
        family: the model's family.
        model: the model, with its adapters.
    Attributes:
        kinds: the statements, in order.
    Raises:
        MappingError: a canonical name contains a placeholder that the model's name lacks.
    """

    def __init__(self, family: Family, model: ModelDescription) -> None:
        self.sizes = sizes = family_sizes(family, model)
        self._family, self._numbers = family, family.numbered
        shifts = {name: one.shift for name, one in self._numbers.items()}
        self._shifts = {name: sizes.length(one) for name, one in shifts.items() if sizes.defines(one)}
        self._spans = {name: _span(one, sizes) for name, one in self._numbers.items()}
        self.kinds = [self._kind(one) for one in with_adapters(family, model.adapters).statements]
        self._kinds: dict[str, list[Kind]] = {}
        for kind in self.kinds:
            self._kinds.setdefault(_TOKEN.sub(_HOLE, kind.statement.target), []).append(kind)
        literal = (kind.statement.target for kind in self.kinds if any(map(str.isdigit, kind.holes)))
        self._literal = {_TOKEN.sub(_HOLE, target) for target in literal}
        # Statements that differ only in shape, cut or conditions are bound in the same way.
        self._distinct = {template: _distinct(kinds) for template, kinds in self._kinds.items()}

    def find(self, name: str, distinct: bool = False) -> tuple[list[Kind], list[str]]:
        """Return the statements that declare a tensor, and the numbers of its name.

        Args:
            name: the tensor's name in the model.
            distinct: omit statements that are bound in the same way as an earlier one.
        """
        pieces = NUMBER.split(name)
        template, numbers = _HOLE.join(pieces[::2]), pieces[1::2]
        kinds = (self._distinct if distinct else self._kinds).get(template, [])
        if template in self._literal:
            kinds = [kind for kind in kinds if _has_digits(kind.holes, numbers)]
        return kinds, numbers

    def declared(self, name: str) -> Iterator[tuple[Kind, dict[str, int]]]:
        """Yield the statements that declare a tensor, and the canonical numbers of its name."""
        kinds, texts = self.find(name)
        return ((kind, kind.numbers(texts)) for kind in kinds)

    def numbers(self, hole: str) -> range:
        """Return the canonical numbers of a placeholder.

        Raises:
            MappingError: the family does not declare them, or the configuration does not determine them.
        """
        if hole not in self._numbers:
            raise MappingError(
                f"Unknown placeholder {{{hole}}}: its numbers are not declared.",
                where=f"family {self._family.name}",
                next_step=f"Declare Numbers({hole!r}, ...) in the family.",
            )
        one = self._numbers[hole]
        self.sizes.length(one.shift)
        start = self.sizes.length(one.start)
        return range(start, start + self.sizes.length(one.count))

    def check_numbers(self) -> None:
        """Check that the configuration determines the shift of every placeholder.

        Raises:
            MappingError: it does not.
        """
        for one in self._numbers.values():
            self.sizes.length(one.shift)

    def name_of(self, stored: str) -> str:
        """Return the model's name of a stored weight. PaddleFormers saves some models without prefixes."""
        prefixed = [stored.replace(short, one, 1) for short, one in _PREFIXES.items() if stored.startswith(short)]
        return next((name for name in (stored, *prefixed) if self.find(name)[0]), stored)

    def trained(self, name: str) -> bool:
        """Return whether an optimizer updates a tensor; true for an undeclared tensor."""
        return all(kind.statement.trained for kind in self.find(name)[0])

    def of_heads(self, name: str) -> bool:
        """Return whether a tensor has an axis of attention heads."""
        kinds, _ = self.find(name)
        return any(_OF_HEADS & self.sizes.reads(size) for kind in kinds for size in kind.statement.shape)

    def head_faults(self, specs: Mapping[str, TensorSpec]) -> list[str]:
        """Return the tensors of attention heads whose shapes are not those that the configuration gives, a line each.

        Args:
            specs: global shapes by name in the model.
        """
        faults: list[str] = []
        for name, spec in specs.items():
            shapes = [kind.shape(numbers) for kind, numbers in self.declared(name)] if self.of_heads(name) else []
            known = [shape for shape in shapes if shape is not None and len(shape) == len(spec.shape)]
            if known and spec.shape not in known:
                faults.append(f"{name}: stored {list(spec.shape)}, {list(known[0])} by the configuration")
        return faults

    def whole(self, name: str, part: Shape, tp: int) -> tuple[Shape, int | None] | str:
        """Return the global shape of a tensor and the axis that tensor parallelism cuts; None if it is replicated.

        Formats that store the local tensors of ranks record neither. The local shape must match the declared one.
        Conditions are not evaluated: the tensors are better evidence than a configuration.

        Args:
            name: the tensor's name in the model.
            part: the local shape of a rank.
            tp: number of tensor-parallel ranks.
        Returns:
            shape and axis, or as text why no statement matches.
        """
        shapes = [(kind.statement.cut, kind.shape(numbers)) for kind, numbers in self.declared(name)]
        known = [(axis, shape) for axis, shape in shapes if shape is not None]
        if any(shape == part for _, shape in known):
            return part, None
        for axis, shape in known:
            if axis is not None and _cut(shape, axis, tp) == part:
                return shape, axis
        if not known:
            return "no statement of the family declares its shape"
        declared = "; ".join(f"{list(shape)} cut on axis {axis}" for axis, shape in known)
        return f"{list(part)} on each of {tp} ranks, declared {declared}"

    def _kind(self, statement: Statement) -> Kind:
        holes, own = statement.numbers, self.sizes.within(statement.tower)
        positions = {name: f"{{{index}}}" for index, name in enumerate(holes)}
        if statement.stack is not None:
            positions.setdefault("expert", f"{{{len(holes)}}}")
        unknown = {name for source in statement.sources for name in PLACEHOLDER.findall(source)} - set(positions)
        if unknown:
            raise MappingError(
                f"{statement.target}: its canonical names contain {', '.join(sorted(unknown))}, its own name does not.",
                where=f"family {self._family.name}",
                next_step="Every number of a canonical name comes from the model's name.",
            )
        return Kind(
            statement,
            own,
            tuple(source.format(**positions) for source in statement.sources),
            holes,
            tuple(self._shifts.get(name, 0) for name in holes),
            tuple(self._spans.get(name) for name in holes),
            self._shifts.get("expert", 0),
            _whole_length(statement, own),
        )


def _distinct(kinds: Iterable[Kind]) -> list[Kind]:
    """Return the kinds without those that are bound in the same way as an earlier one."""
    found: dict[object, Kind] = {}
    for kind in kinds:
        one = kind.statement
        layout = (one.geometry, one.transposed, one.stack, one.tower, one.parts, one.groups, one.siblings)
        found.setdefault((PLACEHOLDER.sub(_HOLE, one.target), one.sources, layout), kind)
    return list(found.values())


def _has_digits(holes: Sequence[str], numbers: Sequence[str]) -> bool:
    return all(hole == number for hole, number in zip(holes, numbers, strict=True) if hole.isdigit())


def _span(numbers: Numbers, sizes: Sizes) -> range | None:
    """Return the canonical numbers of a placeholder; None if the configuration does not determine them."""
    if not sizes.defines(numbers.start) or not sizes.defines(numbers.count):
        return None
    start = sizes.length(numbers.start)
    return range(start, start + sizes.length(numbers.count))


def _whole_length(statement: Statement, sizes: Sizes) -> int | None:
    if statement.cut is None or not statement.shape or not sizes.defines(statement.shape[statement.cut]):
        return None
    return sizes.length(statement.shape[statement.cut])


def _cut(shape: Shape, axis: int, parts: int) -> Shape | None:
    """Return the shape of one of ``parts`` equal parts; None if the axis is not divisible."""
    if shape[axis] % parts:
        return None
    return (*shape[:axis], shape[axis] // parts, *shape[axis + 1 :])


def family_sizes(family: Family, model: ModelDescription) -> Sizes:
    """Return the sizes of a model. Its class comes from the description, never from a configuration key."""
    unknown = {} if model.is_fleet is not None else {IS_FLEET: _NO_CLASS}
    towers: dict[str, Sizes] = {}

    def sizes(part: Family | Tower, config: Mapping[str, Any]) -> Sizes:
        known, defaults = ({key: one[key] for key in one if key != IS_FLEET} for one in (config, part.defaults))
        return Sizes({**SIZES, **part.sizes}, {**known, IS_FLEET: model.is_fleet}, defaults, unknown, towers)

    for tower in family.towers:
        nested = value_at(model.config, tower.key, model.config if tower.flat else None)
        towers[tower.name] = sizes(tower, nested if isinstance(nested, Mapping) else {})
    return sizes(family, model.config)


def family_keys(family: Family) -> frozenset[str]:
    """Return the configuration keys that a family's declaration reads; keys of nested configurations have dots.

    :data:`IS_FLEET` is included if the declaration depends on the class.
    """
    numbers = family.numbered
    holes = {hole for one in family.statements for hole in PLACEHOLDER.findall(one.target)}
    open_names = {(one.tower, name) for one in family.statements for name in one.names - holes - {"layer"}}
    counted = [numbers[hole] for hole in holes & numbers.keys()]
    open_names |= {
        ("", name) for one in counted for size in (one.count, one.start, one.shift) for name in names_of(size)
    }
    open_names |= {("", name) for one in family.tied for where, _ in one.where for name in names_of(where)}
    sizes = family_sizes(family, ModelDescription({}))
    keys = {pair for part, name in open_names for pair in sizes.within(part).keys(name)}
    prefixes = {sizes.within(tower.name): f"{tower.key}." for tower in family.towers}
    named = (name if name == IS_FLEET else prefixes.get(own, "") + name for own, name in keys)
    return frozenset({"tie_word_embeddings", *named})


def family_heads(family: Family, model: ModelDescription) -> dict[str, int]:
    """Return the numbers of attention heads by configuration key, as far as the configuration determines them.

    Tensors do not show them: two heads of size 8 are as long as one head of size 16.
    """
    found: dict[str, int] = {}
    for part, key in {"": "", **{tower.name: f"{tower.key}." for tower in family.towers}}.items():
        sizes = family_sizes(family, model).within(part)
        shapes = [size for one in family.statements if one.tower == part for size in one.shape]
        needed = frozenset[str]().union(*map(sizes.reads, shapes))
        # Projections of towers are as wide as the hidden size, so no shape has to name their heads.
        known = [name for name, users in _USERS.items() if (part or needed & users) and sizes.defines(name)]
        found |= {key + _HEADS[name]: sizes.length(name) for name in known}
    return found


def tied_names(family: Family, model: ModelDescription) -> dict[str, str]:
    """Return the owner of every alias in a model with this configuration."""
    sizes = family_sizes(family, model)
    if not sizes.value("tie_word_embeddings"):
        return {}
    return {one.alias: one.owner for one in family.tied if sizes.holds(one.where)}


def tied_sources(family: Family, model: ModelDescription) -> dict[str, str]:
    """Return :func:`tied_names` with canonical names, as an untied model of the family has them."""
    sources = {one.target: one.sources[0] for one in family.statements if len(one.sources) == 1}
    ties = tied_names(family, model)
    return {sources.get(alias, alias): sources.get(owner, owner) for alias, owner in ties.items()}
