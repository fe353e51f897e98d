"""Derive the rules of a model from a family's declaration and the model's *real* tensors.

The tensors are those of the live model and are not predicted from the configuration. Every name must match one
statement, and every number in it is carried over into the canonical names. The tensor-parallel degree of a fused layout
is taken from the shards. Binding takes one dictionary lookup per tensor; a stack of experts gives one rule per expert.

Find the whole tensor and the cut axis of one tensor-parallel rank's part, from the declaration of its family.

Formats that store what each rank held record neither. The declaration states shapes and cut axes; a part is placed only
if its own shape proves the statement. Conditions are not evaluated: the tensors are better evidence than a
configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from paddleformers_fc.errors import MappingError
from paddleformers_fc.families.declarations import (
    NUMBERS,
    PLACEHOLDER,
    SIZES,
    Family,
    Geometry,
    Numbers,
    Stack,
    Statement,
    TargetIndex,
    Tower,
)
from paddleformers_fc.families.description import IS_FLEET, ModelDescription, with_adapters
from paddleformers_fc.families.sizes import Sizes, names_of, value_at
from paddleformers_fc.mapping import Rule, RuleSet, Shape, TensorSpec, Tie
from paddleformers_fc.mapping.correspondences import NEW_AXIS
from paddleformers_fc.mapping.folding import fold
from paddleformers_fc.mapping.rules import Parts, Slab
from paddleformers_fc.text import count_text

MAX_EXPERTS = 1 << 16
"""Maximum number of experts in one tensor; each is a rule."""

_HEADS = {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads"}
_USERS = {"heads": {"heads", "q"}, "kv_heads": {"kv_heads", "kv"}}
_NO_SHIFTS: dict[str, int] = {}
_NO_CLASS = (
    "is not known: `architectures` names no class, and this family has one of PaddleFleet and one of PaddleFormers "
    "(whose name ends in Deprecated)"
)


class ModelTensor(msgspec.Struct, frozen=True, gc=False):
    """A tensor of a real model.

    Args:
        name: its structured name.
        shape: global shape.
        dtype: element type by its numpy name.
        cuts: into how many shards each axis is cut.
    """

    name: str
    shape: Shape
    dtype: str
    cuts: Shape


def bind(
    family: Family,
    model: ModelDescription,
    tensors: Iterable[ModelTensor],
    shifts: Mapping[str, int] = _NO_SHIFTS,
) -> RuleSet:
    """Return the rules of one model.

    Args:
        family: the model's family.
        model: the description of the model.
        tensors: every tensor of the model, or of one rank's part of it.
        shifts: differences between the model's numbers and canonical ones by placeholder, which replace those of the
            family: ``{"expert": -4}`` where a rank counts its experts from 0 and its first one is number 4.
    Raises:
        MappingError: for names that no statement declares, numbers that the configuration does not have and shapes
            that no rule fits; all of them.
    """
    sizes = family_sizes(family, model)
    known = _kinds(with_adapters(family, model.adapters), sizes, shifts)
    ties = tied_names(family, model)
    targets: dict[str, TensorSpec] = {}
    rules: list[Rule] = []
    fresh: list[str] = []
    faults: list[str] = []
    for tensor in _with_owners(list(tensors), ties):
        targets[tensor.name] = TensorSpec(tensor.shape, tensor.dtype)
        if tensor.name in ties:
            continue
        kinds, numbers = known.find(tensor.name)
        made = (
            _made(kinds, tensor, numbers, sizes)
            if kinds
            else f"no statement of family {family.name} declares this tensor"
        )
        if isinstance(made, str):
            faults.append(f"{tensor.name}: {made}")
        else:
            statement, found = made
            rules.extend(found)
            if not statement.sources:
                fresh.append(tensor.name)
    if faults:
        raise MappingError(
            f"The model cannot be mapped: {count_text(len(faults), 'fault')}.",
            where=f"family {family.name}",
            evidence=fold(faults),
            next_step="Compare the model's configuration with its tensors, or declare the tensors in the family.",
        )
    return RuleSet(
        targets=targets,
        rules=tuple(rules),
        ties=tuple(Tie(owner, alias) for alias, owner in ties.items() if alias in targets),
        fresh=tuple(fresh),
    )


def tied_names(family: Family, model: ModelDescription) -> dict[str, str]:
    """Return the owner of every name that is an alias in models of this configuration."""
    sizes = family_sizes(family, model)
    if not sizes.holds("tie_word_embeddings"):
        return {}
    return {one.alias: one.owner for one in family.tied if sizes.holds(one.where)}


def tied_sources(family: Family, model: ModelDescription) -> dict[str, str]:
    """Return :func:`tied_names` with the names of open weights: those of an untied model of the family."""
    sources = {one.target: one.sources[0] for one in family.statements if len(one.sources) == 1}
    ties = tied_names(family, model)
    return {sources.get(alias, alias): sources.get(owner, owner) for alias, owner in ties.items()}


def family_sizes(family: Family, model: ModelDescription) -> Sizes:
    """Return the sizes of one model of a family. Its class is taken from its description alone."""
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
    """Return the configuration keys that a family's declaration reads, of nested configurations with dots.

    :data:`IS_FLEET` is among them if the declaration depends on the class.
    """
    numbers = family_numbers(family)
    holes = {hole for one in family.statements for hole in PLACEHOLDER.findall(one.target)}
    open_names = {
        (one.tower, name)
        for one in family.statements
        for text in (one.where, *one.shape, *one.lengths, one.groups, "experts" if one.stack is not None else "")
        for name in names_of(text) - holes
    }
    counted = [numbers[hole] for hole in holes & numbers.keys()]
    open_names |= {
        ("", name) for one in counted for text in (one.count, one.start, one.shift) for name in names_of(text)
    }
    towers = {tower.name: tower for tower in family.towers}
    declared = {"": {**SIZES, **family.sizes}} | {one.name: {**SIZES, **one.sizes} for one in family.towers}
    open_names |= {("", name) for one in family.tied for name in names_of(one.where)}
    keys, seen = {"tie_word_embeddings"}, set[tuple[str, str]]()
    while open_names - seen:
        part, name = (open_names - seen).pop()
        seen.add((part, name))
        head, _, rest = name.partition(".")
        if head in towers:
            open_names.add((head, rest))
            continue
        used = names_of(declared[part].get(name, ""))
        open_names |= {(part, one) for one in used}
        # Inside the size ``x`` the name ``x`` is a key of the configuration.
        if not used or name in used:
            keys.add(f"{towers[part].key}.{name}" if part and name != IS_FLEET else name)
    return frozenset(keys)


def family_heads(family: Family, model: ModelDescription) -> dict[str, int]:
    """Return the numbers of heads of a model's attention by configuration key, as far as the configuration gives them.

    Tensors do not contain them: two heads of 8 are as long as one of 16.
    """
    found: dict[str, int] = {}
    for part, key in {"": "", **{tower.name: f"{tower.key}." for tower in family.towers}}.items():
        sizes = family_sizes(family, model).within(part)
        shapes = [size for one in family.statements if one.tower == part for size in one.shape]
        needed = frozenset[str]().union(*map(names_of, shapes))
        known = [name for name, users in _USERS.items() if needed & users and sizes.defines(name)]
        found |= {key + _HEADS[name]: sizes.length(name) for name in known}
    return found


def headed_names(family: Family, names: Iterable[str]) -> list[str]:
    """Return those names of a model's tensors whose elements are assigned to heads of attention."""
    users = frozenset[str]().union(*_USERS.values())
    index = TargetIndex((one, any(users & names_of(size) for size in one.shape)) for one in family.statements)
    return [name for name in names if any(index.find(name)[0])]


