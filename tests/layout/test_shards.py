"""Shards: flattened ranges are boxes, live weights are described by their fields."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from paddleformers_fc.errors import MismatchError
from paddleformers_fc.layout.live import describe_roles, facts_of
from paddleformers_fc.layout.roles import split_state_name
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import Box, shifted, whole
from tests.harness.sampling import thorough


@thorough(300)
@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_the_fragments_of_a_range_are_its_elements_in_order(shape: list[int], data: st.DataObject) -> None:
    size = int(np.prod(shape))
    begin = data.draw(st.integers(0, size))
    end = data.draw(st.integers(begin, size))
    shard = Shard("x", "float32", tuple(shape), whole(tuple(shape)), (begin, end))
    values = np.arange(size).reshape(shape)
    out = np.full(end - begin, -1)
    for fragment in shard.fragments:
        part = values[tuple(slice(a, b) for a, b in zip(fragment.box.lo, fragment.box.hi, strict=True))].ravel()
        out[fragment.start : fragment.start + part.size] = part
    assert (out == np.arange(begin, end)).all()
    assert len(shard.fragments) <= max(1, 2 * len(shape) - 1)


def test_the_fragments_of_a_range_of_a_tensor_parallel_shard_are_in_global_coordinates() -> None:
    shard = Shard("x", "float32", (4, 8), shifted((4, 4), (0, 4)), (2, 10))
    assert [str(fragment.box) for fragment in shard.fragments] == ["[0:1, 6:8]", "[1:2, 4:8]", "[2:3, 4:6]"]


def test_cuts_determine_the_tensor_parallel_degree() -> None:
    assert Shard("x", "float32", (4, 8), shifted((4, 2), (0, 6))).cuts == (1, 4)


def test_states_are_split_from_their_parameters() -> None:
    state = split_state_name("optimizer_state", "model.w.weight.moment1_0")
    assert (state.parameter, state.suffix, state.scalar) == ("model.w.weight", ".moment1_0", False)
    assert split_state_name("optimizer_state", "w.beta2_pow_acc_0").scalar
    assert split_state_name("model_state", "strange.w_0").parameter == "strange.w_0"


def weight(shape: tuple[int, ...], **fields: object) -> SimpleNamespace:
    made = SimpleNamespace(
        key="w",
        local_tensor=SimpleNamespace(shape=list(shape), dtype="paddle.float32"),
        local_shape=shape,
        global_shape=shape,
        global_offset=(0,) * len(shape),
        is_flattened=False,
        flattened_range=None,
    )
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_a_live_weight_is_described_by_its_fields() -> None:
    live = weight((2, 4), global_shape=(4, 4), global_offset=(2, 0))
    shard = describe_roles({"model_state": {"w": live}})["model_state"]["w"]
    assert shard == Shard("w", "float32", (4, 4), Box((2, 0), (4, 4)))


def test_a_state_that_has_not_its_parameters_shape_is_refused() -> None:
    roles = {"model_state": {"w": weight((2, 4))}, "optimizer_state": {"w.moment1_0": weight((1,))}}
    with pytest.raises(MismatchError, match=r"w.moment1_0: shape \[1\] is not its parameter's \[2, 4\]"):
        describe_roles(roles)


def test_a_tensor_smaller_than_its_shard_is_refused() -> None:
    live = weight((2, 4), local_shape=(4, 4), global_shape=(4, 4))
    with pytest.raises(MismatchError, match="has 8 elements, its shard 16"):
        describe_roles({"model_state": {"w": live}})


def test_weights_with_the_same_impossible_description_are_all_named() -> None:
    alike = {name: weight((2, 4), local_shape=(4, 4), global_shape=(4, 4)) for name in ("v", "w")}
    sound = {name: weight((4, 4), global_shape=(8, 4), global_offset=(4, 0)) for name in ("x", "y")}
    with pytest.raises(MismatchError) as caught:
        describe_roles({"model_state": {**alike, **sound}})
    assert caught.value.evidence == tuple(f"{name}: the tensor has 8 elements, its shard 16" for name in "vw")
    shards = describe_roles({"model_state": sound})["model_state"]
    assert shards == {name: Shard(name, "float32", (8, 4), Box((4, 0), (8, 4))) for name in ("x", "y")}


UNLIKE: dict[str, dict[str, object]] = {
    "a shard at another place": {"global_offset": (2, 0)},
    "a shard of another shape": {"local_shape": (4, 2)},
    "a shard of a larger tensor": {"global_shape": (8, 4)},
    "a range": {"is_flattened": True, "flattened_range": slice(0, 8)},
    "the next range": {"local_shape": (4, 4), "is_flattened": True, "flattened_range": slice(8, 16)},
}


def test_each_of_several_weights_is_described_as_itself() -> None:
    usual = weight((2, 4), global_shape=(4, 4))
    weights = {"usual": usual, **{name: SimpleNamespace(**{**vars(usual), **one}) for name, one in UNLIKE.items()}}
    assert describe_roles({"model_state": weights})["model_state"] == {
        name: describe_roles({"model_state": {name: one}})["model_state"][name] for name, one in weights.items()
    }


@pytest.mark.parametrize("one", UNLIKE)
def test_the_facts_of_weights_differ_where_their_shards_do(one: str) -> None:
    usual = weight((2, 4), global_shape=(4, 4))
    other = SimpleNamespace(**{**vars(usual), **UNLIKE[one]})
    assert facts_of({"model_state": {"w": other}}) != facts_of({"model_state": {"w": usual}})
    assert facts_of({"model_state": {"v": usual}}) != facts_of({"model_state": {"w": usual}})
    assert facts_of({"master_weight": {"w": usual}}) != facts_of({"model_state": {"w": usual}})


def test_ranges_of_one_box_have_facts_of_their_own() -> None:
    ranges = [weight((8,), local_shape=(4, 4), is_flattened=True, flattened_range=slice(at, at + 8)) for at in (0, 8)]
    assert len({facts_of({"master_weight": {"w": one}}) for one in ranges}) == 2


@pytest.mark.parametrize(
    ("box", "flat", "message"),
    [
        (Box((0, 0), (4, 8)), (0, 32), None),
        (Box((0, 0), (4, 8)), (32, 32), None),
        (Box((0, 0), (4, 8)), (0, 33), "range 0:33 is outside its 32 elements"),
        (Box((0, 0), (4, 8)), (-1, 3), "range -1:3 is outside its 32 elements"),
        (Box((0, 0), (4, 8)), (5, 4), "range 5:4 is outside its 32 elements"),
        (Box((2, 0), (4, 8)), (0, 17), "range 0:17 is outside its 16 elements"),
        (Box((0, 0), (4, 9)), None, "box [0:4, 0:9] is outside shape [4, 8]"),
        (Box((0, 0), (5, 8)), None, "box [0:5, 0:8] is outside shape [4, 8]"),
        (Box((0,), (4,)), None, "box [0:4] is outside shape [4, 8]"),
    ],
)
def test_a_shard_that_is_larger_than_its_tensor_by_one_is_impossible(
    box: Box, flat: tuple[int, int] | None, message: str | None
) -> None:
    assert list(Shard("w", "float32", (4, 8), box, flat).faults()) == ([] if message is None else [f"w: {message}"])
