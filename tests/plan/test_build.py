"""Planning: exact ranges, full coverage, and one report of everything that does not fit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddleformers_fc.errors import MappingError, MismatchError
from paddleformers_fc.families import ModelDescription
from paddleformers_fc.formats import OpenedCheckpoint
from paddleformers_fc.formats.catalog import Catalog, StoredFragment, StoredTensor, gather_shards
from paddleformers_fc.formats.checkpoint import StoredModel
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping import Rule, RuleSet, TensorMapping, TensorSpec
from paddleformers_fc.mapping.boxes import shifted, whole
from paddleformers_fc.plan.build import ReadSource, plan_reads
from paddleformers_fc.plan.items import LoadPlan
from paddleformers_fc.plan.report import Report
from paddleformers_fc.plan.sources import huggingface_source, resume_source, stored_mapping
from paddleformers_fc.storage.manifest import Manifest
from tests.mapping.numbers import numbered
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


def plan_of(catalog: Catalog, mapping: TensorMapping, shard: Shard, role: str = "model_state") -> LoadPlan:
    return plan_reads(ReadSource(catalog, mapping), {role: {shard.name: shard}})


def reported(report: Report) -> dict[str, set[str]]:
    """The lines of a report by kind, without the kinds that have none."""
    return {kind: report.of(kind) for kind, _ in report.lines}


def test_everything_that_does_not_fit_is_in_one_report(tmp_path: Path) -> None:
    rules = as_stored(*(f"layers.{i}.w" for i in range(4)))
    arrays = {
        "layers.0.w": np.zeros((4, 2), np.float32),
        "layers.1.w": np.zeros((6, 2), np.float32),
        "layers.2.w": np.zeros((4, 2), np.float16),
    }
    wanted = {name: Shard(name, "float32", (4, 2), whole((4, 2))) for name in rules.targets}
    plan = plan_reads(ReadSource(stored(tmp_path, arrays, 1), rules.mapping()), {"model_state": wanted})
    with pytest.raises(MismatchError) as caught:
        plan.report.raise_error("here")
    text = str(caught.value)
    assert "MISSING" in text
    assert "layers.3.w" in text
    assert "layers.1.w: stored [6, 2], expected [4, 2]" in text
    assert "layers.2.w: stored float16, expected float32" in text


def test_missing_states_of_many_layers_are_one_line(tmp_path: Path) -> None:
    rules = as_stored(*(f"layers.{i}.w" for i in range(4)))
    catalog = stored(tmp_path, {name: np.zeros((4, 2), np.float32) for name in rules.targets}, 1)
    states = [f"{name}.{state}_0" for name in rules.targets for state in ("moment1", "moment2")]
    wanted = {name: Shard(name, "float32", (4, 2), whole((4, 2))) for name in states}
    report = plan_reads(ReadSource(catalog, rules.mapping()), {"optimizer_state": wanted}).report
    assert report.evidence()[1:] == ["  layers.{0...3}.w (moment1_0, moment2_0)"]


def test_a_tensor_that_nothing_is_mapped_to_is_missing(tmp_path: Path) -> None:
    catalog = stored(tmp_path, {"q": np.zeros((8, 6), np.float32)}, 1)
    plan = plan_of(catalog, RuleSet({}, ()).mapping(), Shard("q", "float32", (8, 6), whole((8, 6))))
    assert reported(plan.report) == {"missing": {"q"}}


def test_a_hole_in_what_is_stored_is_found_before_anything_is_read(tmp_path: Path) -> None:
    catalog = stored(tmp_path, {"q": np.zeros((8, 6), np.float32)}, 2)
    tensor = catalog.roles["model_state"]["q"]
    holed = stored_tensor("q", "float32", (8, 6), tensor.fragments[:1])
    assert list(holed.faults()) == ["q: [4:8, 0:6] is not stored"]
    rules = RuleSet({"w": TensorSpec((6, 8), "float32")}, (Rule(("q",), ("w",), (8,), 1, (1, 0)),))
    shard = Shard("w", "float32", (6, 8), whole((6, 8)))
    plan = plan_of(Catalog(tmp_path, {"model_state": {"q": holed}}), rules.mapping(), shard)
    assert "w: [0:6, 4:8] of [0:6, 0:8] is not written" in plan.report.of("coverage")


def test_a_hole_is_reported_under_every_name_that_it_is_met_under(tmp_path: Path) -> None:
    halves = [(Shard(name, "float32", (8, 6), whole((4, 6))), "file", at, 4) for at, name in enumerate("kq")]
    catalog = Catalog(tmp_path, {"model_state": gather_shards(halves)[0]})
    specs = {name: TensorSpec((8, 6), "float32") for name in "kq"}
    mapping = RuleSet(specs, tuple(Rule((name,), (name,), (6,), 1, (0, 1)) for name in specs)).mapping()
    wanted = {name: Shard(name, "float32", (8, 6), whole((8, 6))) for name in specs}
    plan = plan_reads(ReadSource(catalog, mapping), {"model_state": wanted})
    assert plan.report.of("coverage") == {f"{name}: [4:8, 0:6] of [0:8, 0:6] is not written" for name in "kq"}


def test_a_cast_never_reaches_a_master_weight(tmp_path: Path) -> None:
    rule = Rule(("w",), ("w",), (2,), 1, (0, 1), cast="bfloat16")
    mapping = RuleSet({"w": TensorSpec((4, 2), "bfloat16")}, (rule,)).mapping({"w": "float32"})
    catalog = stored(tmp_path, {"w.w_0": np.zeros((4, 2), np.float32)}, 1)
    masters = Catalog(tmp_path, {"master_weight": catalog.roles["model_state"]})
    wanted = Shard("w.w_0", "bfloat16", (4, 2), whole((4, 2)))
    plan = plan_of(masters, mapping, wanted, "master_weight")
    assert plan.report.of("dtype") == {"w.w_0: stored float32, expected bfloat16"}
    master = masters.roles["master_weight"]["w.w_0"]
    weight = StoredTensor("w", master.form, (("weights", 0),))
    both = Catalog(tmp_path, {"model_state": {"w": weight}, **masters.roles})
    shards = {"model_state": {"w": Shard("w", "bfloat16", (4, 2), whole((4, 2)))}, "master_weight": {"w.w_0": wanted}}
    plan = plan_reads(ReadSource(both, mapping), shards)
    assert reported(plan.report) == {"dtype": {"w.w_0: stored float32, expected bfloat16"}}


def test_an_alias_that_is_stored_too_must_equal_its_owner(tmp_path: Path) -> None:
    array = np.arange(8, dtype=np.float32).reshape(4, 2)
    catalog = stored(tmp_path, {"embed": array, "head": array}, 2)
    rules = as_stored("embed")
    source = ReadSource(catalog, rules.mapping(), stored_aliases={"head": "embed"})
    plan = plan_reads(source, {"model_state": {"embed": Shard("embed", "float32", (4, 2), whole((4, 2)))}})
    assert len(plan.checks) == 2
    assert plan.touched == {"model_state": frozenset({"embed", "head"})}


@pytest.mark.parametrize("copy", [np.zeros((4, 2), np.float16), np.zeros((2, 4), np.float32)], ids=["dtype", "shape"])
def test_an_alias_of_another_form_than_its_owner_is_reported(tmp_path: Path, copy: np.ndarray[Any, Any]) -> None:
    catalog = stored(tmp_path, {"embed": np.zeros((4, 2), np.float32), "head": copy}, 1)
    rules = as_stored("embed")
    source = ReadSource(catalog, rules.mapping(), stored_aliases={"head": "embed"})
    plan = plan_reads(source, {"model_state": {"embed": Shard("embed", "float32", (4, 2), whole((4, 2)))}})
    assert reported(plan.report) == {"unequal": {f"head: {copy.dtype} {list(copy.shape)} is not embed's form"}}


def test_open_weights_of_another_shape_are_reported_by_the_names_in_their_files(tmp_path: Path) -> None:
    arrays = {name: array.astype(np.float32) for name, array in numbered(FUSED.mapping()).items()}
    _, report = huggingface_source(stored(tmp_path, {**arrays, "k": arrays["k"][:3]}, 1), FUSED)
    assert reported(report) == {"shape": {"k: stored [3, 6], expected [4, 6]"}}


ACORN = ModelDescription({"model_type": "acorn"})


def acorn(rules: RuleSet) -> OpenedCheckpoint:
    """A checkpoint without tensors, of a model whose family is not known here."""
    manifest = Manifest(written_by="", step=1, consumed_samples=1, world_size=1, parallel={}, family="acorn", files=[])
    return opened(Catalog(Path("none"), {}), manifest, StoredModel(rules, ACORN), {"model_type": "acorn"})


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
def test_a_tensor_without_a_canonical_form_is_taken_over_whole_or_refused(shape: tuple[int, ...]) -> None:
    def model(of: tuple[int, ...]) -> RuleSet:
        return RuleSet({"table": TensorSpec(of, "float32")}, (), fresh=("table",))

    tensor = stored_tensor("table", "float32", (8,), [StoredFragment("file", 0, whole((8,)))])
    manifest = Manifest(written_by="", step=1, consumed_samples=1, world_size=1, parallel={}, family="acorn", files=[])
    catalog = Catalog(Path("none"), {"model_state": {"table": tensor}})
    checkpoint = opened(catalog, manifest, StoredModel(model((8,)), ACORN), {"model_type": "acorn"})
    for wanted in ((8,), shape):
        source, report = resume_source(checkpoint, model(wanted))
        plan = plan_reads(source, {"model_state": {"table": Shard("table", "float32", wanted, whole(wanted))}})
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
    made = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in "12"
    ]
    assert made[0] == made[1]
