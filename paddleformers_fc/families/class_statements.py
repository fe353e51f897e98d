"""Derive the rules of a model without a family from the AOA statements of its class.

The inverse statements define the canonical tensors, and the forward statements map them to the model. Both are proved,
and each must undo the other. If a class has only forward statements, they are inverted. As in Paddle's engine,
statements with placeholders have no effect if neither side has such tensors. Casts are ignored: canonical tensors have
the dtypes of the model, and loading casts to them. Linear in the tensors and their boxes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from paddleformers_fc.aoa import Program, Tensors, evaluate, uncut
from paddleformers_fc.aoa.expand import EXPERT, LAYER, NameIndex
from paddleformers_fc.aoa.faults import Fault
from paddleformers_fc.aoa.syntax import NOTHING, TRANSPOSED, AoaStatement, Item, read_statements
from paddleformers_fc.errors import MappingError
from paddleformers_fc.mapping.correspondences import Correspondence, TensorMapping, coalesced
from paddleformers_fc.mapping.prove import disagreements, faults_of
from paddleformers_fc.mapping.rules import Rule, RuleSet, Slab, Tie
from paddleformers_fc.text import fold

_NEUTRAL = "float32"
_CASTS = frozenset({"dtype", "src_dtype", "dst_dtype"})
_TRANSPOSED_NAME = ".turned"


def rules_of_statements(tensors: Tensors, forward: Program, inverse: Program | None, is_tied: bool) -> RuleSet:
    """Return the rules of a model.

    Args:
        tensors: every tensor of the model by name.
        forward: the statements from canonical tensors to the model.
        inverse: the statements from the model to canonical tensors; None if the class has none.
        is_tied: whether word embeddings are tied. A second tensor with the same source is then an alias.
    Raises:
        MappingError: a statement is invalid, a direction cannot be proved or does not undo the other, or no rule
            describes the boxes of a tensor.
    """
    model = {name: replace(one, dtype=_NEUTRAL) for name, one in tensors.items()}
    back = evaluate(_applicable(_inverted(forward, model) if inverse is None else inverse, model, {}), model, None)
    ties = tuple(dict.fromkeys(_ties(forward, model, back))) if is_tied else ()
    back = _without(back, frozenset(tie.alias for tie in ties))
    canonical = {name: uncut(spec.shape, _NEUTRAL) for name, spec in back.targets.items()}
    mapping = evaluate(_applicable(forward, canonical, model), canonical, model, ties)
    _raise_faults([*faults_of(mapping), *faults_of(back)], "The statements of the class cannot be proved.")
    _raise_faults(disagreements(mapping, back.reversed()), "The two directions do not undo each other.")
    rules, unknown = _rules(mapping)
    _raise_faults((f"{name}: no rule moves its boxes" for name in unknown), "Rules do not express the statements.")
    return RuleSet(
        targets={name: one.spec for name, one in tensors.items()},
        rules=tuple(rules),
        ties=ties,
        # Rules need an axis, so tensors without one are loaded by name.
        fresh=tuple(sorted(mapping.fresh | {name for name in mapping.made if not mapping.targets[name].shape})),
    )


def _raise_faults(faults: Iterable[str], what: str) -> None:
    found = list(faults)
    if found:
        raise MappingError(what, evidence=fold(found), next_step="Correct the statements of the class.")


def _applicable(program: Program, left: Collection[str], right: Collection[str]) -> Program:
    """Return the statements without casts, and without statements about tensors that the model lacks."""
    index, targets = NameIndex(left), NameIndex(right)
    kept = [
        replace(one, attributes={key: value for key, value in one.attributes.items() if key not in _CASTS})
        for one in program.statements
        if _applies(one, index, targets)
    ]
    return replace(program, statements=tuple(kept))


def _applies(statement: AoaStatement, left: NameIndex, right: NameIndex) -> bool:
    nothing = NOTHING in (statement.left[0].pattern, statement.right[0].pattern)
    pattern = _numbered(statement.left, statement.right)
    sources = [pattern] if pattern else [item.pattern for item in statement.left]
    try:
        known = [*map(left.matches, sources)]
        known += [side.matches(item.pattern) for item in statement.right for side in (left, right)]
    except Fault:
        return True  # The evaluation reports it.
    return any(known) or not (pattern or nothing)


def _numbered(*sides: Sequence[Item]) -> str:
    """Return the first name with placeholders, which provides their numbers; empty if there is none."""
    return next((item.pattern for side in sides for item in side if "$" in item.pattern), "")


def _ties(forward: Program, model: Collection[str], back: TensorMapping) -> Iterator[Tie]:
    """Yield the tensors that copy a canonical tensor which the inverse statements take from another tensor."""
    for one in forward.statements:
        source, alias = one.left[0].pattern, one.right[0].pattern
        if len(one.left) == len(one.right) == 1 and alias in model and source in back.made:
            (owner, *_) = back.made[source].names
            if owner != alias:
                yield Tie(owner, alias)


def _without(back: TensorMapping, aliases: frozenset[str]) -> TensorMapping:
    """Return the mapping of the inverse statements without aliases."""
    made = {name: one for name, one in back.made.items() if aliases.isdisjoint(one.names)}
    sources = {name: spec for name, spec in back.sources.items() if name not in aliases}
    return TensorMapping(sources, {name: back.targets[name] for name in made}, made, back.fresh, back.dropped - aliases)


def _inverted(forward: Program, model: Mapping[str, object]) -> Program:
    """Return the statements of the opposite direction, in reverse order.

    The model's tensors provide the numbers of placeholders. If a source has several copies, the first is read.
    """
    index, texts, read = NameIndex(model), list[str](), set[str]()
    assigned = {item.pattern for one in forward.statements for item in one.right}
    for statement in forward.statements:
        for numbers in _numbers(statement, index):
            left, right = ([_name(item, numbers) for item in side] for side in (statement.left, statement.right))
            if NOTHING in right:
                continue
            if read.issuperset(left) or (left != right and model.keys() >= {*left} and assigned.isdisjoint(left)):
                texts += [f"{name} -> {NOTHING}" for name in right]
                continue
            read.update(left)
            transposed = [name for name, item in zip(left, statement.left, strict=True) if item.transposed]
            texts += [f"{name}{_TRANSPOSED_NAME}{TRANSPOSED} -> {name}" for name in transposed]
            between = [f"{name}{_TRANSPOSED_NAME}" if name in transposed else name for name in left]
            texts.append(", ".join([f"{', '.join(right)} -> {', '.join(between)}", *_attributes(statement)]))
    return read_statements(texts[::-1])


def _numbers(statement: AoaStatement, index: NameIndex) -> Iterator[dict[str, str]]:
    """Yield the values of a statement's placeholders, from the model's tensors on the right side."""
    pattern = _numbered(statement.right, statement.left)
    keys = sorted((key for key in (LAYER, EXPERT) if key in pattern), key=pattern.index)
    try:
        found = [numbers for _, numbers in index.matches(pattern)] if pattern else [()]
    except Fault:
        return  # The evaluation of the forward statements reports it.
    yield from (dict(zip(keys, numbers, strict=True)) for numbers in found)


def _name(item: Item, numbers: dict[str, str]) -> str:
    name = item.pattern if item.array is None else f"{item.pattern}[{item.array[0]}:{item.array[1]}]"
    for key, number in numbers.items():
        name = name.replace(key, number)
    return name


def _attributes(statement: AoaStatement) -> Iterator[str]:
    for key, one in statement.attributes.items():
        if key == "permute":
            axes = [int(axis) for axis in one.value.strip("[] ").split(",") if axis.strip()]
            yield f'permute="{[axes.index(axis) for axis in range(len(axes))]}"'
        elif key == "reshape":
            yield f'reshape="{one.value}"'
        elif key not in _CASTS:
            yield f"{key}={one.value}" if one.value else key


def _rules(mapping: TensorMapping) -> tuple[list[Rule], list[str]]:
    """Return rules that describe the boxes of a mapping, and the tensors for which there are none."""
    back, rules, unknown, done = mapping.reversed(), list[Rule](), list[str](), set[str]()
    for name, items in mapping.by_target.items():
        siblings = mapping.readers[items[0].source]
        if name in done or not mapping.targets[name].shape:
            continue
        done.update(siblings)
        found = _fit(mapping, name) if len(siblings) == 1 else _fit(back, items[0].source)
        if not found or (len(siblings) > 1 and found[0].slab is not None):
            unknown += siblings
        else:
            rules += found if len(siblings) == 1 else [rule.reversed() for rule in found]
    return rules, unknown


def _fit(mapping: TensorMapping, target: str) -> list[Rule]:
    """Return rules of complete sources that give exactly the boxes of a target; empty if there are none."""
    shape, items = mapping.targets[target].shape, coalesced(mapping.by_target[target])
    items.sort(key=lambda item: item.target_box.lo)
    for axis in (None, *range(len(shape))):
        slabs: dict[Slab | None, list[Correspondence]] = {}
        for item in items:
            box = item.target_box
            slabs.setdefault(axis if axis is None else Slab(axis, box.lo[axis], box.hi[axis]), []).append(item)
        rules = [_joined(mapping, target, slab, group) for slab, group in slabs.items()]
        if any(fault for rule in rules for fault in rule.faults([shape])):
            continue
        given = RuleSet({target: mapping.targets[target]}, tuple(rules)).mapping().by_target[target]
        if {*items} == {*coalesced(given)}:
            return rules
    return []


def _joined(mapping: TensorMapping, target: str, slab: Slab | None, items: Sequence[Correspondence]) -> Rule:
    """Return the rule that most likely has these boxes: it joins complete sources along one axis of the target."""
    names, axes = tuple(dict.fromkeys(item.source for item in items)), items[0].axes
    starts = [{item.target_box.lo[axis] for item in items} for axis in range(len(axes))]
    axis = max(range(len(axes)), key=lambda one: (len(starts[one]) > 1, slab is None or one != slab.axis, one))
    parts = tuple(mapping.sources[name].shape[axes[axis]] for name in names)
    blocks = sum(item.source == names[0] for item in items)
    if len(names) == 1 and blocks > 1:
        # One source contains its parts one after the other. The second group begins where the first stretch ends in it.
        bounds = [(item.source_box.lo[axes[axis]], item.source_box.hi[axes[axis]]) for item in items]
        period = next((at for at, (low, _) in enumerate(bounds) if low == bounds[0][1]), 1)
        blocks = len(items) // period
        parts = tuple(blocks * (high - low) for low, high in bounds[:period])
    return Rule(names, (target,), parts, axis, axes, target_blocks=blocks, slab=slab)
