"""Rules: each describes tensors of one side as interleaved parts of tensors of the other side, along one axis.

A rule places ``parts`` along an axis. A tensor interleaves its parts in ``blocks`` groups, and every group contains an
equal share of each part, in order. All layouts in use are special cases:

===========================================  ==============  =============  =============
what                                         parts           source blocks  target blocks
===========================================  ==============  =============  =============
rename, transpose (``axes`` reversed)        one             1              1
concat, even or not; its reverse is a split  one per source  1              1
``fused_ffn``: [gate | up] per TP rank       gate, up        1              TP degree
``fused_qkv``: [q..q k v] per kv head        q, k, v         1              kv heads
``fused_qkv_old``: [Q | K | V] per TP rank   q, k, v         1              TP degree
fused in both spaces (phi)                   q, k, v         1              TP degree
gated queries: [q..q g..g k v] per kv head   (q, g), k, v    heads          kv heads
delta net: [q k v z b a] per TP rank         (q, k, v), ...  1              TP degree
stacked experts on a new axis                one per expert  1              1
stacked experts that are fused themselves    gate, up        1              1
===========================================  ==============  =============  =============

Parts in parentheses lie in one source. In the last row, one rule per expert fills a :class:`Slab` of the stack.

A checkpoint stores a :class:`RuleSet` in ``mapping.json`` with every size explicit, so its meaning does not depend on
later versions of a family. The file may be damaged or hostile: decoding checks every number, and applying the rules
checks that they match their tensors. The rules that were decoded last are cached, because all loads of a job read the
same text. Time and memory are linear in the text and in the groups, of which :data:`MAX_STRETCHES` is the maximum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import structs

from paddleformers_fc.errors import FormatError
from paddleformers_fc.mapping.boxes import MAX_AXES, MAX_LENGTH, Box, Shape, have_own_hashes, whole
from paddleformers_fc.mapping.correspondences import NEW_AXIS, TensorMapping, TensorSources, TensorSpec
from paddleformers_fc.mapping.prove import invalid_mapping
from paddleformers_fc.mapping.templates import BoxLink, Template, pruned, stack_templates
from paddleformers_fc.text import fold, numbers_text

T = TypeVar("T")

MAX_STRETCHES = 1 << 23
"""Maximum number of stretches in a set of rules; each takes about 0.5 kB."""

Parts = tuple[int | tuple[int, ...], ...]
"""Lengths of parts. A tuple lists several parts that lie in one of several tensors."""

FLOATS = frozenset({"float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"})


class Slab(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stretch of a target's axis that a rule fills, from ``start`` to before ``stop``."""

    axis: int
    start: int
    stop: int

    def __str__(self) -> str:
        return f"stretch {self.start}:{self.stop} on axis {self.axis}"


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Targets that consist of interleaved parts of sources along one axis.

    Args:
        sources: the source tensors: one per entry of ``parts``, or a single one with all parts.
        targets: the target tensors: one per entry of ``parts``, or a single one with all parts.
        parts: length of every part along ``axis``, in elements. A tuple lists several parts of one tensor.
        axis: the axis of the targets along which the parts are placed.
        axes: for every target axis the source axis that it reads; -1 for a new target axis of length one.
        source_blocks: number of groups in a source with several parts.
        target_blocks: number of groups in a target with several parts.
        cast: dtype that values are converted to; None to keep the bits.
        slab: the stretch that the rule fills, not on ``axis``; None if it fills the complete target.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    parts: Parts
    axis: int
    axes: tuple[int, ...]
    source_blocks: int = 1
    target_blocks: int = 1
    cast: str | None = None
    slab: Slab | None = None

    @property
    def _sides(self) -> list[tuple[tuple[str, ...], PartsByTensor, int]]:
        """Names, parts of every tensor, and number of groups, of the sources and of the targets."""
        sides = (self.sources, self.source_blocks), (self.targets, self.target_blocks)
        return [(names, parts_by_tensor(len(names), self.parts), blocks) for names, blocks in sides]

    def source_shapes(self, target: Shape) -> list[Shape]:
        """Return the shape of every source, from the shape of the first target."""
        if self.slab is not None:
            target = _narrowed(whole(target), self.slab).shape
        rank = sum(axis != NEW_AXIS for axis in self.axes)
        shapes: list[Shape] = []
        for length in map(sum, self._sides[0][1]):
            shape = [1] * rank
            for axis, source_axis in enumerate(self.axes):
                if source_axis != NEW_AXIS:
                    shape[source_axis] = length if axis == self.axis else target[axis]
            shapes.append(tuple(shape))
        return shapes

    def target_shapes(self, source: Shape) -> list[Shape]:
        """Return the shape of every target, from the shape of the first source. This rule must have no slab."""
        others = [1 if axis == NEW_AXIS else source[axis] for axis in self.axes]
        before, after = tuple(others[: self.axis]), tuple(others[self.axis + 1 :])
        return [(*before, length, *after) for length in map(sum, self._sides[1][1])]

    def faults(self, target_shapes: list[Shape]) -> Iterator[str]:
        """Yield the reasons why this rule is invalid for targets of these shapes."""
        ill_formed = self._ill_formed()
        if ill_formed:
            yield ill_formed
            return
        for side, (names, parts, blocks) in zip(("source", "target"), self._sides, strict=True):
            if len(names) not in (1, len(self.parts)):
                yield f"{len(names)} {side}s for {len(self.parts)} parts"
            mixed = [lengths for lengths in parts if len(names) == 1 or len(lengths) > 1]
            if not mixed and blocks != 1:
                yield f"{len(names)} {side}s cannot be interleaved in {blocks} groups"
            if blocks < 1 or any(part % blocks for lengths in mixed for part in lengths):
                yield f"parts {numbers_text(self.parts)} cannot be interleaved in {blocks} equal groups"
        lengths = map(sum, self._sides[1][1])
        for name, shape, length in zip(self.targets, target_shapes, lengths, strict=False):
            if len(shape) != len(self.axes):
                yield f"{name} has {len(shape)} axes, the rule is for {len(self.axes)}"
            elif shape[self.axis] != length:
                yield f"{name} has length {shape[self.axis]} on axis {self.axis}, the parts sum to {length}"
            elif self.slab is not None and not self._is_valid(self.slab, shape):
                yield f"{name} with shape {list(shape)} has no {self.slab}"

    def _ill_formed(self) -> str:
        """Return what is wrong with names, parts or axes, whatever the tensors are; empty if nothing is."""
        used = [axis for axis in self.axes if axis != NEW_AXIS]
        empty = not self.sources or not self.targets or not self.parts or () in self.parts
        if empty or min(self.lengths) < 0:
            parts = numbers_text(self.parts)
            return f"invalid rule: {len(self.sources)} sources, {len(self.targets)} targets, parts {parts}"
        if sorted(used) != list(range(len(used))) or not 0 <= self.axis < len(self.axes):
            return f"invalid order of axes {numbers_text(self.axes)} with parts along axis {self.axis}"
        if self.stretches > MAX_STRETCHES:
            return f"{self.source_blocks} and {self.target_blocks} groups are more than {MAX_STRETCHES} stretches"
        return ""

    @property
    def lengths(self) -> tuple[int, ...]:
        """The length of every part."""
        return flat(self.parts)

    @property
    def stretches(self) -> int:
        """Upper bound on the number of stretches."""
        return len(self.lengths) * (self.source_blocks + self.target_blocks)

    def _is_valid(self, slab: Slab, shape: Shape) -> bool:
        return (
            0 <= slab.axis < len(shape)
            and slab.axis != self.axis
            and 0 <= slab.start < slab.stop <= shape[slab.axis]
            and (self.axes[slab.axis] != NEW_AXIS or slab.stop - slab.start == 1)
        )

    def reversed(self) -> Rule:
        """Return the rule from the targets to the sources. This rule must have no slab, new axis or cast."""
        axes = tuple(map(self.axes.index, range(len(self.axes))))
        blocks = self.target_blocks, self.source_blocks
        return Rule(self.targets, self.sources, self.parts, self.axes[self.axis], axes, *blocks)

    def templates(self, target_shapes: list[Shape]) -> list[tuple[Template, tuple[int, ...]]]:
        """Return the template of every target, and the positions of its sources. Rules of one form share them."""
        links: list[list[BoxLink]] = [[] for _ in self.targets]
        for index, link in self._links(target_shapes):
            links[index].append(link)
        return [pruned(Template(tuple(found))) for found in links]

    def _links(self, target_shapes: list[Shape]) -> Iterator[tuple[int, BoxLink]]:
        """Yield every stretch, with the position of its target."""
        source_shapes, source_axis = self.source_shapes(target_shapes[0]), self.axes[self.axis]
        for one, other in zip(*(_places(parts, blocks) for _, parts, blocks in self._sides), strict=True):
            cuts = sorted({*one.cuts, *other.cuts, one.size})
            for low, high in zip(cuts, cuts[1:], strict=False):
                target_box = _along(target_shapes[other.tensor], self.axis, other.offset(low), high - low)
                if self.slab is not None:
                    target_box = _narrowed(target_box, self.slab)
                source_box = (
                    whole(source_shapes[one.tensor])
                    if source_axis == NEW_AXIS
                    else _along(source_shapes[one.tensor], source_axis, one.offset(low), high - low)
                )
                yield other.tensor, BoxLink(one.tensor, source_box, target_box, self.axes, self.cast)


