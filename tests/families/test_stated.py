"""Rules of models without a family, stated by a caller or by name, and the document that stores any rules."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paddleformers_fc.errors import FormatError, MappingError, MismatchError
from paddleformers_fc.families import ModelDescription, ModelTensor
from paddleformers_fc.families.stated import (
    bind_model,
    check_cut_alike,
    decode_mapping,
    encode_mapping,
    model_ties,
    rules_by_name,
)
from paddleformers_fc.mapping import Rule, RuleSet, TensorSpec, Tie, prove
from paddleformers_fc.mapping.rules import Slab

WEIGHT, BIAS = ModelTensor("fc.weight", (4, 6), "float32", (1, 2)), ModelTensor("fc.bias", (6,), "float32", (2,))
NUMBER, HEAD = ModelTensor("scale", (), "float32", ()), ModelTensor("head.weight", (4, 6), "float32", (1, 2))
NAMED = rules_by_name([WEIGHT, BIAS, NUMBER, HEAD], [Tie("fc.weight", "head.weight")])


def test_every_tensor_is_the_canonical_tensor_of_its_own_name() -> None:
    mapping = NAMED.mapping()
    prove(mapping)
    assert {name: made.names for name, made in mapping.made.items()} == {
        one: (one,) for one in (WEIGHT.name, BIAS.name)
    }
    assert mapping.made[WEIGHT.name].template.links[0].axes == (0, 1)
    assert NAMED.fresh == ("scale",)
    assert NAMED.cuts == {"fc.weight": (1, 2), "fc.bias": (2,), "head.weight": (1, 2)}


def test_a_rank_takes_the_rules_of_its_tensors_and_of_what_they_are_tied_to() -> None:
    model = ModelDescription({}, rules=NAMED)
    assert model_ties(model) == {"head.weight": "fc.weight"}
    held = bind_model(model, [HEAD])
    assert set(held.targets) == {"fc.weight", "head.weight"}
    assert [rule.targets for rule in held.rules] == [("fc.weight",)]
    prove(held.mapping())


def test_rules_that_split_a_tensor_are_kept_completely_on_a_rank_with_one_part() -> None:
    targets = {name: TensorSpec((2, 3), "float32") for name in ("a", "b")}
    rules = RuleSet(targets, (Rule(("ab",), ("a", "b"), (2, 2), 0, (0, 1)),))
    held = bind_model(ModelDescription({}, rules=rules), [ModelTensor("a", (2, 3), "float32", (1, 1))])
    assert set(held.mapping().made) == {"a", "b"}


def test_tensors_without_a_rule_or_with_another_shape_are_refused_together() -> None:
    model = ModelDescription({}, rules=NAMED)
    others = [ModelTensor("fc.bias", (5,), "float32", (1,)), ModelTensor("gate.weight", (2,), "float32", (1,))]
    with pytest.raises(MappingError) as refused:
        bind_model(model, others)
    assert refused.value.evidence == (
        "fc.bias: shape [5], the rules have [6]",
        "gate.weight: no rule for this tensor",
    )


def test_tensors_of_equal_names_and_other_cuts_are_refused_unless_a_statement_assigns_them() -> None:
    alone = rules_by_name(
        [ModelTensor(one.name, one.shape, one.dtype, (1,) * len(one.shape)) for one in (WEIGHT, BIAS)]
    )
    check_cut_alike(NAMED, NAMED, (), "checkpoint-3")
    check_cut_alike(NAMED, alone, ("fc.weight", "fc.bias"), "checkpoint-3")
    with pytest.raises(MismatchError, match="names do not show") as refused:
        check_cut_alike(NAMED, alone, ("fc.bias",), "checkpoint-3")
    assert refused.value.evidence == ("fc.weight: stored in 1 x 2 shards, the model has 1 x 1",)


def test_user_mapped_rules_are_stored_once_as_the_rules_of_the_checkpoint() -> None:
    document = encode_mapping(ModelDescription({"hidden_size": 4}, rules=NAMED), NAMED)
    assert decode_mapping(document, "mapping.json") == (ModelDescription({"hidden_size": 4}), NAMED)
    assert document.count(b"head.weight") == encode_mapping(ModelDescription({}), NAMED).count(b"head.weight")


# ---- A ``mapping.json`` of a newer writer is read if it declares its additions ignorable, and refused otherwise.

MODEL = ModelDescription({"model_type": "llama"}, True)
SPEC = TensorSpec((4, 2), "float32")
RULES = RuleSet(
    {"stack": SPEC, "head": SPEC},
    (Rule(("a",), ("stack",), (2,), 1, (0, 1), slab=Slab(0, 0, 4)),),
    (Tie("stack", "head"),),
)
LEVELS = [(), ("model",), ("rules",)]


def document(path: tuple[Any, ...], added: object) -> bytes:
    """The document of a newer writer, with a field ``scale`` in the object at a path."""
    found = json.loads(encode_mapping(MODEL, RULES))
    inner = found
    for key in path:
        inner = inner[key]
    inner["scale"] = added
    return json.dumps(found).encode()


@pytest.mark.parametrize("path", LEVELS)
def test_an_ignorable_field_is_ignored(path: tuple[Any, ...]) -> None:
    assert decode_mapping(document(path, {"must_understand": False, "by": 2}), "mapping.json") == (MODEL, RULES)


@pytest.mark.parametrize("path", LEVELS)
@pytest.mark.parametrize("added", [2, None, {"by": 2}, {"must_understand": True}])
def test_any_other_unknown_field_is_refused(path: tuple[Any, ...], added: object) -> None:
    with pytest.raises(FormatError, match="unknown field `scale`"):
        decode_mapping(document(path, added), "mapping.json")


@pytest.mark.parametrize(
    "path",
    [("rules", "rules", 0), ("rules", "rules", 0, "slab"), ("rules", "ties", 0), ("rules", "targets", "stack")],
)
def test_nested_objects_are_fixed(path: tuple[Any, ...]) -> None:
    with pytest.raises(FormatError, match="unknown field `scale`"):
        decode_mapping(document(path, {"must_understand": False}), "mapping.json")


@pytest.mark.parametrize("field", ["model", "rules"])
def test_a_document_without_its_parts_is_refused(field: str) -> None:
    found = json.loads(encode_mapping(MODEL, RULES))
    assert found.keys() == {"model", "rules"}
    del found[field]
    with pytest.raises(FormatError, match=f"missing required field `{field}`"):
        decode_mapping(json.dumps(found).encode(), "mapping.json")
