"""Render rules as AOA statements, with placeholders where they are exact and complete names elsewhere.

A rule becomes one statement if the language has its layout. Otherwise the text splits tensors into arrays of equal
parts and joins them again. Statements that differ only in the numbers of layers or experts are combined. The text is
evaluated and compared with the rules box by box before it is returned. Linear in names and boxes, up to sorting.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from math import gcd, prod
from typing import NamedTuple

from msgspec import structs

from paddleformers_fc.aoa.evaluate import parse
from paddleformers_fc.aoa.expand import EXPERT, LAYER, NameIndex
from paddleformers_fc.aoa.rules import AoaTensor
from paddleformers_fc.aoa.syntax import FFN, QKV, QKV_PER_RANK
from paddleformers_fc.errors import MappingError
from paddleformers_fc.mapping.boxes import Shape
from paddleformers_fc.mapping.correspondences import NEW_AXIS, TensorMapping, TensorSpec, coalesced
from paddleformers_fc.mapping.prove import disagreements, faults_of
from paddleformers_fc.mapping.rules import Rule, RuleSet
from paddleformers_fc.text import fold

_SHOWN = 20
_MOST_PARTS = 4096
_SUFFIX = re.compile(r"[\^\[].*")
_LAST = re.compile(r"[0-9]+\Z")
_NUMBER = re.compile(r"(?<=\.)([0-9]+)(?=[.^\[]|\Z)")
_CHOICES = ((0, 1), (1,), (0,))
"""Which numbers of a name become placeholders. The choice that combines most statements comes first."""

Cuts = Mapping[str, Shape]
"""The number of shards per axis, by tensor."""

_Numbers = tuple[str, ...]


@dataclass(frozen=True)
class Hints:
    """Facts that rules do not contain.

    Args:
        per_rank: the fused layout of targets that are fused per shard, even if there is only one shard: ``fused_ffn``
            or ``fused_qkv_old``.
        heads: numbers of query heads and of kv heads, for layouts that are fused per rank.
        left: the number of shards of canonical tensors; tensors that are not listed have one.
    """

    per_rank: Mapping[str, str] = field(default_factory=dict)
    heads: tuple[int, int] | None = None
    left: Cuts = field(default_factory=dict)


def with_ties(rules: RuleSet) -> TensorMapping:
    """Return the mapping of rules, with tied aliases as uninitialized targets: they share their owner's memory.

    Dropped tensors get an arbitrary shape, because rules do not contain it.
    """
    mapping, aliases = rules.mapping(), sorted(rules.aliases)
    targets = {**mapping.targets, **{name: rules.targets[name] for name in aliases}}
    sources = {**dict.fromkeys(rules.dropped, TensorSpec((1,), "float32")), **mapping.sources}
    return structs.replace(mapping, sources=sources, targets=targets, fresh=mapping.fresh.union(aliases))


def render(rules: RuleSet, hints: Hints | None = None, *, reverse: bool = False) -> list[str]:
    """Return the statements of rules, from canonical tensors to a model's tensors.

    Unchanged tensors with equal names have no statement: the language maps them implicitly.

    Args:
        rules: proved rules, with the shards of their targets.
        hints: numbers of heads, and layouts per shard; without hints no statement depends on the ranks.
        reverse: write the statements from the model to canonical tensors instead.
    Returns:
        statements that Paddle's own engine evaluates to the mapping of the rules.
    Raises:
        MappingError: with everything that the language cannot express.
    """
    hints, mapping = hints or Hints(), with_ties(rules)
    cuts: tuple[Cuts, Cuts] = (hints.left, rules.cuts)
    if reverse:
        mapping, cuts = mapping.reversed(), cuts[::-1]
    _raise_faults(fault for rule in rules.rules for fault in _faults_of(rule, reverse))
    writer = _Writer(hints, cuts, (*mapping.sources, *mapping.targets))
    components = [one for one in _components(rules, reverse, writer) if one.texts]
    statements = [f"{name} -> _" for name in sorted(mapping.dropped)]
    statements += [f"_ -> {name}" for name in sorted(mapping.fresh)]
    statements += _in_order(components, NameIndex(mapping.sources))
    _verify(statements, mapping, cuts)
    return statements


def _faults_of(rule: Rule, reverse: bool) -> Iterator[str]:
    """Yield the reasons why the language cannot express a rule."""
    if NEW_AXIS in rule.axes and (reverse or len(rule.axes) != 3 or rule.axes[0] != NEW_AXIS):
        yield f"{rule.targets[0]}: the language adds an axis only in front of two, and removes none"
    if min(len(rule.sources), len(rule.targets)) > 1:
        yield f"{rule.targets[0]}: one rule has several names on both sides"
    if rule.cast is not None:
        yield f"{rule.targets[0]}: conversions of dtypes are not written"


class _Text(NamedTuple):
    """A statement as text: the names on each side, and attributes, which may be empty."""

    left: tuple[str, ...]
    right: tuple[str, ...]
    attributes: str = ""

    def __str__(self) -> str:
        text = f"{', '.join(self.left)} -> {', '.join(self.right)}"
        return f"{text}, {self.attributes}" if self.attributes else text


class _Component(NamedTuple):
    """The statements of rules that share no tensors with other rules, and the names that they read and write."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    texts: tuple[_Text, ...]


