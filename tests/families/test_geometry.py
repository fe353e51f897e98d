"""Layouts of declarations, against numpy; numbers that are shifted; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from paddleformers_fc.errors import MappingError
from paddleformers_fc.families import Family, ModelTensor, bind, enumerate_tensors
from paddleformers_fc.families.declarations import Numbers, Statements
from paddleformers_fc.families.language import gate_up, linear, stacked, transposed
from paddleformers_fc.families.sizes import OneOf, Size, Sizes
from paddleformers_fc.mapping import RuleSet, prove
from tests.families.spaces import BY_NAME, model_of, settings, spaces, tensors
from tests.harness.work import calls
from tests.mapping.numbers import Arrays, moved, numbered

EXPERTS, HIDDEN, FFN = 3, 4, 6
EXPERT = "model.layers.{layer}.experts.{expert}"
GATE_UP = gate_up(f"{EXPERT}.gu", f"{EXPERT}.gate", f"{EXPERT}.up")[0]
DOWN = linear(f"{EXPERT}.down", inputs="ffn")[0]
CONFIG = {"hidden_size": HIDDEN, "intermediate_size": FFN, "num_experts": EXPERTS, "num_hidden_layers": 2}


def bound(statements: Statements, tp: int = 1, ep: int = 1, **changes: Any) -> RuleSet:
    """The rules of a family of these statements."""
    family = Family("probe", statements)
    config = {**CONFIG, **changes}
    return bind(family, model_of(config), [one.under(tp, ep) for one in enumerate_tensors(family, model_of(config))])


def both_ways(rules: RuleSet) -> tuple[Arrays, Arrays]:
    """Canonical numbers and the model's, once every number has come back."""
    mapping = rules.mapping()
    prove(mapping)
    prove(mapping.reversed())
    canonical = numbered(mapping)
    model = moved(mapping, canonical)
    back = moved(mapping.reversed(), model)
    assert all((back[name] == canonical[name]).all() for name in canonical)
    return canonical, model


def one_by_one(canonical: Arrays, layer: int = 0) -> tuple[list[Any], list[Any], list[Any]]:
    """Gate, up and down of every expert, [in, out]."""
    names = [f"model.layers.{layer}.experts.{expert}" for expert in range(EXPERTS)]
    gate, up, down = ([canonical[f"{name}.{part}.weight"].T for name in names] for part in ("gate", "up", "down"))
    return gate, up, down


@pytest.mark.parametrize(
    ("new", "joined"),
    [
        pytest.param(False, np.concatenate, id="one behind the other along the rows"),
        pytest.param(True, np.stack, id="on an axis of their own"),
    ],
)
def test_experts_are_stacked_as_declared(new: bool, joined: Callable[[list[Any]], Any]) -> None:
    name = "model.layers.{layer}.stack"
    canonical, model = both_ways(bound((*stacked(f"{name}1", GATE_UP, new), *stacked(f"{name}2", DOWN, new))))
    gate, up, down = one_by_one(canonical)
    pairs = [np.concatenate(pair, axis=1) for pair in zip(gate, up, strict=True)]
    assert np.array_equal(model["model.layers.0.stack1"], joined(pairs))
    assert np.array_equal(model["model.layers.0.stack2"], joined(down))


def test_experts_kept_as_stored_lie_gate_over_up() -> None:
    name = "model.layers.{layer}.stack"
    first, second = (structs.replace(one, turned=False, shape=one.shape[::-1]) for one in (GATE_UP, DOWN))
    canonical, model = both_ways(bound((*stacked(f"{name}1", first), *stacked(f"{name}2", second))))
    gate, up, down = one_by_one(canonical)
    rows = [array.T for pair in zip(gate, up, strict=True) for array in pair]
    assert np.array_equal(model["model.layers.0.stack1"], np.concatenate(rows))
    assert np.array_equal(model["model.layers.0.stack2"], np.concatenate([array.T for array in down]))


def test_expert_parallelism_cuts_a_stack_along_its_experts_and_does_not_change_the_mapping() -> None:
    statements = stacked("model.layers.{layer}.stack", GATE_UP)
    family = Family("probe", statements)
    config = {**CONFIG, "num_experts": 4}
    cut = [one.under(ep=4) for one in enumerate_tensors(family, model_of(config))]
    assert {tensor.cuts for tensor in cut} == {(4, 1)}
    assert bind(family, model_of(config), cut).rules == bound(statements, num_experts=4).rules


