"""Plan reads: map byte ranges of files to the parts of target shards that they fill.

The template of a tensor lists the boxes of stored tensors that a target shard consists of; the catalog has their
offsets. A plan reads only the bytes that are needed, and writes every target element exactly once. Optimizer states
follow their parameter: a master weight or moment uses the boxes of the parameter, but never its casts. A power of beta
is one number, which must be equal in all sources.

Shards with equal boxes of tensors with equal templates and equal storage share one :class:`FillPattern`, which is
derived and checked once. Time: a look-up per shard and its items; per pattern, a bisection for the intersecting boxes.
Memory: the items.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from operator import attrgetter

import msgspec

from paddleformers_fc.formats.catalog import Catalog, StoredForm, StoredTensor
from paddleformers_fc.layout.roles import EMA_STATE, MASTER, MODEL_STATE, StateName, StateShape, split_state_name
from paddleformers_fc.layout.shards import Fragment, Shard, ShardsByRole, shard_bytes
from paddleformers_fc.mapping import Shape, TensorMapping
from paddleformers_fc.mapping.boxes import Box, cover_faults, whole
from paddleformers_fc.mapping.templates import BoxLink, Template, identity, pulled, pushed
from paddleformers_fc.plan.items import EqualCheck, LoadPlan, ReadItem, StoredPart
from paddleformers_fc.plan.report import Report
from paddleformers_fc.storage.dtypes import dtype_size

CAST = ("float32", "bfloat16")
"""Dtypes between which ``may_cast`` casts, rounding half to even as Paddle does."""

_in_file = attrgetter("stored.begin")


class ReadSource(msgspec.Struct, frozen=True):
    """Stored tensors and their mapping to target tensors.

    Args:
        catalog: the stored tensors.
        mapping: from stored parameters to target parameters.
        stored_aliases: stored alias -> stored owner, for tied parameters.
        target_aliases: target alias -> target owner.
        preferred: stored owner -> the names of all copies; the first one is read. Copies of other owners must be equal.
        may_cast: whether the precision may differ. If so, numbers are cast between the dtypes of :data:`CAST`, a weight
            of a different dtype is read from its master weight, and a missing master weight from its weight.
        averaged: whether weights and master weights are read from their moving averages, if stored. An average is cast
            to the dtype of the weight.
    """

    catalog: Catalog
    mapping: TensorMapping
    stored_aliases: Mapping[str, str] = msgspec.field(default_factory=dict)
    target_aliases: Mapping[str, str] = msgspec.field(default_factory=dict)
    preferred: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    may_cast: bool = False
    averaged: bool = False

    def is_average(self, tensor: StoredTensor) -> bool:
        """Return whether a stored tensor is a moving average."""
        return self.catalog.roles.get(EMA_STATE, {}).get(tensor.name) is tensor


class PatternPiece(msgspec.Struct, frozen=True, gc=False):
    """One stored box that fills one box of a shard, without names.

    Args:
        tensor: index of the stored tensor.
        box: index of its stored box.
        stored_shape: shape of that box in its file.
        stored_part: the region, in coordinates of that box in its file.
        start: index of the target fragment's first element in the shard's buffer.
        shape: shape of the target fragment.
        part: the region, in coordinates of the target fragment.
        axes: for every axis of the target region the stored axis it reads, or -1 for a new axis of length one.
    """

    tensor: int
    box: int
    stored_shape: Shape
    stored_part: Box
    start: int
    shape: Shape
    part: Box
    axes: tuple[int, ...]


class FillPattern(msgspec.Struct, frozen=True, eq=False):
    """How to fill all shards of one kind.

    Args:
        pieces: the stored boxes, in the order of the shard's fragments.
    """

    pieces: tuple[PatternPiece, ...]


class ShardFill(msgspec.Struct, frozen=True, eq=False, gc=False):
    """How to fill one shard: a pattern, and the stored tensors that its indices refer to."""

    pattern: FillPattern
    tensors: list[StoredTensor]

    def items(self, role: str, name: str) -> list[ReadItem]:
        """Return the read items of the shard.

        Args:
            role: its role.
            name: its full name.
        """
        tensors, items = self.tensors, []
        for one in self.pattern.pieces:
            tensor = tensors[one.tensor]
            file, begin = tensor.offsets[one.box]
            stored = StoredPart(file, begin, one.stored_shape, one.stored_part, tensor.form.held_dtype)
            items.append(ReadItem(role, name, stored, one.start, one.shape, one.part, one.axes))
        return items


def plan_reads(source: ReadSource, targets: ShardsByRole) -> LoadPlan:
    """Plan the reads of one rank.

    Args:
        source: the stored tensors and their mapping.
        targets: role -> full name -> the shard to fill.
    Returns:
        the plan; its report lists the mismatches.
    """
    planner, by_file = Planner(source), defaultdict[str, list[ReadItem]](list)
    for role, shards in targets.items():
        for shard in shards.values():
            for item in planner.items(role, shard):
                by_file[item.stored.file].append(item)
    for items in by_file.values():
        items.sort(key=_in_file)
    return LoadPlan(
        tuple([item for file in sorted(by_file) for item in by_file[file]]),
        tuple(planner.checks.values()),
        {role: frozenset(names) for role, names in planner.touched.items()},
        planner.report,
    )


class Planner:
    """Plan the reads of shards one by one from one source. Equal patterns are derived once.

    Args:
        source: the stored tensors and their mapping.
    Attributes:
        report: the mismatches so far.
        checks: pairs of stored boxes that must be equal, by the names of the two tensors.
        touched: stored names that are read, by role.
    """

    def __init__(self, source: ReadSource) -> None:
        self._source = source
        self._copies: dict[str, tuple[str, ...]] = {}
        for alias, owner in source.stored_aliases.items():
            self._copies[owner] = (*self._copies.get(owner, (owner,)), alias)
        self._copies |= source.preferred
        self._patterns: dict[tuple[object, ...], FillPattern] = {}
        mapping = source.mapping
        self._target_sources, self._sources, self._targets = mapping.made, mapping.sources, mapping.targets
        self.report = Report()
        self.checks: dict[tuple[str, str], EqualCheck] = {}
        self.touched: defaultdict[str, set[str]] = defaultdict(set)

    def items(self, role: str, shard: Shard) -> list[ReadItem]:
        """Return the read items of one shard; none if it keeps its values, or does not match what is stored.

        Args:
            role: its role.
            shard: the shard, or a part of it.
        """
        filling = self.filling(role, shard)
        return [] if filling is None else filling.items(role, shard.name)

    def filling(self, role: str, shard: Shard) -> ShardFill | None:
        """Return how to fill one shard; None if it keeps its values, or does not match what is stored."""
        state = split_state_name(role, shard.name, shard.global_shape)
        parameter = self._source.target_aliases.get(state.parameter, state.parameter)
        made = self._target_sources.get(parameter)
        if made is None:
            if parameter not in self._source.mapping.fresh:
                self.report.add("missing", shard.name)
            return None
        tensors = self._tensors(role, shard, made.names, state)
        if tensors is None:
            return None
        template = made.template
        if state.shape is not StateShape.PARAMETER:
            if not self._numbers_match(shard, tensors):
                return None
            template, tensors = identity(shard.global_shape), tensors[:1]
        else:
            target = self._targets.get(parameter)
            if target is not None and target.shape != shard.global_shape:
                self._report_shape(shard, f"mapped {list(target.shape)}", shard.global_shape)
                return None
        forms = [tensor.form for tensor in tensors]
        average = self._source.averaged and any(map(self._source.is_average, tensors))
        key = (template, shard.box, shard.flat, shard.dtype, shard.global_shape, role == MODEL_STATE, average, *forms)
        pattern = self._patterns.get(key)
        if pattern is None:
            if not self._dtypes_match(role, shard, template, tensors):
                return None
            pattern = FillPattern(tuple(_pieces(shard, template, forms)))
            if self._covers(shard, pattern):
                # Faults must be reported for every name, so faulty patterns are not cached.
                self._patterns[key] = pattern
        return ShardFill(pattern, tensors)

    def _tensors(self, role: str, shard: Shard, names: tuple[str, ...], state: StateName) -> list[StoredTensor] | None:
        """Return the stored states of some parameters; None if a state is missing or its shape does not match."""
        found: list[StoredTensor] = []
        for name in names:
            full = name + state.suffix
            tensor = self._stored_source(role, name, state.suffix, shard.dtype)
            if tensor is None:
                self.report.add("missing", full if full == shard.name else f"{shard.name}: needs {full}")
                continue
            shape = tensor.form.shape
            if shape == self._sources[name].shape or state.shape is not StateShape.PARAMETER:
                found.append(tensor)
            else:
                self._report_shape(shard, f"stored {list(shape)}", self._sources[name].shape)
        return found if len(found) == len(names) else None

    def _stored_source(self, role: str, parameter: str, suffix: str, dtype: str) -> StoredTensor | None:
        """Return the stored tensor that a target tensor is read from; None if there is none.

        Args:
            role: role of the target tensor.
            parameter: the stored parameter.
            suffix: suffix of the target tensor.
            dtype: dtype of the target tensor.
        """
        tensor, source = self._stored(role, parameter, suffix), self._source
        if source.may_cast and role == MODEL_STATE and tensor is not None and tensor.dtype != dtype:
            tensor = self._stored(MASTER.role, parameter, MASTER.suffix) or tensor
        if source.may_cast and role == MASTER.role and tensor is None:
            tensor = self._stored(MODEL_STATE, parameter, "")
        if source.averaged and role in (MODEL_STATE, MASTER.role):
            tensor = self._stored(EMA_STATE, parameter, "") or tensor
        return tensor

    def _stored(self, role: str, parameter: str, suffix: str) -> StoredTensor | None:
        """Return a stored tensor, and record it as read.

        Of a tied tensor, return the preferred copy, or else the owner's, which must equal all other copies.
        """
        stored = self._source.catalog.roles.get(role, {})
        names = self._copies.get(parameter, (parameter,))
        found = [stored[name + suffix] for name in names if name + suffix in stored]
        self.touched[role].update(tensor.name for tensor in found)
        for other in found[1:] if parameter not in self._source.preferred else ():
            self._must_equal(found[0], other, tied=True)
        return found[0] if found else None

    def _report_shape(self, shard: Shard, what: str, expected: Shape) -> None:
        self.report.add("shape", f"{shard.name}: {what}, expected {list(expected)}")

    def _numbers_match(self, shard: Shard, tensors: list[StoredTensor]) -> bool:
        """Return whether stored numbers match the dtype and shape of a target number, and check that they are equal."""
        for tensor in tensors:
            if tensor.dtype != shard.dtype and not self._can_cast(tensor.dtype, shard.dtype):
                self.report.add("dtype", f"{shard.name}: stored {tensor.dtype}, expected {shard.dtype}")
                return False
            if tensor.shape != shard.global_shape:
                self._report_shape(shard, f"stored {list(tensor.shape)}", shard.global_shape)
                return False
        for other in tensors[1:]:
            self._must_equal(tensors[0], other)
        return True

    def _must_equal(self, owner: StoredTensor, other: StoredTensor, tied: bool = False) -> None:
        if (owner.name, other.name) in self.checks:
            return
        one, two = owner.form, other.form
        if (one.shape, one.dtype, one.held_dtype, one.turned) != (two.shape, two.dtype, two.held_dtype, two.turned):
            self.report.add("unequal", f"{other.name}: {other.dtype} {list(other.shape)} is not {owner.name}'s form")
            return
        for index, (left, right) in enumerate(_common_parts(owner, whole(owner.shape), other)):
            key = (owner.name, other.name if index == 0 else f"{other.name}#{index}")
            self.checks[key] = EqualCheck(f"{other.name} = {owner.name}", left, right, tied)

    def _dtypes_match(self, role: str, shard: Shard, template: Template, tensors: list[StoredTensor]) -> bool:
        """Return whether every source has the shard's dtype, as stored or after an allowed cast."""
        wrong = dict.fromkeys(
            tensors[link.source].dtype
            for link in template.links
            if tensors[link.source].dtype != shard.dtype and (role != MODEL_STATE or link.cast != shard.dtype)
            if not self._can_cast(tensors[link.source].dtype, shard.dtype)
            if not (role == MODEL_STATE and self._source.averaged and self._source.is_average(tensors[link.source]))
        )
        for dtype in wrong:
            self.report.add("dtype", f"{shard.name}: stored {dtype}, expected {shard.dtype}")
        return not wrong

    def _can_cast(self, stored: str, target: str) -> bool:
        return self._source.may_cast and {stored, target} <= set(CAST)

    def _covers(self, shard: Shard, pattern: FillPattern) -> bool:
        """Return whether every element of the shard is written exactly once."""
        written: dict[int, list[Box]] = {}
        for piece in pattern.pieces:
            written.setdefault(piece.start, []).append(piece.part)
        covered = True
        for fragment in shard.fragments:
            for fault in cover_faults(whole(fragment.box.shape), written.get(fragment.start, [])):
                verb = "written twice" if fault.writers else "not written"
                self.report.add("coverage", f"{shard.name}: {fault.where} of {fragment.box} is {verb}")
                covered = False
        return covered


