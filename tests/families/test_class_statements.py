"""Rules from the statements of a class, against those of the declared family."""

from __future__ import annotations

from typing import Any

import pytest

from paddleformers_fc.aoa import AoaTensor, Program, read_config
from paddleformers_fc.errors import MappingError
from paddleformers_fc.families import Family, bind
from paddleformers_fc.families.class_statements import rules_of_statements
from paddleformers_fc.mapping import Rule, RuleSet, Tie, prove
from paddleformers_fc.mapping.prove import disagreements
from tests.families import native
from tests.families.spaces import BY_NAME, model_of, tensors
from tests.families.test_native import AGREE, ALL_SPARSE, FLEET, PLAIN, TIED, config_of

Changes = dict[str, Any]
# A missing comma joins two statements of the others; Paddle's engine reads on.
BOTH = [case for case in AGREE if case[0] != "deepseek_v4" and "fd_fallback" not in case[1]]
FORWARD: list[tuple[str, Changes]] = [("llama", TIED), ("qwen2_moe", PLAIN)]


def of_class(name: str, config: Changes, tp: int, inverse: bool = True) -> tuple[RuleSet, RuleSet]:
    """The rules of a class's own statements, and those of its declared family."""
    family: Family = BY_NAME[name]
    fleet = bool(config.get("is_fleet", name in ("kimi_k2", "minimax_m2")))
    model = tensors(family, config, tp)
    forward, back = (
        read_config({"aoa_statements": native.statements(name, config, inverse=way, fleet=fleet)})
        for way in (False, True)
    )
    described = {one.name: AoaTensor(one.shape, one.dtype, one.cuts) for one in model}
    rules = rules_of_statements(described, forward, back if inverse else None, bool(config.get("tie_word_embeddings")))
    return rules, bind(family, model_of(config), model)


def agree(own: RuleSet, declared: RuleSet) -> None:
    prove(own.mapping())
    prove(own.mapping().reversed())
    assert list(disagreements(own.mapping(), declared.mapping())) == []
    assert (own.ties, set(own.fresh)) == (declared.ties, set(declared.fresh))


@pytest.mark.parametrize(("name", "changes"), BOTH, ids=str)
def test_both_directions_give_the_rules_of_the_declared_family(name: str, changes: Changes) -> None:
    for tp in (1, 2):
        agree(*of_class(name, config_of(name, changes), tp))


@pytest.mark.parametrize(("name", "changes"), FORWARD, ids=str)
def test_forward_statements_alone_are_inverted(name: str, changes: Changes) -> None:
    agree(*of_class(name, config_of(name, changes), 2, inverse=False))


REFUSED: list[tuple[str, Changes, bool, str]] = [
    # The export splits in two halves what the load has fused per rank.
    ("kimi_k2", {}, True, "do not undo each other"),
    # A missing comma joins two statements.
    ("deepseek_v4", {}, True, "Invalid AOA statements"),
    # The export leaves query, key and value fused.
    ("qwen3_next", {}, True, "q_proj.weight` matches no tensor of the left side"),
    # Names of experts exist in neither space.
    ("qwen3_moe", {**FLEET, **ALL_SPARSE, "moe_expert_fusion": True}, False, "matches no tensor of the left side"),
]


@pytest.mark.parametrize(("name", "changes", "both", "reason"), REFUSED, ids=str)
def test_statements_that_are_wrong_are_refused_with_the_reason(
    name: str, changes: Changes, both: bool, reason: str
) -> None:
    with pytest.raises(MappingError) as caught:
        of_class(name, config_of(name, changes), 2, both)
    assert reason in caught.value.render()


def made(*statements: str, inverse: tuple[str, ...] | None = None, tied: bool = False, **shapes: Any) -> RuleSet:
    """The rules of some statements; ``a_b`` in the name of a shape is the tensor ``a.b``."""
    described = {
        name.replace("_", "."): AoaTensor(shape, "bfloat16", (1, 2)[: len(shape)]) for name, shape in shapes.items()
    }
    back = None if inverse is None else read_config({"aoa_statements": list(inverse)})
    return rules_of_statements(described, read_config({"aoa_statements": list(statements)}), back, tied)


def test_parts_of_one_file_tensor_are_one_rule_that_is_read_backwards() -> None:
    rules = made("f.ab -> p, s, axis=1", "p^T -> m.a", "s^T -> m.b", m_a=(4, 6), m_b=(4, 6))
    assert rules.rules == (Rule(("f.ab",), ("m.a", "m.b"), (4, 4), 0, (1, 0)),)
    assert rules.mapping().sources["f.ab"].shape == (6, 8)
    assert rules.mapping().sources["f.ab"].dtype == "bfloat16"
    (box,) = rules.mapping().by_target["m.b"]
    assert (box.source_box.lo, box.source_box.hi, box.axes) == ((0, 4), (6, 8), (1, 0))


def test_permutations_and_tensors_without_a_source_are_inverted() -> None:
    rules = made('f.x -> m.x, permute="[2, 0, 1]"', "_ -> m.y", m_x=(2, 3, 4), m_y=(4, 4))
    assert rules.rules == (Rule(("f.x",), ("m.x",), (4,), 2, (2, 0, 1)),)
    assert rules.fresh == ("m.y",)


def test_a_number_without_axes_is_taken_over_as_it_is() -> None:
    rules = made("f.x^T -> m.x", m_x=(4, 6), m_n=())
    assert (rules.fresh, len(rules.rules)) == (("m.n",), 1)
    prove(rules.mapping())


def test_a_copy_is_an_alias_only_if_the_configuration_ties_embeddings() -> None:
    copies = "f.e -> m.e", "f.e -> m.h"
    assert made(*copies, tied=True, m_e=(4, 6), m_h=(4, 6)).ties == (Tie("m.e", "m.h"),)
    with pytest.raises(MappingError, match="Invalid AOA statements"):
        made(*copies, m_e=(4, 6), m_h=(4, 6))


def test_a_layout_that_no_rule_has_is_refused_and_not_approximated() -> None:
    crossed = "f.a -> p, q, axis=1", "p -> r, s, axis=0", "s, r -> t, axis=0", "t, q -> m.a, axis=1"
    back = "m.a -> t, q, axis=1", "t -> s, r, axis=0", "r, s -> p, axis=0", "p, q -> f.a, axis=1"
    with pytest.raises(MappingError, match="Rules do not express the statements") as caught:
        made(*crossed, inverse=back, m_a=(4, 8))
    assert caught.value.evidence == ("m.a: no rule moves its boxes",)


def test_a_program_without_statements_maps_equal_names() -> None:
    assert made(m_x=(4, 6)).rules == (Rule(("m.x",), ("m.x",), (6,), 1, (0, 1)),)
    described = {"m.x": AoaTensor((4, 6), "float32", (1, 1))}
    with pytest.raises(MappingError, match="cannot be proved"):
        rules_of_statements(described, Program(()), read_config({"aoa_statements": ["m.x -> _"]}), False)
