"""A ``mapping.json`` of a newer writer is read if it declares its additions ignorable, and refused otherwise."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paddleformers_fc.errors import FormatError
from paddleformers_fc.families import ModelDescription
from paddleformers_fc.families.stated import decode_mapping, encode_mapping
from paddleformers_fc.mapping import RuleSet, TensorSpec
from paddleformers_fc.mapping.rules import Rule, Slab, Tie, encode_rules

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


def test_the_rules_alone_are_not_a_document() -> None:
    with pytest.raises(FormatError, match="Invalid mapping of the checkpoint"):
        decode_mapping(encode_rules(RULES), "mapping.json")