def _components(rules: RuleSet, reverse: bool, writer: _Writer) -> Iterator[_Component]:
    """Yield the statements of rules, by target."""
    stacks: dict[str, list[Rule]] = {}
    for rule in rules.rules:
        stacks.setdefault(rule.targets[0], []).append(rule)
    for name, found in stacks.items():
        names = tuple(one for rule in found for one in rule.sources), found[0].targets
        simple, last, is_new = found, list[_Text](), found[0].axes[:1] == (NEW_AXIS,)
        if is_new or found[0].slab is not None:
            simple = _unstacked(found, rules.targets[name].shape if is_new else ())
        if is_new:
            last = [_Text(simple[-1].targets, (name,), f'reshape="{list(rules.targets[name].shape)}"')]
        if reverse:
            simple, names = [rule.reversed() for rule in simple[::-1]], names[::-1]
        yield _Component(*names, (*(text for rule in simple for text in writer.texts(rule)), *last))


def _unstacked(rules: Sequence[Rule], blocks: Shape) -> list[Rule]:
    """Return one rule per part that joins it across experts, and the rule that joins the results.

    Args:
        rules: the rules of the experts.
        blocks: the shape of a stack with an expert axis, whose experts are then concatenated by rows; else empty.
    """
    first, slabs = rules[0], [rule.slab for rule in rules if rule.slab is not None]
    (stack,), axis, axes = first.targets, first.axis, first.axes
    along, lengths = slabs[0].axis if slabs else 0, tuple(slab.stop - slab.start for slab in slabs)
    if blocks:
        stack, axis, axes, lengths = f"{stack}_rows", axis - 1, axes[1:], (blocks[1],) * blocks[0]
        if axis < 1:
            # The parts lie along the rows, expert after expert.
            parts = lengths if axis < 0 else first.parts * blocks[0]
            return [Rule(tuple(one for rule in rules for one in rule.sources), (stack,), parts, 0, axes)]
    moves = len(first.sources) == 1 and first.source_blocks == first.target_blocks
    names = (stack,) if moves else tuple(f"{stack}_{part}" for part in range(len(first.sources)))
    by_part = [
        Rule(tuple(rule.sources[part] for rule in rules), (name,), lengths, along, axes)
        for part, name in enumerate(names)
    ]
    last = structs.replace(first, sources=names, targets=(stack,), axis=axis, axes=tuple(range(len(axes))), slab=None)
    return by_part if moves else [*by_part, last]


class _Writer:
    """Writes the statements of rules.

    Args:
        hints: heads, and layouts per shard.
        cuts: shards of the left side and of the right side.
        names: names of all tensors of both sides; the names that Paddle gives to heads must differ from them.
    """

    def __init__(self, hints: Hints, cuts: tuple[Cuts, Cuts], names: Iterable[str]) -> None:
        self._hints, self._cuts = hints, cuts
        self._stems = {_LAST.sub("", name) for name in names if name[-1].isdecimal()}
        self._known: dict[tuple[object, ...], str | None] = {}

    def texts(self, rule: Rule) -> list[_Text]:
        """Return the statements of a rule; none if names are equal and nothing changes."""
        sides = zip(self._cuts, (rule.sources, rule.targets), strict=True)
        cuts = tuple(known.get(name) for known, names in sides for name in names)
        kinds = {self._hints.per_rank.get(name, "") for name in (*rule.sources, *rule.targets)} - {""}
        candidates = tuple(self._candidates(rule, kinds, bool(kinds) or any(one and prod(one) > 1 for one in cuts)))
        key = (structs.replace(rule, sources=(), targets=()), len(rule.sources), cuts, candidates)
        if key not in self._known:
            self._known[key] = next((one for one in candidates if _means(one, rule, self._cuts)), None)
        attributes = self._known[key]
        return list(_parts(rule)) if attributes is None else _statement(rule, attributes)

    def _candidates(self, rule: Rule, kinds: set[str], per_rank: bool) -> Iterator[str]:
        """Yield the possible attributes of the rule's statement, in order of preference."""
        axis = "" if rule.axis == 1 else f", axis={rule.axis}"
        # Separate query, key and value are written per kv head, independent of the number of ranks.
        separate = len(rule.sources) != len(rule.targets) and QKV_PER_RANK not in kinds
        if per_rank and len(rule.lengths) == 2 and kinds <= {FFN}:
            yield f"{FFN}{axis}"
        if per_rank and len(rule.lengths) == 3 and self._hints.heads and not separate:
            heads, groups = self._hints.heads
            yield f"{QKV_PER_RANK}, num_heads={heads}, num_key_value_groups={groups}{axis}"
        yield from ("", f"axis={rule.axis}")
        # Paddle appends the number of a head to the name of its part.
        if len(rule.lengths) == 3 and self._stems.isdisjoint(rule.sources if len(rule.targets) == 1 else rule.targets):
            query, key, value = rule.lengths
            groups = max(rule.source_blocks, rule.target_blocks)
            heads = query // key * groups if key == value and key and query % key == 0 else groups
            yield f"{QKV}, num_heads={heads}, num_key_value_groups={groups}{axis}"


