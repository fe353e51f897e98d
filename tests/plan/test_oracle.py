"""Plans are what one gets by looking up every element, whatever the layouts are and whatever was planned before."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

from hypothesis import HealthCheck, given, strategies as st

from paddleformers_fc.formats.catalog import Catalog, gather_shards
from paddleformers_fc.layout.roles import MODEL_STATE, OPTIMIZER_STATE
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping import Correspondence, Rule, RuleSet, Shape, TensorSpec
from paddleformers_fc.mapping.boxes import Box, whole
from paddleformers_fc.mapping.rules import Slab
from paddleformers_fc.plan.build import ReadSource, plan_reads
from paddleformers_fc.plan.items import ReadItem
from tests.harness.sampling import thorough

Coordinates = tuple[int, ...]
Where = tuple[str, int]

LAYERS, EXPERTS, WIDTH = 3, 3, 2
PARTS = (8, 4, 4)
WIDE = 3


def coordinates(box: Box) -> list[Coordinates]:
    """Every element of a box, in row-major order."""
    return list(itertools.product(*(range(low, high) for low, high in zip(box.lo, box.hi, strict=True))))


def row_major(at: Coordinates, shape: Shape) -> int:
    """The index of an element in a row-major tensor."""
    index = 0
    for one, length in zip(at, shape, strict=True):
        index = index * length + one
    return index


def held(shard: Shard) -> list[Coordinates]:
    """The elements of a shard, in the order of its buffer."""
    begin, end = shard.flat or (0, shard.box.volume)
    return coordinates(shard.box)[begin:end]


@st.composite
def models(draw: st.DrawFn) -> RuleSet:
    """A model of a few layers over one canonical space, each of them fused, stacked or split as it is drawn."""
    targets: dict[str, TensorSpec] = {}
    rules: list[Rule] = []
    for layer in range(LAYERS):
        # For axes as they are in canonical space or turned: the shape of a part, and how a rule says it.
        turned = draw(st.booleans())
        axes, axis = ((1, 0), 1) if turned else ((0, 1), 0)

        def add(sources: tuple[str, ...], target: str, parts: Shape, rounds: int) -> None:
            length = sum(parts)
            targets[target] = TensorSpec((WIDE, length) if turned else (length, WIDE), "float16")  # noqa: B023
            rules.append(Rule(sources, (target,), parts, axis, axes, target_blocks=rounds))  # noqa: B023

        names = tuple(f"{layer}.{kind}" for kind in "qkv")
        if draw(st.booleans()):
            add(names, f"{layer}.qkv", PARTS, draw(st.sampled_from([1, 2, 4])))
        else:
            for name, length in zip(names, PARTS, strict=True):
                add((name,), name, (length,), 1)
        pairs = [(f"{layer}.{expert}.gate", f"{layer}.{expert}.up") for expert in range(EXPERTS)]
        kind, rounds = draw(st.sampled_from(["apart", "fused", "stacked"])), draw(st.sampled_from([1, 2]))
        for expert, pair in enumerate(pairs):
            if kind == "fused":
                add(pair, f"{layer}.{expert}.gate_up", (4, 4), rounds)
            elif kind == "apart":
                for name in pair:
                    add((name,), name, (4,), 1)
            else:
                stack, slab = f"{layer}.experts", Slab(0, expert, expert + 1)
                targets[stack] = TensorSpec((EXPERTS, WIDE, 8) if turned else (EXPERTS, 8, WIDE), "float16")
                rule = Rule(pair, (stack,), (4, 4), axis + 1, (-1, *axes), target_blocks=rounds, slab=slab)
                rules.append(rule)
    return RuleSet(targets, tuple(rules))


@st.composite
def cut(draw: st.DrawFn, name: str, shape: Shape) -> list[Shard]:
    """A tensor as the shards of a few ranks: boxes along one axis, each whole or as flattened ranges."""
    axis = draw(st.integers(0, len(shape) - 1))
    cuts = sorted(draw(st.sets(st.integers(1, shape[axis] - 1), max_size=2))) if shape[axis] > 1 else []
    shards: list[Shard] = []
    for low, high in itertools.pairwise([0, *cuts, shape[axis]]):
        box = Box((*[0] * axis, low, *[0] * (len(shape) - axis - 1)), (*shape[:axis], high, *shape[axis + 1 :]))
        ends = sorted(draw(st.sets(st.integers(1, box.volume - 1), max_size=2))) if draw(st.booleans()) else []
        if ends:
            ranges = itertools.pairwise([0, *ends, box.volume])
            shards += [Shard(name, "float16", shape, box, part) for part in ranges]
        else:
            shards.append(Shard(name, "float16", shape, box))
    return shards


@st.composite
def laid_out(draw: st.DrawFn, model: RuleSet) -> dict[str, list[Shard]]:
    """Every tensor of a model cut; tensors of one shape are often cut alike, as those of layers are."""
    alike: dict[Shape, list[Shard]] = {}
    found: dict[str, list[Shard]] = {}
    for name, spec in model.targets.items():
        if spec.shape not in alike or draw(st.integers(0, 3)) == 0:
            alike[spec.shape] = draw(cut(name, spec.shape))
        found[name] = [Shard(name, one.dtype, one.global_shape, one.box, one.flat) for one in alike[spec.shape]]
    return found


def pulled(item: Correspondence, at: Coordinates) -> Coordinates:
    """The source element of a target element."""
    there = list(item.source_box.lo)
    for axis, source_axis in enumerate(item.axes):
        if source_axis >= 0:
            there[source_axis] += at[axis] - item.target_box.lo[axis]
    return tuple(there)


def elements(model: RuleSet) -> dict[str, dict[Coordinates, tuple[str, Coordinates]]]:
    """The canonical element of every element of every tensor, rule by rule."""
    found: dict[str, dict[Coordinates, tuple[str, Coordinates]]] = {name: {} for name in model.targets}
    for rule in model.rules:
        alone = RuleSet({name: model.targets[name] for name in rule.targets}, (rule,))
        for item in alone.mapping().correspondences:
            for at in coordinates(item.target_box):
                assert at not in found[item.target]
                found[item.target][at] = (item.source, pulled(item, at))
    return found


def planned(items: list[ReadItem], size: int) -> list[Where]:
    """File and byte of every element of a shard, element by element, from its items."""
    filled: dict[int, Where] = {}
    for item in items:
        stored = item.stored
        for at in coordinates(item.part):
            there = list(stored.part.lo)
            for axis, source_axis in enumerate(item.axes):
                if source_axis >= 0:
                    there[source_axis] += at[axis] - item.part.lo[axis]
            index = item.start + row_major(at, item.shape)
            assert index not in filled
            filled[index] = (stored.file, stored.begin + WIDTH * row_major(tuple(there), stored.shape))
    assert sorted(filled) == list(range(size))
    return [filled[index] for index in range(size)]


@thorough(60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(models(), models(), st.data())
def test_a_plan_reads_every_element_from_where_it_is_stored(
    stored: RuleSet, wanted: RuleSet, data: st.DataObject
) -> None:
    files: list[tuple[Shard, str, int, int]] = []
    places: dict[tuple[str, Coordinates], Where] = {}
    ends = {"a": 8, "b": 8}
    canonical = elements(stored)
    for name, shards in data.draw(laid_out(stored)).items():
        for shard in shards:
            file = data.draw(st.sampled_from(sorted(ends)))
            files.append((shard, file, ends[file], WIDTH))
            for index, at in enumerate(held(shard)):
                places[canonical[name][at]] = (file, ends[file] + WIDTH * index)
            ends[file] += WIDTH * shard.size
    tensors, faults = gather_shards(files)
    assert not faults
    catalog = Catalog(Path("here"), {MODEL_STATE: tensors})
    assert not list(catalog.faults())
    ranks: list[dict[str, Shard]] = []
    for name, shards in data.draw(laid_out(wanted)).items():
        for rank, shard in enumerate(shards):
            ranks += [{}] if rank == len(ranks) else []
            ranks[rank][name] = shard
    composed, canonical = stored.mapping().reversed().then(wanted.mapping()), elements(wanted)
    for shards_of_rank in ranks:
        plan = plan_reads(ReadSource(catalog, composed), {MODEL_STATE: shards_of_rank})
        assert not plan.report.lines
        assert list(plan.items) == sorted(plan.items, key=lambda item: (item.stored.file, item.stored.begin))
        for name, shard in shards_of_rank.items():
            items = [item for item in plan.items if item.name == name]
            assert planned(items, shard.size) == [places[canonical[name][at]] for at in held(shard)]


def test_numbers_that_are_kept_once_per_parameter_do_not_take_each_other_s_place() -> None:
    rule = Rule(("q", "k"), ("qk",), (2, 2), 0, (0,))
    specs = {"qk": TensorSpec((4,), "float32")}
    mapping = RuleSet(specs, (rule,)).mapping()
    one = whole((1,))
    suffix = ".beta1_pow_acc_0"
    files = [(Shard(name + suffix, "float32", (1,), one), "f", 4 * place, 4) for place, name in enumerate("qk")]
    tensors, _ = gather_shards(files)
    wanted = {OPTIMIZER_STATE: {"qk" + suffix: Shard("qk" + suffix, "float32", (1,), one)}}
    plan = plan_reads(ReadSource(Catalog(Path("here"), {OPTIMIZER_STATE: tensors}), mapping), wanted)
    assert [item.stored.begin for item in plan.items] == [0]
    assert [(check.left.begin, check.right.begin) for check in plan.checks] == [(0, 4)]
    assert math.prod(plan.items[0].part.shape) == 1
