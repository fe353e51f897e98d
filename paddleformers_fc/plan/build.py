"""Planning: which byte ranges of which files become which parts of which wanted shards.

For every wanted shard, the correspondences of its tensor say which boxes of which stored tensors it is made of; the
catalog says where those lie. The plan is exact: it names only bytes that are needed, and it is checked to write every
wanted element exactly once. Optimizer states follow their parameter: a master weight or moment takes the parameter's
boxes, never its casts; a power of beta is one number that all sources must agree on.

Linear in the wanted fragments times the stored fragments they touch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping as MappingABC
from dataclasses import dataclass, field

from paddleformers_fc.catalog.stored import Catalog, StoredFragment, StoredTensor
from paddleformers_fc.layout.roles import MODEL_STATE, split_state_name
from paddleformers_fc.layout.shards import Fragment, Shard
from paddleformers_fc.mapping import Correspondence, Mapping
from paddleformers_fc.mapping.boxes import Box, cover_faults, whole
from paddleformers_fc.plan.items import EqualCheck, LoadPlan, ReadItem, StoredPart
from paddleformers_fc.plan.report import Report

Wanted = MappingABC[str, MappingABC[str, Shard]]


@dataclass(frozen=True)
class Source:
    """What is stored, and how its names lead to the wanted ones.

    Args:
        catalog: the stored tensors.
        mapping: stored parameters onto wanted parameters.
        stored_aliases: stored alias -> stored owner, for tied parameters.
        wanted_aliases: wanted alias -> wanted owner.
    """

    catalog: Catalog
    mapping: Mapping
    stored_aliases: MappingABC[str, str] = field(default_factory=dict)
    wanted_aliases: MappingABC[str, str] = field(default_factory=dict)


def plan_reads(source: Source, wanted: Wanted) -> LoadPlan:
    """The plan of one rank.

    Args:
        source: what is stored.
        wanted: role -> full name -> the shard to be filled.
    Returns:
        the plan; its report says what does not fit, and is empty where the plan can be carried out.
    """
    planner = _Planner(source)
    items = [
        item for role, shards in wanted.items() for shard in shards.values() for item in planner.reads(role, shard)
    ]
    items.sort(key=lambda item: (item.stored.file, item.stored.begin))
    return LoadPlan(
        tuple(items),
        tuple(planner.checks.values()),
        {role: frozenset(names) for role, names in planner.touched.items()},
        planner.report,
    )


class _Planner:
    """The state of one planning: what was touched, checked and found wrong."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._aliases: dict[str, list[str]] = {}
        for alias, owner in source.stored_aliases.items():
            self._aliases.setdefault(owner, []).append(alias)
        self.report = Report()
        self.checks: dict[tuple[str, str], EqualCheck] = {}
        self.touched: dict[str, set[str]] = {}

    def reads(self, role: str, shard: Shard) -> list[ReadItem]:
        """The items that fill one shard, or none where something does not fit."""
        state = split_state_name(role, shard.name)
        parameter = self._source.wanted_aliases.get(state.parameter, state.parameter)
        links = self._source.mapping.by_target.get(parameter, [])
        if not links:
            if parameter not in self._source.mapping.fresh:
                self.report.add("missing", shard.name)
            return []
        stored = {link.source: self._stored(role, link.source, state.suffix) for link in links}
        absent = [name for name, tensor in stored.items() if tensor is None]
        if absent:
            for name in absent:
                self.report.add("missing", f"{shard.name}: needs {name}{state.suffix}")
            return []
        present = {name: tensor for name, tensor in stored.items() if tensor is not None}
        if state.scalar:
            return self._scalar(role, shard, list(present.values()))
        if not self._fits(role, shard, links, present):
            return []
        return self._boxes(role, shard, links, present)

    def _stored(self, role: str, parameter: str, suffix: str) -> StoredTensor | None:
        """The stored state of a parameter: under its own name, or under an alias of it that must then be equal."""
        names = self._source.catalog.roles.get(role, {})
        found = [
            names[name + suffix] for name in (parameter, *self._aliases.get(parameter, ())) if name + suffix in names
        ]
        self.touched.setdefault(role, set()).update(tensor.name for tensor in found)
        for other in found[1:]:
            self._must_equal(found[0], other)
        return found[0] if found else None

    def _must_equal(self, owner: StoredTensor, other: StoredTensor) -> None:
        if (owner.name, other.name) in self.checks:
            return
        if (owner.shape, owner.dtype) != (other.shape, other.dtype):
            self.report.add("unequal", f"{other.name}: {other.dtype} {list(other.shape)} is not {owner.name}'s form")
            return
        for index, (left, right, _) in enumerate(_common(owner, whole(owner.shape), other)):
            key = (owner.name, other.name if index == 0 else f"{other.name}#{index}")
            self.checks[key] = EqualCheck(f"{other.name} = {owner.name}", left, right)

    def _scalar(self, role: str, shard: Shard, stored: list[StoredTensor]) -> list[ReadItem]:
        first = stored[0]
        for tensor in stored:
            if tensor.dtype != shard.dtype:
                self.report.add("dtype", f"{shard.name}: stored {tensor.dtype}, wanted {shard.dtype}")
                return []
            if tensor.shape != shard.global_shape:
                self.report.add(
                    "shape", f"{shard.name}: stored {list(tensor.shape)}, wanted {list(shard.global_shape)}"
                )
                return []
        for other in stored[1:]:
            self._must_equal(first, other)
        axes = tuple(range(len(shard.global_shape)))
        link = Correspondence(first.name, whole(first.shape), shard.name, whole(shard.global_shape), axes)
        return self._boxes(role, shard, [link], {first.name: first})

    def _fits(self, role: str, shard: Shard, links: list[Correspondence], stored: dict[str, StoredTensor]) -> bool:
        fits = True
        for name, tensor in stored.items():
            expected = self._source.mapping.sources[name].shape
            if tensor.shape != expected:
                self.report.add("shape", f"{shard.name}: stored {list(tensor.shape)}, wanted {list(expected)}")
                fits = False
        for link in links:
            cast = link.cast if role == MODEL_STATE else None
            if stored[link.source].dtype != shard.dtype and cast != shard.dtype:
                self.report.add("dtype", f"{shard.name}: stored {stored[link.source].dtype}, wanted {shard.dtype}")
                fits = False
        target = self._source.mapping.targets.get(links[0].target)
        if target is not None and target.shape != shard.global_shape:
            self.report.add("shape", f"{shard.name}: mapped {list(target.shape)}, wanted {list(shard.global_shape)}")
            fits = False
        return fits

    def _boxes(
        self, role: str, shard: Shard, links: list[Correspondence], stored: dict[str, StoredTensor]
    ) -> list[ReadItem]:
        items: list[ReadItem] = []
        for fragment in shard.fragments:
            written: list[Box] = []
            for link in links:
                part = link.target_box.intersect(fragment.box)
                if part is None:
                    continue
                for item in self._items(role, shard, fragment, link, part, stored[link.source]):
                    written.append(item.part)
                    items.append(item)
            for fault in cover_faults(whole(fragment.box.shape), written):
                verb = "written twice" if fault.writers else "not written"
                self.report.add("coverage", f"{shard.name}: {fault.where} of {fragment.box} is {verb}")
        return items

    def _items(
        self, role: str, shard: Shard, fragment: Fragment, link: Correspondence, part: Box, tensor: StoredTensor
    ) -> Iterator[ReadItem]:
        for stored, common in _touching(tensor, link.pull(part)):
            filled = link.push(common)
            yield ReadItem(
                role,
                shard.name,
                _stored_part(stored, common, tensor.dtype),
                fragment.start,
                fragment.box.shape,
                filled.relative_to(fragment.box.lo),
                link.axes,
            )


def _touching(tensor: StoredTensor, box: Box) -> Iterator[tuple[StoredFragment, Box]]:
    for index in tensor.finder.near(box):
        fragment = tensor.fragments[index]
        common = fragment.box.intersect(box)
        if common is not None:
            yield fragment, common


def _common(left: StoredTensor, box: Box, right: StoredTensor) -> Iterator[tuple[StoredPart, StoredPart, Box]]:
    for one, first in _touching(left, box):
        for other, both in _touching(right, first):
            yield _stored_part(one, both, left.dtype), _stored_part(other, both, right.dtype), both


def _stored_part(fragment: StoredFragment, box: Box, dtype: str) -> StoredPart:
    return StoredPart(fragment.file, fragment.begin, fragment.box.shape, box.relative_to(fragment.box.lo), dtype)