def _means(attributes: str, rule: Rule, cuts: tuple[Cuts, Cuts]) -> bool:
    """Return whether the rule's statement with these attributes evaluates to the rule."""
    mapping = _alone(rule)
    left, right = _tensors(mapping.sources, cuts[0]), _tensors(mapping.targets, cuts[1])
    try:
        return not any(disagreements(parse([str(one) for one in _statement(rule, attributes)], left, right), mapping))
    except MappingError:
        return False


def _alone(rule: Rule) -> TensorMapping:
    """Return the mapping of a single rule, for tensors of length 2 on all axes other than the rule's."""
    shapes = zip(rule.targets, rule.target_shapes((2,) * len(rule.axes)), strict=True)
    return RuleSet({name: TensorSpec(shape, "float32") for name, shape in shapes}, (rule,)).mapping()


def _statement(rule: Rule, attributes: str) -> list[_Text]:
    """Return the statements of a rule, which first permute its sources if needed; none if nothing changes."""
    before, left = _ordered(rule)
    # Paddle loses the number of shards of a tensor that a statement with a layout per shard reads transposed.
    if left != rule.sources and len(left) == 1 and attributes.startswith((FFN, QKV_PER_RANK)):
        before, left = [_Text(left, rule.sources)], rule.sources
    if before and not attributes:
        return [before[0]._replace(right=rule.targets)]
    return [*before, _Text(left, rule.targets, attributes)] if attributes or left != rule.targets else []


def _ordered(rule: Rule) -> tuple[list[_Text], tuple[str, ...]]:
    """Return statements that permute the sources, and the names to read afterwards."""
    axes = list(rule.axes)
    if axes == sorted(axes):
        return [], rule.sources
    if axes == sorted(axes, reverse=True):
        return [], tuple(f"{name}^T" for name in rule.sources)
    return [_Text((name,), (name,), f'permute="{axes}"') for name in rule.sources], rule.sources