def _pieces(shard: Shard, template: Template, forms: list[StoredForm]) -> Iterator[PatternPiece]:
    for fragment in shard.fragments:
        for place in template.finder.near(fragment.box):
            link = template.links[place]
            part = link.target_box.intersect(fragment.box)
            if part is not None:
                yield from _link_pieces(fragment, link, part, forms[link.source])


def _link_pieces(fragment: Fragment, link: BoxLink, part: Box, form: StoredForm) -> Iterator[PatternPiece]:
    for index, common in _intersecting(form, pulled(link, part)):
        box = form.boxes[index]
        filled = pushed(link, common).relative_to(fragment.box.lo)
        shape, region = form.in_file(box.shape, common.relative_to(box.lo))
        axes = form.file_axes(link.axes)
        yield PatternPiece(link.source, index, shape, region, fragment.start, fragment.box.shape, filled, axes)


def _intersecting(form: StoredForm, box: Box) -> Iterator[tuple[int, Box]]:
    for index in form.finder.near(box):
        common = form.boxes[index].intersect(box)
        if common is not None:
            yield index, common


def _common_parts(left: StoredTensor, box: Box, right: StoredTensor) -> Iterator[tuple[StoredPart, StoredPart]]:
    for one, first in _intersecting(left.form, box):
        for other, both in _intersecting(right.form, first):
            yield _stored_part(left, one, both), _stored_part(right, other, both)


