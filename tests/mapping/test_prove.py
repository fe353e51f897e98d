"""The proof: whatever would change a number is refused."""

from __future__ import annotations

import pytest
from msgspec import structs

from paddleformers_fc.errors import MappingError
from paddleformers_fc.mapping import Rule, RuleSet, TensorMapping, TensorSpec, prove
from paddleformers_fc.mapping.boxes import Box
from tests.mapping.strategies import with_items

RULE = Rule(("a", "b"), ("c",), (2, 5), 0, (0, 1))


def proved(rule: Rule = RULE) -> TensorMapping:
    mapping = RuleSet({"c": TensorSpec((7, 3), "float32")}, (rule,)).mapping()
    prove(mapping)
    return mapping


def test_a_gap_is_named_with_its_box() -> None:
    mapping = proved()
    with pytest.raises(MappingError, match=r"c: \[2:7, 0:3\] is not written"):
        prove(with_items(mapping, mapping.correspondences[0]))


def test_two_writers_are_named() -> None:
    mapping = proved()
    first, second = mapping.correspondences
    moved_up = structs.replace(second, target_box=Box((1, 0), (6, 3)))
    with pytest.raises(MappingError, match=r"c: \[1:2, 0:3\] is written more than once"):
        prove(with_items(mapping, first, moved_up))


def test_a_source_that_nothing_reads_is_named() -> None:
    mapping = proved()
    extra = structs.replace(mapping, sources={**mapping.sources, "z": TensorSpec((1,), "float32")})
    with pytest.raises(MappingError, match=r"z: \[0:1\] is not read"):
        prove(extra)


def test_a_dropped_source_and_a_fresh_target_are_declared() -> None:
    mapping = proved()
    prove(
        structs.replace(
            mapping,
            sources={**mapping.sources, "z": TensorSpec((1,), "float32")},
            targets={**mapping.targets, "y": TensorSpec((1,), "float32")},
            dropped=frozenset({"z"}),
            fresh=frozenset({"y"}),
        )
    )


def test_a_dtype_that_changes_without_a_cast_is_refused() -> None:
    mapping = proved()
    sources = {**mapping.sources, "a": TensorSpec((2, 3), "bfloat16")}
    with pytest.raises(MappingError, match="c: is float32, its source a is bfloat16, no cast is declared"):
        prove(structs.replace(mapping, sources=sources))


def test_a_box_outside_its_tensor_is_refused() -> None:
    mapping = proved()
    first, second = mapping.correspondences
    with pytest.raises(MappingError, match="outside shape"):
        prove(with_items(mapping, first, structs.replace(second, source_box=Box((1, 0), (6, 3)))))


def test_all_faults_come_in_one_report_with_indices_folded() -> None:
    targets = {f"model.layers.{i}.w.weight": TensorSpec((2,), "float32") for i in range(32)}
    with pytest.raises(MappingError) as caught:
        prove(TensorMapping({}, targets, {}))
    assert caught.value.evidence == ("model.layers.{0...31}.w.weight: [0:2] is not written",)
