"""Planning: exact ranges, full coverage, and one report of everything that does not fit."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, strategies as st

from paddleformers_fc.errors import MappingError, MismatchError
from paddleformers_fc.families import ModelDescription
from paddleformers_fc.formats import OpenedCheckpoint
from paddleformers_fc.formats.catalog import Catalog, StoredFragment, StoredTensor, gather_shards
from paddleformers_fc.formats.checkpoint import StoredModel
from paddleformers_fc.layout.roles import MODEL_STATE, OPTIMIZER_STATE
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping import Correspondence, Rule, RuleSet, Shape, TensorSpec
from paddleformers_fc.mapping.boxes import Box, shifted, whole
from paddleformers_fc.mapping.rules import Slab
from paddleformers_fc.plan.build import ReadSource, plan_reads
from paddleformers_fc.plan.items import LoadPlan, ReadItem
from paddleformers_fc.plan.report import Report
from paddleformers_fc.plan.sources import resume_source, stored_mapping
from paddleformers_fc.storage.manifest import Manifest
from tests.cli.test_main import python
from tests.harness.sampling import thorough
from tests.plan.stored import opened, stored_tensor

FUSED = RuleSet(
    {"qkv": TensorSpec((6, 16), "float32")}, (Rule(("q", "k", "v"), ("qkv",), (8, 4, 4), 1, (1, 0), target_blocks=2),)
)


def stored(root: Path, arrays: dict[str, np.ndarray[Any, Any]], pieces: int) -> Catalog:
    """A catalog of arrays cut into row blocks, each block in a file of its own."""
    tensors = {}
    for name, array in arrays.items():
        fragments = []
        for index, rows in enumerate(np.array_split(np.arange(array.shape[0]), pieces)):
            if not rows.size:
                continue
            part = np.ascontiguousarray(array[rows[0] : rows[-1] + 1])
            file = f"{name}.{index}"
            (root / file).write_bytes(b"head" + part.tobytes())
            offset = (int(rows[0]),) + (0,) * (array.ndim - 1)
            fragments.append(StoredFragment(file, 4, shifted(part.shape, offset)))
        tensors[name] = stored_tensor(name, str(array.dtype), array.shape, fragments)
    return Catalog(root, {"model_state": tensors})


def as_stored(*names: str) -> RuleSet:
    """Matrices of 4 by 2 that a model has as they are stored."""
    specs = {name: TensorSpec((4, 2), "float32") for name in names}
    return RuleSet(specs, tuple(Rule((name,), (name,), (2,), 1, (0, 1)) for name in names))


def full(name: str, *shape: int, dtype: str = "float32") -> Shard:
    return Shard(name, dtype, shape, whole(shape))


def plan_of(catalog: Catalog, rules: RuleSet, *shards: Shard, role: str = "model_state", **options: Any) -> LoadPlan:
    return plan_reads(ReadSource(catalog, rules.mapping(), **options), {role: {shard.name: shard for shard in shards}})


def reported(report: Report) -> dict[str, set[str]]:
    """The lines of a report by kind, without the kinds that have none."""
    return {kind: report.of(kind) for kind, _ in report.lines}


def test_everything_that_does_not_fit_is_in_one_report(tmp_path: Path) -> None:
    rules = as_stored("other", *(f"layers.{i}.w" for i in range(4)))
    shapes = {"layers.0.w": (4, np.float32), "layers.1.w": (6, np.float32), "layers.2.w": (4, np.float16)}
    shapes["other"] = (4, np.float32)
    arrays = {name: np.zeros((rows, 2), dtype) for name, (rows, dtype) in shapes.items()}
    wanted = {**{name: full(name, 4, 2) for name in rules.targets}, "other": full("other", 5, 2)}
    plan = plan_of(stored(tmp_path, arrays, 1), rules, *wanted.values())
    with pytest.raises(MismatchError) as caught:
        plan.report.raise_error("here")
    text = str(caught.value)
    assert "MISSING" in text
    assert "layers.3.w" in text
    assert "layers.1.w: stored [6, 2], expected [4, 2]" in text
    assert "layers.2.w: stored float16, expected float32" in text
    assert "other: mapped [4, 2], expected [5, 2]" in text


def test_a_tensor_that_nothing_is_mapped_to_is_missing(tmp_path: Path) -> None:
    catalog = stored(tmp_path, {"q": np.zeros((8, 6), np.float32)}, 1)
    assert reported(plan_of(catalog, RuleSet({}, ()), full("q", 8, 6)).report) == {"missing": {"q"}}


def test_a_hole_is_reported_under_every_name_that_it_is_met_under(tmp_path: Path) -> None:
    halves = [(Shard(name, "float32", (8, 6), whole((4, 6))), "file", at, 4) for at, name in enumerate("kq")]
    catalog = Catalog(tmp_path, {"model_state": gather_shards(halves)[0]})
    specs = {name: TensorSpec((8, 6), "float32") for name in "kq"}
    rules = RuleSet(specs, tuple(Rule((name,), (name,), (6,), 1, (0, 1)) for name in specs))
    plan = plan_of(catalog, rules, *(full(name, 8, 6) for name in specs))
    assert plan.report.of("coverage") == {f"{name}: [4:8, 0:6] of [0:8, 0:6] is not written" for name in "kq"}


def test_a_cast_never_reaches_a_master_weight(tmp_path: Path) -> None:
    rule = Rule(("w",), ("w",), (2,), 1, (0, 1), cast="bfloat16")
    mapping = RuleSet({"w": TensorSpec((4, 2), "bfloat16")}, (rule,)).mapping({"w": "float32"})
    catalog = stored(tmp_path, {"w.w_0": np.zeros((4, 2), np.float32)}, 1)
    master = catalog.roles["model_state"]["w.w_0"]
    roles = {
        "model_state": {"w": StoredTensor("w", master.form, (("weights", 0),))},
        "master_weight": {"w.w_0": master},
    }
    wanted = {"model_state": {"w": full("w", 4, 2, dtype="bfloat16")}}
    wanted["master_weight"] = {"w.w_0": full("w.w_0", 4, 2, dtype="bfloat16")}
    for held in (["master_weight"], ["model_state", "master_weight"]):
        source = ReadSource(Catalog(tmp_path, {role: roles[role] for role in held}), mapping)
        plan = plan_reads(source, {role: wanted[role] for role in held})
        assert reported(plan.report) == {"dtype": {"w.w_0: stored float32, expected bfloat16"}}


@pytest.mark.parametrize(
    "copy",
    [np.ones((4, 2), np.float32), np.zeros((4, 2), np.float16), np.zeros((2, 4), np.float32)],
    ids=["the same", "dtype", "shape"],
)
def test_an_alias_that_is_stored_too_has_the_form_of_its_owner_and_is_compared(
    tmp_path: Path, copy: np.ndarray[Any, Any]
) -> None:
    catalog = stored(tmp_path, {"embed": np.ones((4, 2), np.float32), "head": copy}, 2)
    plan = plan_of(catalog, as_stored("embed"), full("embed", 4, 2), stored_aliases={"head": "embed"})
    if copy.all():
        assert len(plan.checks) == 2
        assert plan.touched == {"model_state": frozenset({"embed", "head"})}
    else:
        assert reported(plan.report) == {"unequal": {f"head: {copy.dtype} {list(copy.shape)} is not embed's form"}}


def acorn(rules: RuleSet, **stored: StoredTensor) -> OpenedCheckpoint:
    """A checkpoint of a model whose family is not known here."""
    described = ModelDescription({"model_type": "acorn"})
    manifest = Manifest(written_by="", step=1, consumed_samples=1, world_size=1, parallel={}, family="acorn", files=[])
    catalog = Catalog(Path("none"), {"model_state": stored} if stored else {})
    return opened(catalog, manifest, StoredModel(rules, described), dict(described.config))


def test_the_mapping_of_a_checkpoint_is_proved_where_its_family_is_not_known() -> None:
    assert stored_mapping(acorn(FUSED)).targets == FUSED.targets
    hole = RuleSet({**FUSED.targets, "bias": TensorSpec((6,), "float32")}, FUSED.rules)
    with pytest.raises(MappingError, match="The checkpoint's mapping"):
        stored_mapping(acorn(hole))


def test_trouble_with_dtypes_alone_is_answered_with_the_options_that_set_them() -> None:
    report = Report()
    report.add("dtype", "w: stored float32, expected bfloat16")
    report.add("missing", "w.w_0")
    with pytest.raises(MismatchError) as caught:
        report.raise_error("checkpoint-3")
    assert "compute_type" in caught.value.next_step
    report.add("missing", "v")
    with pytest.raises(MismatchError) as caught:
        report.raise_error("checkpoint-3")
    assert "compute_type" not in caught.value.next_step


@pytest.mark.parametrize("shape", [(6,), (10,), (8, 1)])
def test_a_tensor_without_a_canonical_form_is_loaded_completely_or_rejected(shape: tuple[int, ...]) -> None:
    def model(of: tuple[int, ...]) -> RuleSet:
        return RuleSet({"table": TensorSpec(of, "float32")}, (), fresh=("table",))

    tensor = stored_tensor("table", "float32", (8,), [StoredFragment("file", 0, whole((8,)))])
    checkpoint = acorn(model((8,)), table=tensor)
    for wanted in ((8,), shape):
        source, report = resume_source(checkpoint, model(wanted))
        plan = plan_reads(source, {"model_state": {"table": full("table", *wanted)}})
        if wanted == (8,):
            assert not report.lines
            assert len(plan.items) == 1
        else:
            assert report.of("shape") == {f"table: stored [8], expected {list(shape)}"}


def test_a_report_is_the_same_message_in_every_process() -> None:
    code = (
        "import msgspec; from paddleformers_fc.plan.report import Report\n"
        "report = Report()\n"
        "for number in range(50): report.add('missing', f'layers.{number}')\n"
        "print(msgspec.msgpack.encode(report.to_wire()).hex())"
    )
    assert len({python("-c", code, PYTHONHASHSEED=seed).stdout for seed in "12"}) == 1


# ---- Any plan, against looking up every element, whatever was planned before.


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

    def plan_for(dtype: str, shape: Shape) -> LoadPlan:
        wanted = {OPTIMIZER_STATE: {"qk" + suffix: Shard("qk" + suffix, dtype, shape, whole(shape))}}
        return plan_reads(ReadSource(Catalog(Path("here"), {OPTIMIZER_STATE: tensors}), mapping), wanted)

    plan = plan_for("float32", (1,))
    assert [item.stored.begin for item in plan.items] == [0]
    assert [(check.left.begin, check.right.begin) for check in plan.checks] == [(0, 4)]
    assert math.prod(plan.items[0].part.shape) == 1
    assert reported(plan.report) == {}
    name = f"qk{suffix}"
    assert reported(plan_for("int64", (1,)).report) == {"dtype": {f"{name}: stored float32, expected int64"}}
    assert reported(plan_for("float32", (1, 1)).report) == {"shape": {f"{name}: stored [1], expected [1, 1]"}}
