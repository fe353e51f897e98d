"""Derive the rules of a model from a family's declaration and the model's *real* tensors.

The tensors come from the live model and are not predicted from the configuration. Every name must match one statement,
and the canonical names contain the same numbers. The number of shards determines the groups of a layout that is fused
per rank. Binding takes one dictionary lookup per tensor; a stack of experts gives one rule per expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from msgspec.structs import replace

from paddleformers_fc.families.declarations import Family, Geometry, Stack, Statement
from paddleformers_fc.families.description import ModelDescription
from paddleformers_fc.families.names import Kind, Names, tied_names
from paddleformers_fc.families.sizes import Sizes, conditions_text
from paddleformers_fc.mapping import Rule, RuleSet, Shape, TensorSpec, Tie
from paddleformers_fc.mapping.correspondences import NEW_AXIS
from paddleformers_fc.mapping.prove import invalid_mapping
from paddleformers_fc.mapping.rules import Parts, Slab, moving

MAX_EXPERTS = 1 << 16
"""Maximum number of experts in one tensor; each gives a rule."""


class ModelTensor(msgspec.Struct, frozen=True, gc=False):
    """A tensor of a real model.

    Args:
        name: its structured name.
        shape: global shape.
        dtype: numpy name of the element type.
        cuts: number of shards of each axis.
    """

    name: str
    shape: Shape
    dtype: str
    cuts: Shape


def bind(family: Family, model: ModelDescription, tensors: Iterable[ModelTensor]) -> RuleSet:
    """Return the rules of one model.

    Args:
        family: the model's family.
        model: the description of the model.
        tensors: every tensor of the model, or of one rank's part of it.
    Raises:
        MappingError: undeclared names, numbers that the configuration does not have, or shapes that no rule matches;
            the error lists all of them.
    """
    known = Names(family, model)
    known.check_numbers()
    ties = tied_names(family, model)
    targets: dict[str, TensorSpec] = {}
    rules: list[Rule] = []
    fresh: list[str] = []
    faults: list[str] = []
    for tensor in _with_owners(list(tensors), ties):
        targets[tensor.name] = TensorSpec(tensor.shape, tensor.dtype)
        if tensor.name in ties:
            continue
        kinds, numbers = known.find(tensor.name, distinct=True)
        rule = _bound(kinds, tensor, numbers) if kinds else f"no statement of family {family.name} declares this tensor"
        if isinstance(rule, str):
            faults.append(f"{tensor.name}: {rule}")
        else:
            statement, found = rule
            rules.extend(found)
            if not statement.sources:
                fresh.append(tensor.name)
    if faults:
        next_step = "Compare the model's configuration with its tensors, or declare the tensors in the family."
        raise invalid_mapping("The model cannot be mapped", faults, next_step, f"family {family.name}")
    return RuleSet(
        targets=targets,
        rules=tuple(rules),
        ties=tuple(Tie(owner, alias) for alias, owner in ties.items() if alias in targets),
        fresh=tuple(fresh),
    )


def _bound(kinds: list[Kind], tensor: ModelTensor, numbers: list[str]) -> tuple[Statement, list[Rule]] | str:
    """Return the statement and the rules of a tensor, or why there are none."""
    kind = kinds[0] if len(kinds) == 1 else _chosen(kinds, tensor, numbers)
    if isinstance(kind, str):
        return kind
    canonical = _canonical_numbers(kind, numbers)
    if isinstance(canonical, str):
        return canonical
    numbers = canonical
    if kind.whole is not None and _is_local_shard(kind.whole, kind.statement.cut or 0, tensor):
        return (
            f"is described as unsharded with shape {list(tensor.shape)}, the configuration gives length {kind.whole} "
            f"on axis {kind.statement.cut}: ranks have shards that are not described as shards"
        )
    rules = _rules(kind, tensor, numbers) if kind.sources else []
    return rules if isinstance(rules, str) else (kind.statement, rules)


def _canonical_numbers(kind: Kind, numbers: list[str]) -> list[str] | str:
    """Return the canonical numbers of a tensor's name, or why the model cannot have them."""
    canonical = [int(number) - shift for number, shift in zip(numbers, kind.shifts, strict=True)]
    for hole, number, shift, span in zip(kind.holes, canonical, kind.shifts, kind.spans, strict=True):
        if number < 0:
            return f"its number {number + shift} is smaller than the shift {shift} of canonical numbers"
        if span is not None and number not in span:
            numbers_text = f"{span.start} to {span.stop - 1}" if span else "none"
            return f"its {hole} {number + shift} is the canonical {number}, and the configuration has {numbers_text}"
    return [str(number) for number in canonical]