def _stored_part(tensor: StoredTensor, index: int, box: Box) -> StoredPart:
    (file, begin), stored = tensor.offsets[index], tensor.form.boxes[index]
    shape, part = tensor.form.in_file(stored.shape, box.relative_to(stored.lo))
    return StoredPart(file, begin, shape, part, tensor.form.held_dtype)


def row_major_pieces(tensor: Shard, most_bytes: int) -> Iterator[Shard]:
    """Yield a shard in row-major ranges of at most ``most_bytes`` bytes, or of one element.

    The bytes of successive pieces are successive bytes of the tensor, so that pieces can be hashed or written one by
    one. A piece is planned like any flattened shard. It consists of complete rows or planes, and so of few boxes.

    Args:
        tensor: a shard that is not flattened; it is the only piece if it is small enough.
        most_bytes: bound on the bytes of a piece.
    """
    if shard_bytes(tensor) <= most_bytes:
        yield tensor
        return
    most = max(1, most_bytes // dtype_size(tensor.dtype))
    shape = tensor.box.shape
    row = max(size for axis in range(len(shape) + 1) if (size := math.prod(shape[axis:])) <= most)
    step = most // row * row
    for begin in range(0, tensor.size, step):
        yield msgspec.structs.replace(tensor, flat=(begin, min(begin + step, tensor.size)))
