"""The proof: whatever would change a number is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from paddleformers_fc.errors import MappingError
from paddleformers_fc.mapping import Mapping, Rule, RuleSet, TensorSpec, prove
from paddleformers_fc.mapping.boxes import Box
from tests.mapping.numbers import moved, numbered
from tests.mapping.strategies import rule_sets, with_items

RULE = Rule(("a", "b"), ("c",), (2, 5), 0, (0, 1))


def proved(rule: Rule = RULE) -> Mapping:
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
    moved_up = dataclasses.replace(second, target_box=Box((1, 0), (6, 3)))
    with pytest.raises(MappingError, match=r"c: \[1:2, 0:3\] is written more than once"):
        prove(with_items(mapping, first, moved_up))


def test_a_source_that_nothing_reads_is_named() -> None:
    mapping = proved()
    extra = dataclasses.replace(mapping, sources={**mapping.sources, "z": TensorSpec((1,), "float32")})
    with pytest.raises(MappingError, match=r"z: \[0:1\] is not read"):
        prove(extra)


def test_a_dropped_source_and_a_fresh_target_are_declared() -> None:
    mapping = proved()
    prove(
        dataclasses.replace(
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
        prove(dataclasses.replace(mapping, sources=sources))


def test_a_box_outside_its_tensor_is_refused() -> None:
    mapping = proved()
    first, second = mapping.correspondences
    with pytest.raises(MappingError, match="outside shape"):
        prove(with_items(mapping, first, dataclasses.replace(second, source_box=Box((1, 0), (6, 3)))))


def test_all_faults_come_in_one_report_with_indices_folded() -> None:
    targets = {f"model.layers.{i}.w.weight": TensorSpec((2,), "float32") for i in range(32)}
    with pytest.raises(MappingError) as caught:
        prove(Mapping({}, targets, {}))
    assert caught.value.evidence == ("model.layers.{0...31}.w.weight: [0:2] is not written",)


@settings(max_examples=200)
@given(rule_sets(), st.data())
def test_every_mutation_that_changes_a_number_is_refused(rules: RuleSet, data: st.DataObject) -> None:
    mapping = rules.mapping()
    index = data.draw(st.integers(0, len(mapping.correspondences) - 1))
    mutant = data.draw(st.sampled_from([drop, shift_source, shift_target, shrink, rename, turn, recast]))
    changed = mutant(mapping, index)
    assume(changed is not None)
    if same_numbers(mapping, changed):
        return
    with pytest.raises(MappingError):
        prove(changed)


def same_numbers(one: Mapping, other: Mapping) -> bool:
    """Whether a mutant moves the same numbers after all, and in the same dtypes."""
    if any(item.cast for item in other.correspondences):
        return False
    try:
        first, second = moved(one, numbered(one)), moved(other, numbered(one))
    except (IndexError, ValueError, KeyError):
        return False
    return all(np.array_equal(first[name], second[name]) for name in first)


def replaced(mapping: Mapping, index: int, **changes: object) -> Mapping:
    items = list(mapping.correspondences)
    items[index] = dataclasses.replace(items[index], **changes)  # type: ignore[arg-type]
    return with_items(mapping, *items)


def drop(mapping: Mapping, index: int) -> Mapping:
    items = list(mapping.correspondences)
    del items[index]
    return with_items(mapping, *items)


def _shifted(box: Box, by: int) -> Box:
    return Box((box.lo[0] + by, *box.lo[1:]), (box.hi[0] + by, *box.hi[1:]))


def shift_source(mapping: Mapping, index: int) -> Mapping:
    return replaced(mapping, index, source_box=_shifted(mapping.correspondences[index].source_box, 1))


def shift_target(mapping: Mapping, index: int) -> Mapping:
    return replaced(mapping, index, target_box=_shifted(mapping.correspondences[index].target_box, -1))


def shrink(mapping: Mapping, index: int) -> Mapping:
    item = mapping.correspondences[index]
    axis = next(i for i, source in enumerate(item.axes) if source != -1)
    source_axis = item.axes[axis]
    target_hi, source_hi = list(item.target_box.hi), list(item.source_box.hi)
    target_hi[axis] -= 1
    source_hi[source_axis] -= 1
    return replaced(
        mapping,
        index,
        target_box=Box(item.target_box.lo, tuple(target_hi)),
        source_box=Box(item.source_box.lo, tuple(source_hi)),
    )


def rename(mapping: Mapping, index: int) -> Mapping | None:
    others = [name for name in mapping.sources if name != mapping.correspondences[index].source]
    return replaced(mapping, index, source=others[0]) if others else None


def turn(mapping: Mapping, index: int) -> Mapping | None:
    """Other axes for boxes that still agree in shape: a swap that only the *composition* of shapes could not see."""
    item = mapping.correspondences[index]
    axes = tuple(reversed(item.axes))
    source = item.source_box.shape
    if axes == item.axes or tuple(source[axis] for axis in axes) == item.target_box.shape:
        return None
    return replaced(mapping, index, axes=axes)


def recast(mapping: Mapping, index: int) -> Mapping:
    return replaced(mapping, index, cast="bfloat16")