def _is_local_shard(whole: int, axis: int, tensor: ModelTensor) -> bool:
    """Return whether a tensor without shards probably is one shard of a tensor of length ``whole``."""
    if len(tensor.shape) <= axis or tensor.cuts[axis] != 1:
        return False
    length = tensor.shape[axis]
    return 0 < length < whole and whole % length == 0


def _chosen(kinds: list[Kind], tensor: ModelTensor, numbers: list[str]) -> Kind | str:
    """Return the only kind that this configuration declares with the tensor's shape, or why there is none."""
    shapes = [kind.shape(kind.numbers(numbers)) for kind in kinds]
    fitting = [kind for kind, shape in zip(kinds, shapes, strict=True) if shape == _flat(kind.statement, tensor.shape)]
    # If shape and configuration contradict each other, one of them is wrong, so none of them decides.
    possible = [kind for kind in kinds if kind.holds(kind.numbers(numbers)) is not False]
    is_open = not any(shape is not None for shape in shapes)
    candidates = possible if is_open else [kind for kind in fitting if kind in possible]
    if len(candidates) == 1:
        return candidates[0]
    if fitting and not candidates:
        conditions = " or ".join(f"`{conditions_text(kind.statement.where)}`" for kind in fitting)
        return f"shape {list(tensor.shape)} is declared for {conditions}, which the configuration does not fulfil"
    return f"{len(kinds)} statements declare it, and shape {list(tensor.shape)} does not distinguish them"


def _rules(kind: Kind, tensor: ModelTensor, numbers: list[str]) -> list[Rule] | str:
    if kind.statement.stack is not None:
        return _stack_rules(kind, tensor, numbers)
    sources = tuple(source.format(*numbers) for source in kind.sources)
    if kind.statement.siblings:
        return _sibling_rules(kind.statement.siblings, sources, tensor)
    key = (tensor.shape, tensor.cuts)
    layout = kind.layouts.get(key)
    if layout is None:
        layout = kind.layouts[key] = _layout(kind.statement, tensor.shape, tensor.cuts, kind.sizes)
    if isinstance(layout, str):
        return layout
    blocks = layout.source_blocks, layout.target_blocks
    return [Rule(sources, (tensor.name,), layout.parts, layout.axis, layout.axes, *blocks)]


def _sibling_rules(siblings: tuple[str, ...], sources: tuple[str, ...], tensor: ModelTensor) -> list[Rule]:
    """Return the rule of all tensors of a source, for the first of them; empty for the others."""
    scope, _, own = tensor.name.rpartition(".")
    targets = tuple(f"{scope}.{name}" for name in siblings)
    axes = tuple(range(len(tensor.shape)))
    return [Rule(sources, targets, tensor.shape[:1] * len(targets), 0, axes)] if own == siblings[0] else []


def _unnamed(parts: Parts, axis: int, axes: tuple[int, ...], blocks: int = 1) -> Rule:
    """Return a rule without names, which is a layout."""
    return Rule((), (), parts, axis, axes, target_blocks=blocks)