def family_numbers(family: Family) -> dict[str, Numbers]:
    """Return the numbers of a family by placeholder."""
    return {numbers.name: numbers for numbers in (*NUMBERS, *family.numbers)}


@dataclass(frozen=True, slots=True)
class _Kind:
    """A statement, ready for tensors of its kind.

    Args:
        statement: the statement.
        sizes: the sizes of its tower.
        sources: its canonical names with positions for the numbers.
        holes: the numbers of its name; ``shifts`` and ``spans`` are in this order.
        shifts: the differences between numbers of the model and canonical ones.
        spans: the canonical numbers; None where the configuration does not give them.
        expert_shift: the shift of ``expert``.
        whole: the length of the axis that tensor parallelism cuts, where the configuration gives it.
        layouts: the layout of every shape and cut that has occurred: all experts of a model have one.
    """

    statement: Statement
    sizes: Sizes
    sources: tuple[str, ...]
    holes: tuple[str, ...]
    shifts: tuple[int, ...]
    spans: tuple[range | None, ...]
    expert_shift: int
    whole: int | None
    layouts: dict[tuple[Shape, Shape], _Layout | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Layout:
    """The layout of the parts of one tensor: the arguments of its rule."""

    parts: Parts
    axis: int
    axes: tuple[int, ...]
    blocks: int = 1
    source_blocks: int = 1


def _kinds(family: Family, sizes: Sizes, shifts: Mapping[str, int]) -> TargetIndex[_Kind]:
    """Prepare every statement; of several that are bound alike, the first."""
    numbers = family_numbers(family)
    shift_of = {name: sizes.length(one.shift) for name, one in numbers.items()} | dict(shifts)
    span_of = {name: _span(one, sizes) for name, one in numbers.items()}
    known: dict[tuple[object, ...], _Kind] = {}
    for statement in family.statements:
        holes, own = statement.numbers, sizes.within(statement.tower)
        positions = {name: f"{{{index}}}" for index, name in enumerate(holes)}
        if statement.stack is not None:
            positions.setdefault("expert", f"{{{len(holes)}}}")
        strange = {name for source in statement.sources for name in PLACEHOLDER.findall(source)} - set(positions)
        if strange:
            raise MappingError(
                f"{statement.target}: its canonical names contain {', '.join(sorted(strange))}, its own name does not.",
                where=f"family {family.name}",
                next_step="Every number of a canonical name comes from the model's name.",
            )
        kind = _Kind(
            statement,
            own,
            tuple(source.format(**positions) for source in statement.sources),
            holes,
            tuple(shift_of.get(name, 0) for name in holes),
            tuple(span_of.get(name) for name in holes),
            shift_of.get("expert", 0),
            _whole_length(statement, own),
        )
        bound = (statement.sources, statement.geometry, statement.turned, statement.stack, statement.tower)
        fusion = (statement.parts, statement.groups, statement.siblings)
        known.setdefault((PLACEHOLDER.sub("{}", statement.target), *bound, *fusion), kind)
    return TargetIndex((kind.statement, kind) for kind in known.values())


def _span(numbers: Numbers, sizes: Sizes) -> range | None:
    """Return the canonical numbers of a placeholder, as far as the configuration gives them."""
    if not sizes.defines(numbers.start) or not sizes.defines(numbers.count):
        return None
    start = sizes.length(numbers.start)
    return range(start, start + sizes.length(numbers.count))


def _whole_length(statement: Statement, sizes: Sizes) -> int | None:
    if statement.cut is None or not statement.shape or not sizes.defines(statement.shape[statement.cut]):
        return None
    return sizes.length(statement.shape[statement.cut])


def _made(
    kinds: list[_Kind], tensor: ModelTensor, numbers: list[str], sizes: Sizes
) -> tuple[Statement, list[Rule]] | str:
    """Return the statement that a tensor is bound by and its rules, or why there are none."""
    kind = kinds[0] if len(kinds) == 1 else _chosen(kinds, tensor, numbers, sizes)
    if isinstance(kind, str):
        return kind
    moved = _canonical_numbers(kind, numbers)
    if isinstance(moved, str):
        return moved
    numbers = moved
    if kind.whole is not None and _is_undescribed_piece(kind.whole, kind.statement.cut or 0, tensor):
        return (
            f"is described as whole with shape {list(tensor.shape)}, the configuration gives length {kind.whole} on "
            f"axis {kind.statement.cut}: the ranks hold pieces that are not described as pieces"
        )
    rules = _rules(kind, tensor, numbers, kind.sizes) if kind.sources else []
    return rules if isinstance(rules, str) else (kind.statement, rules)


def _canonical_numbers(kind: _Kind, numbers: list[str]) -> list[str] | str:
    """Return the canonical numbers of a tensor's name, or why the model cannot have them."""
    moved = [int(number) - shift for number, shift in zip(numbers, kind.shifts, strict=True)]
    for hole, number, shift, span in zip(kind.holes, moved, kind.shifts, kind.spans, strict=True):
        if number < 0:
            return f"its number {number + shift} is smaller than the shift {shift} of canonical numbers"
        if span is not None and number not in span:
            numbers_text = f"{span.start} to {span.stop - 1}" if span else "none"
            return f"its {hole} {number + shift} is the canonical {number}, and the configuration has {numbers_text}"
    return [str(number) for number in moved]


def _is_undescribed_piece(whole: int, axis: int, tensor: ModelTensor) -> bool:
    if len(tensor.shape) <= axis or tensor.cuts[axis] != 1:
        return False
    length = tensor.shape[axis]
    return 0 < length < whole and whole % length == 0


def _chosen(kinds: list[_Kind], tensor: ModelTensor, numbers: list[str], sizes: Sizes) -> _Kind | str:
    """Return the one kind that is declared with this tensor's shape for this configuration, or why there is none."""

    def named(kind: _Kind) -> dict[str, int]:
        return {hole: int(number) - shift for hole, number, shift in zip(kind.holes, numbers, kind.shifts, strict=True)}

    fitting = [
        kind for kind in kinds if has_shape(kind.statement, named(kind), _flat(kind.statement, tensor.shape), sizes)
    ]
    # A shape alone does not decide against the configuration: one of the two is not this model's.
    possible = [kind for kind in kinds if may_hold(kind.statement, named(kind), sizes)]
    is_open = not any(_has_known_shape(kind.statement, named(kind), sizes) for kind in kinds)
    wanted = possible if is_open else [kind for kind in fitting if kind in possible]
    if len(wanted) == 1:
        return wanted[0]
    if fitting and not wanted:
        conditions = " or ".join(f"`{kind.statement.where}`" for kind in fitting)
        return f"shape {list(tensor.shape)} is declared for {conditions}, which the configuration does not fulfil"
    return f"{len(kinds)} statements declare it, and shape {list(tensor.shape)} does not distinguish them"


def may_hold(statement: Statement, numbers: Mapping[str, int], sizes: Sizes) -> bool:
    """Return whether a statement's condition holds, or depends on keys that the configuration lacks."""
    try:
        return sizes.within(statement.tower).holds(statement.where, numbers)
    except MappingError:
        return True


def has_shape(statement: Statement, numbers: Mapping[str, int], shape: Shape, sizes: Sizes) -> bool:
    """Return whether a tensor of these numbers is declared with a shape."""
    own = sizes.within(statement.tower)
    return len(statement.shape) == len(shape) and all(
        own.defines(size, numbers) and own.length(size, numbers) == length
        for size, length in zip(statement.shape, shape, strict=True)
    )


def _has_known_shape(statement: Statement, numbers: Mapping[str, int], sizes: Sizes) -> bool:
    own = sizes.within(statement.tower)
    return all(own.defines(size, numbers) for size in statement.shape)


def _rules(kind: _Kind, tensor: ModelTensor, numbers: list[str], sizes: Sizes) -> list[Rule] | str:
    if kind.statement.stack is not None:
        return _stack_rules(kind, kind.statement.stack, tensor, numbers, sizes)
    sources = tuple(source.format(*numbers) for source in kind.sources)
    if kind.statement.siblings:
        return _sibling_rules(kind.statement.siblings, sources, tensor)
    occurred = (tensor.shape, tensor.cuts)
    made = kind.layouts.get(occurred)
    if made is None:
        made = kind.layouts[occurred] = _layout(kind.statement, tensor.shape, tensor.cuts, sizes)
    if isinstance(made, str):
        return made
    return [Rule(sources, (tensor.name,), made.parts, made.axis, made.axes, made.source_blocks, made.blocks)]


def _sibling_rules(siblings: tuple[str, ...], sources: tuple[str, ...], tensor: ModelTensor) -> list[Rule]:
    """Return one rule for all tensors of a source, at the first of them."""
    scope, _, own = tensor.name.rpartition(".")
    targets = tuple(f"{scope}.{name}" for name in siblings)
    axes = tuple(range(len(tensor.shape)))
    return [Rule(sources, targets, tensor.shape[:1] * len(targets), 0, axes)] if own == siblings[0] else []


def _layout(statement: Statement, shape: Shape, cuts: Shape, sizes: Sizes) -> _Layout | str:
    """Return the layout of the parts in one tensor, or in one expert of a stack."""
    rank, geometry = len(shape), statement.geometry
    if geometry is Geometry.SAME:
        return _Layout((shape[-1] if rank else 1,), max(rank - 1, 0), tuple(range(rank)))
    if geometry is Geometry.LINEAR and rank != 2:
        return f"a linear weight has two axes, this tensor has {rank}"
    if rank not in (1, 2) and (statement.turned or not statement.parts):
        return f"a fused layer has one or two axes, this tensor has {rank}"
    turned = statement.turned and rank == 2
    axes = tuple(reversed(range(rank))) if turned else tuple(range(rank))
    axis = rank - 1 if turned else 0
    if geometry is Geometry.LINEAR:
        return _Layout((shape[axis],), axis, axes)
    if geometry is Geometry.ALTERNATING_FFN:
        if shape[-1] % 2:
            return f"length {shape[-1]} does not hold a row of gate and one of up"
        return _Layout((shape[-1] // 2,) * 2, rank - 1, tuple(range(rank)))
    if geometry is Geometry.FUSED_FFN:
        if shape[axis] % (2 * cuts[axis]):
            return f"length {shape[axis]} does not hold gate and up for {cuts[axis]} tensor-parallel ranks"
        return _Layout((shape[axis] // 2,) * 2, axis, axes, cuts[axis])
    return _qkv_layout(statement, shape[axis], cuts[axis], _Layout((), axis, axes), sizes)


def _qkv_layout(statement: Statement, length: int, cut: int, layout: _Layout, sizes: Sizes) -> _Layout | str:
    if not sizes.defines("heads") or not sizes.defines("kv_heads"):
        return "num_attention_heads and num_key_value_heads are not in the configuration"
    heads, groups = sizes.length("heads"), sizes.length("kv_heads")
    if heads < 1 or groups < 1 or heads % groups:
        return f"num_attention_heads={heads} and num_key_value_heads={groups} do not group query heads"
    lengths = tuple(map(sizes.length, statement.lengths))
    if not lengths and length % (heads + 2 * groups):
        return f"length {length} does not hold {heads} query and 2 x {groups} key and value heads"
    declared = sum(lengths) if lengths else _whole_width(statement, layout.axis, sizes)
    if declared not in (None, length):
        return (
            f"length {length} is not the {declared} that {heads} query and 2 x {groups} key and value heads of the "
            "configuration have: it contains other parts, such as a gate or heads of several sizes"
        )
    head = length // (heads + 2 * groups)
    blocks = groups if statement.geometry is Geometry.FUSED_QKV else cut
    if any(part % blocks for part in lengths):
        return f"parts of lengths {list(lengths)} are not divisible among {blocks} groups"
    if not lengths and groups % blocks:
        return f"{groups} key and value heads are not divisible among {blocks} tensor-parallel ranks"
    if not lengths:
        return replace(layout, parts=(heads * head, groups * head, groups * head), blocks=blocks)
    # A single source holds all parts as they are declared; several hold one entry each.
    parts: Parts = tuple(
        tuple(map(sizes.length, one)) if isinstance(one, tuple) else sizes.length(one) for one in statement.parts
    )
    return replace(layout, parts=parts, blocks=blocks, source_blocks=sizes.length(statement.groups or "1"))


def _whole_width(statement: Statement, axis: int, sizes: Sizes) -> int | None:
    """Return the declared length of a fused layer's outputs, if the configuration contains the width of the model.

    A divisible length is no evidence: a gate in the layer would be taken for parts of wider heads.
    """
    if not statement.shape or not sizes.is_given("hidden") or not sizes.defines(statement.shape[axis]):
        return None
    return sizes.length(statement.shape[axis])


def _stack_rules(kind: _Kind, stack: Stack, tensor: ModelTensor, numbers: list[str], sizes: Sizes) -> list[Rule] | str:
    """Return a rule per expert, or a single one where the experts lie along the axis of their parts."""
    flat = _flat(kind.statement, tensor.shape)
    if flat != tensor.shape:
        stack = replace(stack, new=True)
    count, length = sizes.length("experts"), tensor.shape[stack.axis] if stack.axis < len(tensor.shape) else 0
    share = 1 if stack.new else length // max(count, 1)
    declared = kind.statement.shape[stack.axis] if kind.statement.shape else "None"
    # A length that is divisible alone is no proof: twice as many experts of half the size are as long.
    unlike = sizes.defines(declared) and sizes.length(declared) != sum(flat[stack.axis : stack.axis + 1])
    if not share or share * count != length or count > MAX_EXPERTS or unlike:
        return f"shape {list(tensor.shape)} does not hold {count} experts on axis {stack.axis}"
    if not _has_experts(kind.statement):
        (source,) = (source.format(*numbers) for source in kind.sources)
        return _stored_stack_rules(kind.statement, source, tensor)
    one = _layout(kind.statement, _of_one(tensor.shape, stack, share), _of_one(tensor.cuts, stack, 1), sizes)
    if isinstance(one, str):
        return one
    axis, axes = one.axis, one.axes
    if stack.new:
        axis, axes = axis + (axis >= stack.axis), (*axes[: stack.axis], NEW_AXIS, *axes[stack.axis :])
    sources = [
        tuple(source.format(*numbers, expert - kind.expert_shift) for source in kind.sources) for expert in range(count)
    ]
    if axis == stack.axis:
        everything = tuple(source for names in sources for source in names)
        return [Rule(everything, (tensor.name,), one.parts * count, axis, axes)]
    return [
        Rule(
            names,
            (tensor.name,),
            one.parts,
            axis,
            axes,
            target_blocks=one.blocks,
            slab=Slab(stack.axis, expert * share, (expert + 1) * share),
        )
        for expert, names in enumerate(sources)
    ]


def _flat(statement: Statement, shape: Shape) -> Shape:
    """Return the shape of concatenated experts, which versions of Paddle after 3.3 save with an axis of experts."""
    stack = statement.stack
    if stack is None or stack.new or len(shape) != len(statement.shape) + 1:
        return shape
    return (*shape[: stack.axis], shape[stack.axis] * shape[stack.axis + 1], *shape[stack.axis + 2 :])


def _has_experts(statement: Statement) -> bool:
    """Return whether the canonical names are those of single experts."""
    return any("{expert}" in source for source in statement.sources)


def _stored_stack_rules(statement: Statement, source: str, tensor: ModelTensor) -> list[Rule] | str:
    """Return the rule of a stack that canonical files stack as well, on the first axis."""
    rank = len(tensor.shape)
    if rank != len(statement.shape):
        return f"{len(statement.shape)} axes are declared, this tensor has {rank}"
    axes = tuple(range(rank))
    turned = statement.geometry is Geometry.LINEAR
    order = (*axes[:-2], axes[-1], axes[-2]) if turned else axes
    return [Rule((source,), (tensor.name,), (tensor.shape[-1],), rank - 1, order)]


def _of_one(lengths: Shape, stack: Stack, share: int) -> Shape:
    """Return the lengths of one expert in a stack."""
    middle = () if stack.new else (share,)
    return (*lengths[: stack.axis], *middle, *lengths[stack.axis + 1 :])


def _with_owners(tensors: list[ModelTensor], ties: Mapping[str, str]) -> list[ModelTensor]:
    """Return the tensors, and the owner of every alias that is alone, as on the last stage of a pipeline."""
    names = {tensor.name for tensor in tensors}
    absent = [
        ModelTensor(ties[tensor.name], tensor.shape, tensor.dtype, tensor.cuts)
        for tensor in tensors
        if tensor.name in ties and ties[tensor.name] not in names
    ]
    return tensors + absent


_PREFIXES = {"visual.": "model.visual.", "model.": "model.language_model."}
"""Prefixes in files of Qwen 2.5 VL, and in its models."""


class DeclaredNames:
    """The statements of a model by the names of its tensors.

    Args:
        family: the model's family.
        model: the model.
    """

    def __init__(self, family: Family, model: ModelDescription) -> None:
        self.sizes = family_sizes(family, model)
        self._shifts = {
            name: self.sizes.length(one.shift)
            for name, one in family_numbers(family).items()
            if self.sizes.defines(one.shift)
        }
        self._known: dict[str, list[tuple[Statement, Shape]]] = {}
        self._index = TargetIndex((one, one) for one in with_adapters(family, model.adapters).statements)

    def find(self, name: str) -> list[tuple[Statement, dict[str, int]]]:
        """Return the statements that declare a tensor, and the canonical numbers of its name."""
        statements, texts = self._index.find(name)
        return [
            (one, {hole: int(text) - self._shifts.get(hole, 0) for hole, text in zip(one.numbers, texts, strict=True)})
            for one in statements
        ]

    def name_of(self, stored: str) -> str:
        """Return the model's name of a stored weight: PaddleFormers saves some models without prefixes."""
        prefixed = [stored.replace(short, one, 1) for short, one in _PREFIXES.items() if stored.startswith(short)]
        return next((name for name in (stored, *prefixed) if self.find(name)), stored)

    def trained(self, name: str) -> bool:
        """Return whether an optimizer updates a tensor; true for a tensor that is not declared."""
        return all(one.trained for one, _ in self.find(name))

    def whole(self, name: str, part: Shape, tp: int) -> tuple[Shape, int | None] | str:
        """Return the shape of a whole tensor and the axis that is cut, None if every rank has it whole.

        Args:
            name: the tensor's name in the model.
            part: the shape that a rank holds.
            tp: number of tensor-parallel ranks.
        Returns:
            shape and axis, or as text why no statement fits.
        """
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = list(self._declared(name))
        for _, shape in known:
            if shape == part:
                return shape, None
        for one, shape in known:
            if one.cut is not None and _cut(shape, one.cut, tp) == part:
                return shape, one.cut
        if not known:
            return "no statement of the family declares its shape"
        stated = "; ".join(f"{list(shape)} cut on axis {one.cut}" for one, shape in known)
        return f"{list(part)} on each of {tp} ranks, declared {stated}"

    def _declared(self, name: str) -> Iterator[tuple[Statement, Shape]]:
        for one, numbers in self.find(name):
            own = self.sizes.within(one.tower)
            if all(own.defines(size, numbers) for size in one.shape):
                yield one, tuple(own.length(size, numbers) for size in one.shape)


def _cut(shape: Shape, axis: int, parts: int) -> Shape | None:
    """Return the shape of an equal part; None if the axis cannot be divided."""
    if shape[axis] % parts:
        return None
    return (*shape[:axis], shape[axis] // parts, *shape[axis + 1 :])
