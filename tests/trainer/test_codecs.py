"""The Trainer's state as JSON: what goes in comes back bit for bit, and what cannot is refused."""

from __future__ import annotations

import json
import pprint
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from paddleformers_fc.errors import FormatError
from paddleformers_fc.storage.state_json import decode_object, encode, readable
from tests.harness.sampling import thorough

PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text().filter(lambda key: not key.startswith("__")), inner)
    ),
    max_leaves=20,
)


def text(value: Any) -> str:
    """All of a value, with the kinds and signs of its numbers, and keys in order."""
    return pprint.pformat(value)


@thorough(100)
@given(VALUES)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    assert text(decode_object(encode({"value": value}, "x"), "x")["value"]) == text(value)


@pytest.mark.parametrize("dtype", ["float32", "float64", "uint32", "int64", "bool", "float16"])
def test_an_array_comes_back_bit_for_bit(dtype: str) -> None:
    array = np.random.default_rng(0).integers(0, 255, size=(3, 16), dtype=np.uint8).view(dtype)
    back = decode_object(encode({"a": array}, "x"), "x")["a"]
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    np.testing.assert_array_equal(back, array)


def test_numbers_of_numpy_become_plain_numbers_and_an_ordered_dict_a_dict() -> None:
    value = OrderedDict(b=[np.float32(0.1), np.int64(7), np.bool_(True)], a=2)
    assert text(decode_object(encode(value, "x"), "x")) == text({"a": 2, "b": [float(np.float32(0.1)), 7, True]})


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": {"b": [1, object()]}}, "state.a.b[1]"),
        ({"a": ("x", {1, 2})}, "state.a[1]"),
        ({"a": {3: "x"}}, "state.a"),
        ({"a": b"raw"}, "state.a"),
        ({"a": np.array(["text"])}, "state.a"),
        ({"a": {"__array__": 1}}, "state.a"),
    ],
)
def test_a_value_that_json_cannot_hold_is_rejected_with_its_path(value: Any, place: str) -> None:
    with pytest.raises(FormatError) as caught:
        encode(value, "state")
    assert caught.value.where == place


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\x80\x04K\x01.",
        b'{"__array__": "x", "values": [], "shape": []}',
        b'{"__array__": "<U9", "values": ["1"], "shape": [1]}',
        b'{"__array__": "<f8", "values": [1, 2], "shape": [3]}',
        b'{"__array__": "<f8", "values": [1, 2], "shape": [-1]}',
        b'{"__array__": "<f8", "values": [1], "shape": [1], "more": 1}',
        b'{"__tuple__": {}}',
        b'{"__tuple__": [], "more": 1}',
    ],
)
def test_a_damaged_document_is_named(raw: bytes) -> None:
    for document in (b'{"value": ' + raw + b"}", b"[1]"):
        with pytest.raises(FormatError) as caught:
            decode_object(document, "checkpoint-3/trainer/state.json")
        assert caught.value.where == "checkpoint-3/trainer/state.json"


def test_a_description_is_json_whatever_it_describes() -> None:
    described = readable({1: {"a"}, "b": [np.float32(2), object(), None]})
    assert json.loads(json.dumps(described))["b"][0] == 2.0
    assert described["1"] == ["a"]