def test_a_stack_that_does_not_hold_the_experts_is_refused_with_the_numbers() -> None:
    family = Family("probe", stacked("model.layers.{layer}.stack", GATE_UP, new=True))
    with pytest.raises(MappingError, match=r"shape \[5, 4, 12\] does not hold 3 experts on axis 0"):
        bind(family, model_of(CONFIG), [ModelTensor("model.layers.0.stack", (5, 4, 12), "float32", (1, 1, 1))])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_tensors_fused_in_both_spaces_are_distributed_to_the_ranks(tp: int) -> None:
    family = BY_NAME["phi3"]
    _, canonical, model = spaces(family, settings(family), tp)
    attention, ffn = "model.layers.0.self_attn.qkv_proj.weight", "model.layers.1.mlp.gate_up_proj.weight"
    q, k, v = np.split(canonical[attention].T, [32, 48], axis=1)
    assert np.array_equal(model[attention], _dealt([q, k, v], tp))
    assert np.array_equal(model[ffn], _dealt(np.split(canonical[ffn].T, 2, axis=1), tp))


def _dealt(parts: list[Any], ranks: int) -> Any:
    cut = [np.split(part, ranks, axis=1) for part in parts]
    return np.concatenate([piece for rank in zip(*cut, strict=True) for piece in rank], axis=1)


def test_kv_heads_that_the_ranks_cannot_share_are_refused_with_the_numbers() -> None:
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


def test_empty_first_layers_shift_the_models_numbers_and_not_the_canonical_ones() -> None:
    family = BY_NAME["glm4_moe"]
    rules, _, _ = spaces(family, settings(family, num_empty_layers_add_in_head=3))
    sources = {rule.targets[0]: rule.sources for rule in rules.rules}
    assert sources["model.layers.3.mlp.down_proj.weight"] == ("model.layers.0.mlp.down_proj.weight",)
    assert sources["model.layers.5.norm.weight"] == ("model.layers.2.shared_head.norm.weight",)
    inner = "model.layers.5.transformer_layer.self_attn.o_proj.weight"
    assert sources[inner] == ("model.layers.2.self_attn.o_proj.weight",)


def test_a_layer_among_the_empty_ones_is_refused() -> None:
    family = BY_NAME["glm4_moe"]
    config = settings(family, num_empty_layers_add_in_head=3)
    with pytest.raises(
        MappingError, match=r"layers\.2\.input_layernorm\.weight: its number 2 is smaller than the shift 3"
    ):
        bind(family, model_of(config), [ModelTensor("model.layers.2.input_layernorm.weight", (32,), "float32", (1,))])


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
    for shape, changes, message in (
        (
            (32, 4),
            {"is_fleet": True},
            r"shape \[32, 4\] is declared for `stepped\(.* and not is_fleet`, which the configuration does not fulfil",
        ),
        (
            (32, 32),
            {"is_fleet": None, "num_experts": 32},
            "2 statements declare it, and shape .32, 32. does not distinguish them",
        ),
        ((8, 8), {"is_fleet": True}, r"2 statements declare it, and shape \[8, 8\] does not distinguish them"),
    ):
        with pytest.raises(MappingError, match=message):
            axes(shape, **changes)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("model.layers.2.input_layernorm.weight", {}),
        ("model.layers.5.enorm.weight", {"num_empty_layers_add_in_head": 2}),
    ],
)
def test_a_number_that_the_configuration_does_not_have_is_refused(name: str, changes: dict[str, int]) -> None:
    # Two layers and one prediction layer: with another count of empty layers, every number would mean another layer.
    family = BY_NAME["glm4_moe"]
    config = settings(family, **{"num_empty_layers_add_in_head": 0, **changes})
    with pytest.raises(MappingError, match=r"is the canonical [0-9], and the configuration has"):
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


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(("start", "end", "interval"), SPARSE)
def test_ernie_is_proved_over_its_whole_configuration_space(start: int, end: int, interval: int, depth: int) -> None:
    family = BY_NAME["ernie4_5_moe"]
    for switches in range(16):
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
        mapping = spaces(family, config, 2)[0].mapping()
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
        assert len(bound[0].rules) == len(model) - 1 > 190 * layers
        return counted / len(model)

    assert calls_per_tensor(100) < 1.1 * calls_per_tensor(20) < 25


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
        (lambda a: a[0], "not subscriptable"),
        (lambda a: len(a), "has no len"),
        (lambda b: b[0], "requires b, which the configuration does not contain"),
    ],
)
def test_a_size_that_gives_no_length_is_refused_with_the_reason(size: Size, named: str) -> None:
    with pytest.raises(MappingError) as caught:
        Sizes({}, KINDS).length(size)
    assert named in caught.value.what


@pytest.mark.parametrize("key", ["text", "kinds"])
@pytest.mark.parametrize("ours", [lambda one: one * LONG, lambda one: LONG * one], ids=["left", "right"])
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


def test_numbers_start_and_are_shifted_as_declared() -> None:
    family = Family(
        "probe",
        transposed("model.layers.{mtp}.weight", shape=("hidden", "ffn")),
        numbers=(Numbers("mtp", 2, start="layers", shift=5),),
    )
    found = list(enumerate_tensors(family, model_of(CONFIG)))
    assert [(one.name, dict(one.numbers)) for one in found] == [
        ("model.layers.7.weight", {"mtp": 2}),
        ("model.layers.8.weight", {"mtp": 3}),
    ]
