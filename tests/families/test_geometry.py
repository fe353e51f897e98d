"""What declarations refuse with the numbers, how they choose by configuration and class, and their sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paddleformers_fc.errors import MappingError
from paddleformers_fc.families import Family, ModelTensor, bind, enumerate_tensors
from paddleformers_fc.families.language import gate_up, stacked
from paddleformers_fc.families.sizes import OneOf, Size, Sizes
from paddleformers_fc.mapping import prove
from tests.families.spaces import BY_NAME, differing, model_of, settings, spaces, tensors
from tests.harness.work import calls
from tests.mapping.numbers import moved

EXPERT = "model.layers.{layer}.experts.{expert}"
GATE_UP = gate_up(f"{EXPERT}.gu", f"{EXPERT}.gate", f"{EXPERT}.up")[0]
CONFIG = {"hidden_size": 4, "intermediate_size": 6, "num_experts": 3, "num_hidden_layers": 2}


def test_expert_parallelism_cuts_a_stack_along_its_experts_and_does_not_change_the_mapping() -> None:
    statements = stacked("model.layers.{layer}.stack", GATE_UP)
    family = Family("probe", statements)
    config = {**CONFIG, "num_experts": 4}
    cut, whole = ([one.under(ep=ep) for one in enumerate_tensors(family, model_of(config))] for ep in (4, 1))
    assert {tensor.cuts for tensor in cut} == {(4, 1)}
    assert bind(family, model_of(config), cut).rules == bind(family, model_of(config), whole).rules


def test_experts_are_stacked_on_an_axis_of_their_own() -> None:
    family = Family("probe", stacked("model.layers.{layer}.stack", GATE_UP, new=True))
    rules, canonical, model = spaces(family, CONFIG)
    names = [f"model.layers.0.experts.{expert}" for expert in range(3)]
    parts = [[canonical[f"{name}.{part}.weight"].T for part in ("gate", "up")] for name in names]
    fused = [np.concatenate(pair, axis=1) for pair in parts]
    assert np.array_equal(model["model.layers.0.stack"], np.stack(fused))
    assert differing(canonical, moved(rules.mapping().reversed(), model)) == []


def test_heads_that_the_layer_or_the_ranks_do_not_hold_are_refused_with_the_numbers() -> None:
    wide = ModelTensor("model.layers.0.self_attn.qkv_proj.weight", (32, 33), "float32", (1, 1))
    with pytest.raises(MappingError, match="length 33 does not divide into 8 query and 2 x 4"):
        bind(BY_NAME["ernie4_5"], model_of(settings(BY_NAME["ernie4_5"])), [wide])
    family = BY_NAME["phi3"]
    config = settings(family, num_key_value_heads=2)
    with pytest.raises(MappingError, match="2 key and value heads are not divisible among 4 tensor-parallel ranks"):
        bind(family, model_of(config), tensors(family, config, 4))


@pytest.mark.parametrize(("gate", "value"), [(8, 8), (0, 16)], ids=["a gate", "values of another length"])
def test_a_fused_attention_that_holds_more_than_its_heads_is_refused_though_its_length_is_divisible(
    gate: int, value: int
) -> None:
    family = BY_NAME["minimax_m2"]
    config = settings(family, use_gated_attn=bool(gate), v_head_dim=value)
    width = 4 * (2 * (8 + gate) + 8 + value)
    assert width % (8 + 2 * 4) == 0
    fused_layer = ModelTensor("model.layers.0.self_attn.qkv_proj.weight", (32, width), "float32", (1, 1))
    with pytest.raises(MappingError, match=f"length {width} is not the 128 that 8 query and 2 x 4"):
        bind(family, model_of(config), [fused_layer])


def test_statements_for_one_name_are_distinguished_by_the_class_and_the_configuration() -> None:
    family = BY_NAME["qwen3_moe"]

    def axes(shape: tuple[int, int], **changes: Any) -> tuple[int, ...]:
        gate = ModelTensor("model.layers.1.mlp.gate.weight", shape, "float32", (1, 1))
        return bind(family, model_of(settings(family, **changes)), [gate]).rules[0].axes

    assert axes((4, 32), is_fleet=True) == (0, 1)
    assert axes((32, 4), is_fleet=False) == (1, 0)
    # As many experts as hidden units: no shape decides.
    assert axes((32, 32), is_fleet=True, num_experts=32) == (0, 1)
    assert axes((32, 32), is_fleet=False, num_experts=32) == (1, 0)
    assert axes((32, 4), is_fleet=None) == (1, 0)
    fulfil = r"shape \[32, 4\] is declared for `stepped\(.* and not is_fleet`, which the configuration does not fulfil"
    for shape, changes, message in (
        ((32, 4), {"is_fleet": True}, fulfil),
        ((32, 32), {"is_fleet": None, "num_experts": 32}, "2 statements declare it, and shape .32, 32. does not"),
        ((8, 8), {"is_fleet": True}, r"2 statements declare it, and shape \[8, 8\] does not distinguish them"),
    ):
        with pytest.raises(MappingError, match=message):
            axes(shape, **changes)


@pytest.mark.parametrize(
    ("name", "empty", "message"),
    [
        ("model.layers.2.input_layernorm.weight", 3, r"its number 2 is smaller than the shift 3"),
        ("model.layers.2.input_layernorm.weight", 0, r"is the canonical [0-9], and the configuration has"),
        ("model.layers.5.enorm.weight", 2, r"is the canonical [0-9], and the configuration has"),
    ],
)
def test_a_number_that_the_configuration_does_not_have_is_refused(name: str, empty: int, message: str) -> None:
    # Two layers and one prediction layer: with another count of empty layers, every number would mean another layer.
    family = BY_NAME["glm4_moe"]
    config = settings(family, num_empty_layers_add_in_head=empty)
    with pytest.raises(MappingError, match=message):
        bind(family, model_of(config), [ModelTensor(name, (32,), "float32", (1,))])


def test_the_router_is_cast_when_the_file_is_not_in_its_dtype_and_the_rest_is_not() -> None:
    family = BY_NAME["glm4_moe"]
    config = settings(family)
    model = [one.under() for one in enumerate_tensors(family, model_of(config), "bfloat16")]
    rules = bind(family, model_of(config), model)
    stored = dict.fromkeys(rules.mapping().sources, "bfloat16")
    casting = rules.casting(stored)
    prove(casting.mapping(stored))
    cast = {rule.targets[0].rsplit(".", 2)[-2] for rule in casting.rules if rule.cast}
    assert cast == {"gate"}
    assert {rule.cast for rule in casting.rules} == {None, "float32"}


SPARSE = [(1, -1, 1), (0, -1, 1), (2, 3, 1), (0, 2, 2), (1, -1, 3)]


@pytest.mark.parametrize(("start", "end", "interval"), SPARSE)
def test_ernie_is_proved_over_its_whole_configuration_space(start: int, end: int, interval: int) -> None:
    family = BY_NAME["ernie4_5_moe"]
    for depth, switches in ((0, 0), (0, 15), (1, 5), (1, 10), (2, 3), (2, 12)):
        config = settings(
            family,
            num_hidden_layers=4,
            num_nextn_predict_layers=depth,
            moe_layer_start_index=start,
            moe_layer_end_index=end,
            moe_layer_interval=interval,
            moe_num_shared_experts=switches & 1,
            tie_word_embeddings=bool(switches & 2),
            use_bias=bool(switches & 4),
            moe_use_aux_free=bool(switches & 8),
        )
        mapping = bind(family, model_of(config), tensors(family, config, 2)).mapping()
        prove(mapping)
        prove(mapping.reversed())
        sparse = [n for n in range(4) if (n + 1) % interval == 0 and start <= n <= (3 if end < 0 else end)]
        found = {name.split(".")[2] for name in mapping.targets if "model.layers" in name and ".experts.0." in name}
        assert found == {str(n) for n in sparse}
        blocks = {name.split(".")[2] for name in mapping.targets if "mtp_block" in name and ".experts.0." in name}
        assert blocks == {str(n) for n in sparse if n < depth}


def test_binding_visits_every_tensor_once() -> None:
    family = BY_NAME["ernie4_5_moe"]

    def calls_per_tensor(layers: int) -> float:
        config = settings(family, num_hidden_layers=layers, moe_num_experts=100, num_nextn_predict_layers=0)
        model = tensors(family, config, 2)
        bound = []
        counted = calls(lambda: bound.append(bind(family, model_of(config), model)))
        assert len(bound[0].rules) == len(model) - 1 > 189 * layers
        return counted / len(model)

    assert calls_per_tensor(40) < 1.1 * calls_per_tensor(10) < 25


def test_a_size_is_the_configurations_own_inside_its_own_definition() -> None:
    declared: dict[str, Size] = {"head": lambda head, hidden: head or hidden // 2, "wide": ("head", "head")}
    assert Sizes(declared, {"hidden": 8}).length("wide") == 8
    assert Sizes(declared, {"hidden": 8, "head": 3}).length("wide") == 6


KINDS = {"a": 1, "text": "four", "kinds": ["x", "y"]}
LONG = 1 << 60


@pytest.mark.parametrize(
    ("size", "named"),
    [
        (lambda a, b: a + b, "`(a, b)` requires b, which the configuration does not contain"),
        (("a", "b"), "`a + b` requires b, which the configuration does not contain"),
        ("b", "`b` is not in the configuration"),
        ("text.b", "is not in the configuration"),
        (lambda a: a - 9, "is -8 and not a length"),
        (lambda a: a // 0, "zero"),
        (lambda a: a < 9, "is True and not a length"),
        (lambda a: a / 2, "is 0.5 and not a length"),
        (lambda kinds: kinds[2], "needs entry 2 of a list of 2"),
        (lambda kinds: kinds[-1], "needs entry -1 of a list of 2"),
        (lambda a: len(a), "has no len"),
        (lambda b: b[0], "requires b, which the configuration does not contain"),
    ],
)
def test_a_size_that_gives_no_length_is_refused_with_the_reason(size: Size, named: str) -> None:
    with pytest.raises(MappingError) as caught:
        Sizes({}, KINDS).length(size)
    assert named in caught.value.what


@pytest.mark.parametrize(("key", "ours"), [("text", lambda one: one * LONG), ("kinds", lambda one: LONG * one)])
def test_a_text_or_a_list_of_a_configuration_is_not_multiplied(key: str, ours: Size) -> None:
    sizes = Sizes({"one": key, "ours": ours}, KINDS)
    with pytest.raises(MappingError, match="unsupported operand"):
        sizes.length("ours")


def test_a_function_returns_texts_and_lists_as_the_configuration_has_them() -> None:
    sizes = Sizes({"kind": lambda text: text, "all": lambda kinds: kinds, "first": lambda kinds: kinds[0]}, KINDS)
    assert [sizes.value(name) for name in ("kind", "all", "first")] == ["four", ["x", "y"], "x"]
    assert Sizes({"kind": lambda text, a: text or a}, {"text": "", "a": 1}).value("kind") == 1


@pytest.mark.parametrize(
    ("condition", "layer", "holds"),
    [
        (True, 0, True),
        (False, 0, False),
        ("kind", 0, True),
        ("listed", 0, False),
        ("absent", 0, False),
        (lambda layer, first: layer < first, 1, True),
        (lambda layer, first: layer < first, 2, False),
        (lambda layer, listed: layer not in (listed or ()), 1, True),
        (lambda layer, listed2: layer in listed2, 1, True),
        (lambda layer, kinds: kinds[layer] == "y", 1, True),
        (lambda layer, kinds: kinds[layer] == "y", 0, False),
        (lambda kind: kind == "full", 0, True),
    ],
)
def test_conditions_are_names_truth_values_or_functions(condition: Any, layer: int, holds: bool) -> None:
    config = {"first": 2, "listed": None, "listed2": [1], "kind": "full", "kinds": ["x", "y"]}
    sizes = Sizes({}, config)
    assert sizes.holds(((condition, True),), {"layer": layer}) is holds
    assert sizes.holds(((condition, False),), {"layer": layer}) is not holds


def test_names_of_one_key_have_one_value() -> None:
    both = OneOf(("wide", "width"))
    assert Sizes({}, {"width": 3}, {"wide": 5}).length(both) == 3
    assert Sizes({}, {}, {"wide": 5}).length(both) == 5
    with pytest.raises(MappingError, match="wide and width are names of one key, and their values differ"):
        Sizes({}, {"width": 3, "wide": 4}).length(both)