def moving(source: str, target: str, shape: Shape, axes: tuple[int, ...] | None = None) -> Rule:
    """Return the rule that renames a complete tensor and permutes its axes.

    Args:
        source: the source.
        target: the target.
        shape: shape of the target, with at least one axis.
        axes: for every target axis the source axis that it reads; None for no permutation.
    """
    axes = tuple(range(len(shape))) if axes is None else axes
    return Rule((source,), (target,), shape[-1:], len(shape) - 1, axes)


class Tie(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Two target names of one tensor. The mapping contains the owner; the alias must be bitwise equal to it."""

    owner: str
    alias: str


PartsByTensor = tuple[tuple[int, ...], ...]
"""For every tensor of a side, the lengths of its parts, in order."""


class _Place(NamedTuple):
    """The location of a part in its tensor.

    Args:
        tensor: the position of the tensor.
        size: the length of the part.
        before: the total length of the preceding parts.
        total: the total length of all parts of the tensor.
        blocks: the number of groups.
    """

    tensor: int
    size: int
    before: int
    total: int
    blocks: int

    @property
    def cuts(self) -> range:
        """The offsets in the part at which the shares of groups begin."""
        return range(0, self.size + 1, self.size // self.blocks or 1)

    def offset(self, at: int) -> int:
        """Return the offset in the tensor of the part's element ``at``."""
        block, within = divmod(at, self.size // self.blocks)
        return block * (self.total // self.blocks) + self.before // self.blocks + within


def _places(tensors: PartsByTensor, blocks: int) -> Iterator[_Place]:
    """Yield the location of every part, in order."""
    for tensor, lengths in enumerate(tensors):
        before, total, own = 0, sum(lengths), blocks if len(lengths) > 1 else 1
        for size in lengths:
            yield _Place(tensor, size, before, total, own)
            before += size


def flat(parts: tuple[T | tuple[T, ...], ...]) -> tuple[T, ...]:
    """Return the parts of all entries, in order."""
    return tuple(one for entry in parts for one in (entry if isinstance(entry, tuple) else (entry,)))


def parts_by_tensor(count: int, parts: tuple[T | tuple[T, ...], ...]) -> tuple[tuple[T, ...], ...]:
    """Return the parts of each of ``count`` tensors: one entry per tensor, or all parts in a single tensor."""
    if count != len(parts):
        return (flat(parts),)
    return tuple(entry if isinstance(entry, tuple) else (entry,) for entry in parts)


def _along(shape: Shape, axis: int, start: int, length: int) -> Box:
    lo, hi = [0] * len(shape), list(shape)
    if shape:
        lo[axis], hi[axis] = start, start + length
    return Box(tuple(lo), tuple(hi))


def _narrowed(box: Box, slab: Slab) -> Box:
    before, after = slice(None, slab.axis), slice(slab.axis + 1, None)
    return Box(box.lo[before] + (slab.start,) + box.lo[after], box.hi[before] + (slab.stop,) + box.hi[after])


class _Form(NamedTuple):
    """What rules of one form share: shapes of sources, templates of targets, and the number of boxes."""

    source_shapes: list[Shape]
    templates: list[tuple[Template, tuple[int, ...]]]
    links: int


def _form_of(rule: Rule, shapes: list[Shape]) -> _Form | None:
    """Return the form of a rule; None if the rule is invalid for its targets."""
    if any(rule.faults(shapes)):
        return None
    templates = rule.templates(shapes)
    return _Form(rule.source_shapes(shapes[0]), templates, sum(len(template.links) for template, _ in templates))


def _stacked(parts: list[TensorSources], known: dict[object, Template]) -> TensorSources:
    """Return the sources of a target that several rules fill, such as a stack with one rule per expert."""
    key = tuple([(part.template, len(part.names)) for part in parts])
    if key not in known:
        known[key] = stack_templates(key)
    return TensorSources(known[key], tuple([name for part in parts for name in part.names]))


class RuleSet(msgspec.Struct, frozen=True, dict=True):
    """The rules from canonical tensors (sources) to a model's tensors (targets).

    Args:
        targets: global shape and dtype of every tensor of the model.
        rules: the rules of the targets.
        ties: targets that are another name of an owner.
        fresh: targets without a canonical source, which keep their initial values.
        dropped: canonical names that the model does not read.
        cuts: the number of shards per axis of every sharded target. Fused layouts depend on it; storing it allows to
            derive the rules again and to compare.
    """

    targets: dict[str, TensorSpec]
    rules: tuple[Rule, ...]
    ties: tuple[Tie, ...] = ()
    fresh: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    cuts: dict[str, Shape] = msgspec.field(default_factory=dict)

    @property
    def aliases(self) -> dict[str, str]:
        """The owner of every alias."""
        return {tie.alias: tie.owner for tie in self.ties}

    @cached_property
    def digest(self) -> str:
        """The blake2b digest, 32 hex digits; equal for equal rules in equal order."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).hexdigest()

    def casting(self, stored: Mapping[str, str]) -> RuleSet:
        """Return the rules with a declared cast wherever a stored floating-point dtype differs from the model's.

        Args:
            stored: stored dtype of every canonical tensor.
        """

        def declared(rule: Rule) -> Rule:
            target = self.targets[rule.targets[0]].dtype
            others = {stored.get(name, target) for name in rule.sources} - {target}
            if not others or target not in FLOATS or not others <= FLOATS:
                return rule
            return msgspec.structs.replace(rule, cast=target)

        return structs.replace(self, rules=tuple(declared(rule) for rule in self.rules))

    def mapping(self, stored: Mapping[str, str] | None = None) -> TensorMapping:
        """Return the mapping from canonical tensors to the model's tensors, without tied aliases.

        Args:
            stored: dtypes of canonical tensors that differ from the dtypes of their targets.
        Raises:
            MappingError: rules do not match the shapes or have unknown targets; the error lists all of them. Or the
                rules have more than :data:`MAX_STRETCHES` stretches in total.
        """
        faults: list[str] = []
        sources: dict[str, TensorSpec] = {}
        parts: dict[str, list[TensorSources]] = {}
        stacks: dict[object, Template] = {}
        # Most layers and experts share a form, so a form is computed only once.
        forms: dict[object, _Form | None] = {}
        hashes: dict[int, object] = {}
        stretches = 0
        for rule in self.rules:
            known = [self.targets[name] for name in rule.targets if name in self.targets]
            if len(known) < len(rule.targets):
                absent = [name for name in rule.targets if name not in self.targets]
                faults.extend(f"{name}: the target of the rule is not a tensor of the model" for name in absent)
                continue
            shapes = [spec.shape for spec in known]
            blocks = rule.source_blocks, rule.target_blocks
            key = (len(rule.sources), *shapes, rule.parts, rule.axis, rule.axes, *blocks, rule.slab, rule.cast)
            if key not in forms:
                if not have_own_hashes(hashes, (key,)):
                    faults.append(f"{', '.join(rule.targets)}: the numbers of rules have colliding hashes")
                    break
                forms[key] = _form_of(rule, shapes)
            form = forms[key]
            if form is None:
                faults.extend(f"{', '.join(rule.targets)}: {reason}" for reason in rule.faults(shapes))
                continue
            dtype = known[0].dtype
            for name, shape in zip(rule.sources, form.source_shapes, strict=True):
                sources[name] = TensorSpec(shape, dtype if stored is None else stored.get(name, dtype))
            stretches += form.links
            if stretches > MAX_STRETCHES:
                faults.append(f"{', '.join(rule.targets)}: more than {MAX_STRETCHES} stretches up to this rule")
                break
            for name, (template, kept) in zip(rule.targets, form.templates, strict=True):
                names = rule.sources if len(kept) == len(rule.sources) else tuple([rule.sources[at] for at in kept])
                parts.setdefault(name, []).append(TensorSources(template, names))
        if faults:
            next_step = "Compare the model's configuration with the family's declaration."
            raise invalid_mapping("Rules do not match their tensors", faults, next_step)
        aliases = self.aliases
        targets = {name: spec for name, spec in self.targets.items() if name not in aliases}
        made = {name: own[0] if len(own) == 1 else _stacked(own, stacks) for name, own in parts.items()}
        return TensorMapping(sources, targets, made, frozenset(self.fresh), frozenset(self.dropped))


_last: dict[bytes, RuleSet] = {}
"""The rules that were decoded last, by a cryptographic digest of their text."""

_rules = msgspec.json.Decoder(RuleSet)
_RESTORE = "Restore the file from a copy; it is damaged, or another version wrote it."


def encode_rules(rules: RuleSet) -> bytes:
    """Return the rules as UTF-8 JSON."""
    return msgspec.json.format(msgspec.json.encode(rules), indent=1)


def decode_rules(data: bytes, where: str) -> RuleSet:
    """Decode the JSON of :func:`encode_rules`.

    Args:
        data: UTF-8 JSON.
        where: path of the file, for errors.
    Raises:
        FormatError: the JSON is malformed or not a set of rules.
    """
    digest = hashlib.sha256(data).digest()
    rules = _last.get(digest)
    if rules is None:
        rules = _decoded(data, where)
        _last.clear()
        _last[digest] = rules
    return rules


def _decoded(data: bytes, where: str) -> RuleSet:
    try:
        rules = _rules.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(
            "Invalid mapping of the checkpoint.", where=where, evidence=[str(error)], next_step=_RESTORE
        ) from error
    faults = list(_faults(rules))
    if faults:
        raise FormatError(
            "The mapping of the checkpoint contains invalid tensors.",
            where=where,
            evidence=fold(faults),
            next_step=_RESTORE,
        )
    return rules


def _faults(rules: RuleSet) -> Iterator[str]:
    possible: set[Shape] = set()
    hashes: dict[int, object] = {}
    for name, spec in rules.targets.items():
        if spec.shape in possible:
            continue
        if len(spec.shape) > MAX_AXES or not all(0 <= length <= MAX_LENGTH for length in spec.shape):
            yield f"{name}: invalid shape"
        elif not have_own_hashes(hashes, (spec.shape,)):
            yield f"{name}: its shape has a colliding hash"
            return
        else:
            possible.add(spec.shape)
    for name, cuts in rules.cuts.items():
        known = rules.targets.get(name)
        if known is None or len(cuts) != len(known.shape) or not all(1 <= count <= MAX_LENGTH for count in cuts):
            yield f"{name}: invalid cuts {list(cuts)[:8]}"
    for tie in rules.ties:
        if tie.alias == tie.owner or rules.targets.get(tie.alias) != rules.targets.get(tie.owner):
            yield f"{tie.alias}: is tied to {tie.owner}, which differs in shape or dtype, or is the same name"
        elif tie.owner not in rules.targets:
            yield f"{tie.owner}: is tied and not a tensor of the model"
    for name in rules.fresh:
        if name not in rules.targets:
            yield f"{name}: is declared uninitialised and not a tensor of the model"