def _parts(rule: Rule) -> Iterator[_Text]:
    """Yield the general case: split into arrays of the longest possible equal parts, then join."""
    before, left = _ordered(rule)
    yield from before
    mapping, along = _alone(rule), rule.axes[rule.axis]
    stretches = {
        target: [
            (item.source, item.source_box.lo[along], item.source_box.hi[along])
            for item in sorted(coalesced(items), key=lambda item: item.target_box.lo)
        ]
        for target, items in mapping.by_target.items()
    }
    units, reads = dict[str, int](), dict(zip(rule.sources, left, strict=True))
    for name, read in reads.items():
        units[name] = gcd(
            *(place for found in stretches.values() for one, *own in found if one == name for place in own)
        )
        count = mapping.sources[name].shape[along] // units[name]
        if count > _MOST_PARTS:
            _raise_faults([f"{name}: the language has equal splits only, and this one has {count} parts"])
        if count > 1:
            yield _Text((read,), (f"{name}[0:{count}]",), f"axis={rule.axis}")
            reads[name] = ""
    for target, found in stretches.items():
        parts = [(name, lo // units[name], hi // units[name]) for name, lo, hi in found]
        several = sum(hi - lo for _, lo, hi in parts) > 1
        names = tuple(reads[name] or f"{name}[{lo}:{hi}]" for name, lo, hi in parts)
        yield _Text(names, (target,), f"axis={rule.axis}" if several else "")


def _in_order(components: Sequence[_Component], index: NameIndex) -> list[str]:
    """Return all statements, ordered so that no name is overwritten before it is read."""
    reader = {name: place for place, one in enumerate(components) for name in one.reads}
    sorter: TopologicalSorter[int] = TopologicalSorter()
    for place, one in enumerate(components):
        sorter.add(place, *({reader[name] for name in one.writes if name in reader} - {place}))
    try:
        sorter.prepare()
    except CycleError as error:
        _raise_faults([f"names change places: {', '.join(components[place].reads[0] for place in error.args[1])}"])
    statements: list[str] = []
    while sorter.is_active():
        ready = sorter.get_ready()
        statements += _compacted([components[place].texts for place in sorted(ready)], index)
        sorter.done(*ready)
    return statements


def _compacted(components: Sequence[tuple[_Text, ...]], index: NameIndex) -> Iterator[str]:
    """Combine the statements of components into as few as possible, in their order.

    A placeholder takes its numbers from all tensors that match the first name. Statements are combined only if exactly
    these tensors are theirs.

    Args:
        components: the statements of every component.
        index: the names of the left side.
    """
    placed = dict[int, Sequence[_Text]]()
    waiting = dict(enumerate(components))
    for positions in _CHOICES:
        groups: dict[tuple[_Text, ...], dict[_Numbers, int]] = {}
        for place, own in waiting.items():
            numbers, texts = _patterned(own, positions)
            if numbers:
                groups.setdefault(texts, {})[numbers] = place
        for texts, members in groups.items():
            exact = [_is_exact(text, members.keys(), index) for text in texts]
            if exact[0]:
                spelled = [waiting.pop(place) for place in members.values()]
                placed[min(members.values())] = [
                    statement
                    for at, text in enumerate(texts)
                    for statement in ([text] if exact[at] else [own[at] for own in spelled])
                ]
    placed |= waiting
    return (str(text) for place in sorted(placed) for text in placed[place])


def _is_exact(text: _Text, numbers: Collection[_Numbers], index: NameIndex) -> bool:
    """Return whether a statement with placeholders expands to exactly these numbers."""
    if prod(len(set(column)) for column in zip(*numbers, strict=True)) != len(numbers):
        return False
    matched = index.matches(_SUFFIX.sub("", text.left[0]))
    return len(matched) == len(numbers) and {found for _, found in matched} == numbers


def _patterned(texts: tuple[_Text, ...], positions: tuple[int, ...]) -> tuple[_Numbers, tuple[_Text, ...]]:
    """Return the numbers at these positions, empty if names differ in them, and the statements with placeholders."""
    first, places = _NUMBER.split(texts[0].left[0]), [2 * position + 1 for position in positions]
    if len(first) <= places[-1]:
        return (), texts
    numbers = tuple(first[place] for place in places)
    expert = EXPERT if len(places) > 1 or first[places[0] - 1].endswith("experts.") else LAYER

    def holed(name: str) -> str:
        pieces = _NUMBER.split(name)
        if tuple(pieces[place] for place in places if place < len(pieces)) != numbers:
            return ""
        for place, hole in zip(places, (LAYER, expert)[-len(places) :], strict=True):
            pieces[place] = hole
        return "".join(pieces)

    found = [text._replace(left=tuple(map(holed, text.left)), right=tuple(map(holed, text.right))) for text in texts]
    return () if any("" in (*text.left, *text.right) for text in found) else numbers, tuple(found)


def _raise_faults(faults: Iterable[str]) -> None:
    evidence = fold(dict.fromkeys(faults))
    if evidence:
        raise MappingError(
            "The AOA language cannot express this mapping.",
            evidence=evidence,
            next_step="Use the mapping without statements: it is proved, and mapping.json contains all of it.",
        )


def _verify(statements: list[str], mapping: TensorMapping, cuts: tuple[Cuts, Cuts]) -> None:
    """Check that the text is valid and evaluates to the mapping."""
    try:
        back = parse(statements, _tensors(mapping.sources, cuts[0]), _tensors(mapping.targets, cuts[1]))
    except MappingError as error:
        _raise_faults(error.evidence)
        raise
    differs = any(faults_of(back)) or any(disagreements(back, mapping))
    if differs or (back.fresh, back.dropped) != (mapping.fresh, mapping.dropped):
        raise MappingError(
            "The AOA statements of this mapping evaluate to a different mapping.",
            evidence=statements[:_SHOWN],
            next_step="Report this bug of the package. Only the statements are affected.",
        )


def _tensors(specs: Mapping[str, TensorSpec], cuts: Cuts) -> dict[str, AoaTensor]:
    return {
        name: AoaTensor(spec.shape, spec.dtype, cuts.get(name, (1,) * len(spec.shape))) for name, spec in specs.items()
    }
