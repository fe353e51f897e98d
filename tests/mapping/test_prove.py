"""The proof: whatever would change a number is refused."""

from __future__ import annotations

import pytest
from msgspec import structs

from paddleformers_fc.errors import MappingError
from paddleformers_fc.mapping import Rule, RuleSet, TensorMapping, TensorSpec, prove
from paddleformers_fc.mapping.boxes import Box
from tests.mapping.strategies import with_items

MAPPING = RuleSet({"c": TensorSpec((7, 3), "float32")}, (Rule(("a", "b"), ("c",), (2, 5), 0, (0, 1)),)).mapping()
FIRST, SECOND = MAPPING.correspondences
UP = structs.replace(SECOND, target_box=Box((1, 0), (6, 3)))
OUTSIDE = structs.replace(SECOND, source_box=Box((1, 0), (6, 3)))
EXTRA = {**MAPPING.sources, "z": TensorSpec((1,), "float32")}
OTHER_DTYPE = {**MAPPING.sources, "a": TensorSpec((2, 3), "bfloat16")}


@pytest.mark.parametrize(
    ("mapping", "fault"),
    [
        (with_items(MAPPING, FIRST), r"c: \[2:7, 0:3\] is not written"),
        (with_items(MAPPING, FIRST, UP), r"c: \[1:2, 0:3\] is written more than once"),
        (with_items(MAPPING, FIRST, OUTSIDE), "outside shape"),
        (structs.replace(MAPPING, sources=EXTRA), r"z: \[0:1\] is not read"),
        (structs.replace(MAPPING, sources=OTHER_DTYPE), "c: is float32, its source a is bfloat16, no cast is declared"),
        (with_items(MAPPING, FIRST, structs.replace(SECOND, cast="bfloat16")), "the declared cast gives bfloat16"),
        (structs.replace(MAPPING, sources={"b": MAPPING.sources["b"]}), "a: is read and not a tensor of the source"),
        (structs.replace(MAPPING, targets={}), "c: is written and not a tensor of the target space"),
        (with_items(MAPPING, FIRST, structs.replace(SECOND, axes=(0, 0))), r"axes \[0, 0\] do not permute"),
        (with_items(MAPPING, FIRST, structs.replace(SECOND, axes=(1, 0))), r"does not have the shape of b"),
    ],
    ids=[
        *("a gap", "two writers", "a box outside its tensor", "a source that nothing reads", "another dtype"),
        *("another cast", "an unknown source", "an unknown target", "an axis twice", "other axes"),
    ],
)
def test_a_mapping_that_would_change_a_number_is_refused_and_its_fault_named(
    mapping: TensorMapping, fault: str
) -> None:
    with pytest.raises(MappingError, match=fault):
        prove(mapping)


def test_dropped_sources_and_uninitialized_targets_are_declared() -> None:
    targets = {**MAPPING.targets, "y": TensorSpec((1,), "float32")}
    declared = {"dropped": frozenset({"z"}), "fresh": frozenset({"y"})}
    prove(structs.replace(MAPPING, sources=EXTRA, targets=targets, **declared))


def test_all_faults_come_in_one_report_with_indices_folded() -> None:
    targets = {f"model.layers.{i}.w.weight": TensorSpec((2,), "float32") for i in range(32)}
    with pytest.raises(MappingError) as caught:
        prove(TensorMapping({}, targets, {}))
    assert caught.value.evidence == ("model.layers.{0...31}.w.weight: [0:2] is not written",)
