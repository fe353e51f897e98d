"""Agreement: together with the proof it refuses every mutation that changes a number. The mutants are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from msgspec import structs

from paddleformers_fc.errors import MappingError
from paddleformers_fc.mapping import Rule, RuleSet, TensorMapping, TensorSpec, prove
from paddleformers_fc.mapping.boxes import Box
from paddleformers_fc.mapping.prove import disagreements, require_agreement
from tests.harness.sampling import thorough
from tests.mapping.numbers import moved, numbered
from tests.mapping.strategies import rule_sets, with_items

CAUGHT: Counter[str] = Counter()
BEYOND_THE_PROOF = {"swap", "wrong axis"}
"""Kinds of mutants that may leave every element with one source; the proof alone refuses the others."""


def refused(mutant: TensorMapping, declared: TensorMapping) -> str | None:
    """What refuses a mutant: its own proof, the comparison with the declaration, or nothing."""
    try:
        prove(mutant)
    except MappingError:
        return "proof"
    return "agreement" if list(disagreements(mutant, declared)) else None


def same_numbers(one: TensorMapping, other: TensorMapping) -> bool:
    """Whether two mappings move the same numbers to the same places, in the same dtypes."""
    casts = [{(item.target, item.cast) for item in mapping.correspondences} for mapping in (one, other)]
    if casts[0] != casts[1] or one.targets != other.targets:
        return False
    try:
        first, second = moved(one, numbered(one)), moved(other, numbered(one))
    except (IndexError, ValueError, KeyError):
        return False
    return all(np.array_equal(first[name], second[name]) for name in first)


def mutants(mapping: TensorMapping) -> Iterator[tuple[str, TensorMapping]]:
    """Every kind of mutation at eight correspondences of a mapping, or at all of them."""
    items = mapping.correspondences
    for index in range(0, len(items), -(-len(items) // 8)):
        item = items[index]
        others = [*items[:index], *items[index + 1 :]]

        def changed(**changes: object) -> TensorMapping:
            made = structs.replace(item, **changes)  # type: ignore[arg-type]  # noqa: B023
            return with_items(mapping, *others, made)  # noqa: B023

        yield "gap", with_items(mapping, *others)
        extra = structs.replace(item, source_box=shifted(item.source_box, 0, 1))
        yield "overlap", with_items(mapping, *items, extra)
        for axis in range(len(item.source_box.lo)):
            for by in (-1, 1):
                yield "shifted source", changed(source_box=shifted(item.source_box, axis, by))
        for axis in range(len(item.target_box.lo)):
            for by in (-1, 1):
                yield "shifted target", changed(target_box=shifted(item.target_box, axis, by))
        if item.axes != tuple(reversed(item.axes)):
            yield "wrong axis", changed(axes=tuple(reversed(item.axes)))
        yield "wrong dtype", changed(cast="bfloat16")
        for name in mapping.sources:
            if name != item.source:
                yield "wrong source", changed(source=name)
        for number, other in enumerate(others):
            swapped = list(others)
            swapped[number] = structs.replace(other, source=item.source, source_box=item.source_box)
            made = structs.replace(item, source=other.source, source_box=other.source_box)
            yield "swap", with_items(mapping, *swapped, made)


def shifted(box: Box, axis: int, by: int) -> Box:
    lo, hi = list(box.lo), list(box.hi)
    lo[axis] += by
    hi[axis] += by
    return Box(tuple(lo), tuple(hi))


@thorough(45)
@given(rule_sets())
def refuse_every_mutant(rules: RuleSet) -> None:
    declared = rules.mapping()
    prove(declared)
    assert not list(disagreements(declared, declared))
    for kind, mutant in mutants(declared):
        if same_numbers(declared, mutant):
            continue
        by = refused(mutant, declared)
        assert by is not None, (kind, mutant)
        CAUGHT[f"{kind}, by {by}"] += 1


def test_every_mutant_that_changes_a_number_is_refused() -> None:
    refuse_every_mutant()
    assert {kind.partition(",")[0] for kind in CAUGHT if kind.endswith("by agreement")} <= BEYOND_THE_PROOF
    kinds = {kind.partition(",")[0] for kind in CAUGHT}
    assert kinds >= {"gap", "overlap", "shifted source", "shifted target", "swap", "wrong axis", "wrong dtype"}
    assert any(kind.endswith("by agreement") for kind in CAUGHT)


def fused(groups: int) -> TensorMapping:
    rule = Rule(("q", "k", "v"), ("qkv",), (16, 8, 8), 1, (1, 0), target_blocks=groups)
    return RuleSet({"qkv": TensorSpec((6, 32), "float32")}, (rule,)).mapping()


def test_a_wrong_head_count_is_refused_though_it_can_be_proved() -> None:
    prove(fused(4))
    with pytest.raises(MappingError, match="declared from q"):
        require_agreement(fused(4), fused(2), "The mapping", "Read it elsewhere.")


def test_the_same_mapping_in_other_pieces_agrees() -> None:
    whole = RuleSet({"w": TensorSpec((4, 6), "float32")}, (Rule(("w",), ("w",), (6,), 1, (0, 1)),)).mapping()
    (item,) = whole.correspondences
    rows = [Box((at, 0), (at + 1, 6)) for at in range(4)]
    cut = with_items(whole, *(structs.replace(item, source_box=row, target_box=row) for row in rows))
    assert not list(disagreements(cut, whole))
    assert not list(disagreements(whole, cut))