def _layout(statement: Statement, shape: Shape, cuts: Shape, sizes: Sizes) -> Rule | str:
    """Return the layout of a tensor, or of one expert of a stack, as a rule without names."""
    rank, geometry = len(shape), statement.geometry
    if geometry is Geometry.SAME:
        return _unnamed((shape[-1] if rank else 1,), max(rank - 1, 0), tuple(range(rank)))
    if geometry is Geometry.LINEAR and rank != 2:
        return f"a linear weight has two axes, this tensor has {rank}"
    if rank not in (1, 2) and (statement.transposed or not statement.parts):
        return f"a fused layer has one or two axes, this tensor has {rank}"
    transposed = statement.transposed and rank == 2
    axes = tuple(reversed(range(rank))) if transposed else tuple(range(rank))
    axis = rank - 1 if transposed else 0
    if geometry is Geometry.LINEAR:
        return _unnamed((shape[axis],), axis, axes)
    if geometry is Geometry.ALTERNATING_FFN:
        if shape[-1] % 2:
            return f"length {shape[-1]} does not divide into rows of gate and up"
        return _unnamed((shape[-1] // 2,) * 2, rank - 1, tuple(range(rank)))
    if geometry is Geometry.FUSED_FFN:
        if shape[axis] % (2 * cuts[axis]):
            return f"length {shape[axis]} does not divide into gate and up for {cuts[axis]} tensor-parallel ranks"
        return _unnamed((shape[axis] // 2,) * 2, axis, axes, cuts[axis])
    return _qkv_layout(statement, shape[axis], cuts[axis], _unnamed((), axis, axes), sizes)


def _qkv_layout(statement: Statement, length: int, cut: int, layout: Rule, sizes: Sizes) -> Rule | str:
    if not sizes.defines("heads") or not sizes.defines("kv_heads"):
        return "num_attention_heads and num_key_value_heads are not in the configuration"
    heads, groups = sizes.length("heads"), sizes.length("kv_heads")
    if heads < 1 or groups < 1 or heads % groups:
        return f"num_attention_heads={heads} and num_key_value_heads={groups} do not group query heads"
    lengths = tuple(map(sizes.length, statement.lengths))
    if not lengths and length % (heads + 2 * groups):
        return f"length {length} does not divide into {heads} query and 2 x {groups} key and value heads"
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
        return replace(layout, parts=(heads * head, groups * head, groups * head), target_blocks=blocks)
    # A single source contains all parts; of several sources, each contains one entry.
    parts: Parts = tuple(
        tuple(map(sizes.length, one)) if isinstance(one, tuple) else sizes.length(one) for one in statement.parts
    )
    return replace(layout, parts=parts, target_blocks=blocks, source_blocks=sizes.length(statement.groups))


def _whole_width(statement: Statement, axis: int, sizes: Sizes) -> int | None:
    """Return the declared length of a fused layer's outputs, if the configuration contains the hidden size.

    Divisibility is not sufficient: a layer that also contains a gate would be read as one with wider heads.
    """
    if not statement.shape or not sizes.is_given("hidden") or not sizes.defines(statement.shape[axis]):
        return None
    return sizes.length(statement.shape[axis])


def _stack_rules(kind: Kind, tensor: ModelTensor, numbers: list[str]) -> list[Rule] | str:
    """Return one rule per expert, or a single rule if experts and parts lie along the same axis."""
    sizes, flat = kind.sizes, _flat(kind.statement, tensor.shape)
    is_new = kind.statement.stack is Stack.NEW_AXIS or flat != tensor.shape
    count, length = sizes.length("experts"), sum(tensor.shape[:1])
    share = 1 if is_new else length // max(count, 1)
    declared = kind.shape(dict(zip(kind.holes, map(int, numbers), strict=True)))
    # Divisibility is not sufficient: twice as many experts of half the size are as long.
    differs = declared is not None and declared[0] != sum(flat[:1])
    if not share or share * count != length or count > MAX_EXPERTS or differs:
        return f"shape {list(tensor.shape)} does not contain {count} experts on axis 0"
    if not any("{expert}" in source for source in kind.statement.sources):
        (source,) = (source.format(*numbers) for source in kind.sources)
        return _stored_stack_rules(kind.statement, source, tensor)
    rows, cut = ((), ()) if is_new else ((share,), (1,))
    one = _layout(kind.statement, (*rows, *tensor.shape[1:]), (*cut, *tensor.cuts[1:]), sizes)
    if isinstance(one, str):
        return one
    axis, axes = (one.axis + 1, (NEW_AXIS, *one.axes)) if is_new else (one.axis, one.axes)
    sources = [
        tuple(source.format(*numbers, expert - kind.expert_shift) for source in kind.sources) for expert in range(count)
    ]
    if axis == 0:
        all_sources = tuple(source for names in sources for source in names)
        return [Rule(all_sources, (tensor.name,), one.parts * count, axis, axes)]
    slabs = (Slab(0, expert * share, (expert + 1) * share) for expert in range(count))
    rule = replace(one, targets=(tensor.name,), axis=axis, axes=axes)
    return [replace(rule, sources=names, slab=slab) for names, slab in zip(sources, slabs, strict=True)]


def _flat(statement: Statement, shape: Shape) -> Shape:
    """Return the shape with concatenated experts. Versions of Paddle after 3.3 save them with an axis of experts."""
    if statement.stack is not Stack.ROWS or len(shape) != len(statement.shape) + 1:
        return shape
    return (shape[0] * shape[1], *shape[2:])


def _stored_stack_rules(statement: Statement, source: str, tensor: ModelTensor) -> list[Rule] | str:
    """Return the rule of a stack of experts that is also a stack in canonical files."""
    rank = len(tensor.shape)
    if rank != statement.rank:
        return f"{statement.rank} axes are declared, this tensor has {rank}"
    axes = tuple(range(rank))
    transposed = statement.geometry is Geometry.LINEAR
    order = (*axes[:-2], axes[-1], axes[-2]) if transposed else axes
    return [moving(source, tensor.name, tensor.shape, order)]


def _with_owners(tensors: list[ModelTensor], ties: Mapping[str, str]) -> list[ModelTensor]:
    """Add the owner of every alias whose owner is not on this rank, as on the last stage of a pipeline."""
    names = {tensor.name for tensor in tensors}
    absent = [
        ModelTensor(ties[tensor.name], tensor.shape, tensor.dtype, tensor.cuts)
        for tensor in tensors
        if tensor.name in ties and ties[tensor.name] not in names
    ]
    return tensors + absent
