"""Which differences between two configurations are found, and which of them change what weights mean."""

from __future__ import annotations

from typing import Any

import pytest

from paddleformers_fc.errors import MismatchError, OptionError
from paddleformers_fc.families import ModelDescription
from paddleformers_fc.families.changes import (
    OPTION,
    Change,
    check_changes_allowed,
    check_keys_known,
    config_changes,
    table,
    value_text,
)

LINEAR = {"rope_type": "linear", "factor": 2.0}


def changed(saved: dict[str, Any], now: dict[str, Any], complete: bool = True) -> list[Change]:
    return config_changes(ModelDescription(saved), ModelDescription(now), complete)


def refused(saved: dict[str, Any], now: dict[str, Any], *allowed: str) -> str:
    try:
        check_changes_allowed(changed(saved, now), allowed, "checkpoint-1")
    except MismatchError as error:
        return error.render()
    return ""


@pytest.mark.parametrize(
    ("key", "saved", "now"),
    [
        *((key, 1, 2) for key in ("model_type", "rope_theta", "partial_rotary_factor", "hidden_act", "moe_k")),
        *((key, 1, 2) for key in ("rms_norm_eps", "layer_norm_eps", "num_experts_per_tok", "hidden_activation")),
        *((key, 1, 2) for key in ("scoring_func", "topk_method", "n_group", "topk_group", "routed_scaling_factor")),
        *((key, 1, 2) for key in ("query_pre_attn_scalar", "num_attention_heads", "linear_num_key_heads")),
        *((key, False, True) for key in ("use_qk_norm", "norm_topk_prob", "tie_word_embeddings")),
        *((key, 1, 2) for key in ("index_topk", "csa_window_size", "tokens_per_second", "deepstack_visual_indexes")),
        *((key, None, 30.0) for key in ("sliding_window", "final_logit_softcapping", "embedding_multiplier")),
        ("rope_scaling", None, LINEAR),
        ("rope_parameters", {"rope_type": "default"}, LINEAR),
        ("layer_types", ["full_attention"], ["sliding_attention"]),
    ],
)
def test_a_key_that_changes_the_meaning_of_weights_is_rejected_unless_allowed(key: str, saved: Any, now: Any) -> None:
    for stored, live in (({key: saved}, {key: now}), ({"text_config": {key: saved}}, {"text_config": {key: now}})):
        assert key in refused(stored, live)
        assert refused(stored, live, next(iter(stored))) == ""
        assert refused(stored, live, "another_key") != ""
    assert refused({key: now}, {key: saved}) != ""


@pytest.mark.parametrize(
    "key",
    ["attention_dropout", "max_position_embeddings", "router_aux_loss_coef", "moe_router_bias_update_rate", "new"],
)
def test_every_other_change_is_listed_and_not_refused(key: str) -> None:
    assert table(changed({key: 1}, {key: 2})) == [f"{'key':{len(key)}}  saved  now", f"{key}  1      2"]
    assert refused({key: 1}, {key: 2}) == ""


@pytest.mark.parametrize(
    "key",
    [
        *("tensor_model_parallel_size", "tensor_parallel_rank", "sequence_parallel", "num_empty_layers_add_in_head"),
        *("paddleformers_version", "architectures", "dtype", "use_cache", "fuse_rms_norm", "apply_rope_fusion"),
        *("moe_router_fusion", "recompute_granularity", "initializer_range", "use_flash_attention"),
    ],
)
def test_layouts_versions_and_ways_of_computing_are_not_compared(key: str) -> None:
    assert changed({key: 1, "text_config": {key: 1}}, {key: 2, "text_config": {key: 2}}) == []


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "yarn"])
def test_the_maximum_of_positions_must_be_allowed_to_change_where_the_rotary_embedding_depends_on_it(kind: str) -> None:
    saved, now = ({"rope_scaling": {"rope_type": kind}, "max_position_embeddings": count} for count in (64, 4096))
    assert "max_position_embeddings" in refused(saved, now)


def test_values_with_the_same_meaning_are_no_change() -> None:
    saved = {"rope_theta": 10000, "sliding_window": None, "use_qk_norm": False, "rope_scaling": {}}
    assert changed(saved, {"rope_theta": 10000.0}) == changed({"rope_theta": 10000.0}, saved) == []


def test_true_and_one_are_different_values() -> None:
    assert [one.key for one in changed({"moe_gate": True}, {"moe_gate": 1})] == ["moe_gate"]


def test_a_value_under_several_keys_is_one_change_and_any_of_the_keys_allows_it() -> None:
    saved, now = (
        {"rope_theta": theta, "rope_parameters": {"rope_theta": theta}, "moe_k": k, "num_experts_per_tok": k}
        for theta, k in ((1e4, 2), (2e4, 1))
    )
    assert [one.key for one in changed(saved, now)] == ["moe_k", "rope_theta"]
    for theta in ("rope_theta", "rope_parameters", "rope_parameters.rope_theta"):
        for k in ("moe_k", "num_experts_per_tok"):
            assert refused(saved, now, theta, k) == ""
    assert "moe_k" in refused(saved, now, "rope_theta")


def test_changes_of_equal_values_under_other_keys_stay_apart() -> None:
    text = refused({"n_group": 1, "topk_group": 1}, {"n_group": 2, "topk_group": 2}, "n_group")
    assert "flex_allow_config_changes: [n_group, topk_group]" in text


def test_keys_without_a_change_and_the_type_of_the_model_are_not_offered() -> None:
    assert "flex_allow_config_changes: [rope_theta]" in refused({"rope_theta": 1}, {"rope_theta": 2}, "rope_thta")
    text = refused({"model_type": "llama", "rope_theta": 1}, {"model_type": "phi3", "rope_theta": 2})
    assert "contains another model: llama, not phi3." in text
    assert OPTION not in text


def test_an_allowed_key_of_neither_configuration_is_an_error_with_a_suggestion() -> None:
    saved, now = ModelDescription({"rope_theta": 1, "rope_scaling": LINEAR}), ModelDescription({"moe_k": 1, "none": {}})
    known = ("rope_theta", "rope_scaling", "rope_scaling.factor", "moe_k", "none", "lora", "lora.base", "lora.location")
    check_keys_known(known, saved, now)
    with pytest.raises(OptionError) as raised:
        check_keys_known([*known, "rope_thta", "elsewhere"], saved, now)
    assert raised.value.evidence == ("rope_thta: did you mean rope_theta?", "elsewhere")


def test_no_key_is_offered_for_tensors_that_do_not_fit() -> None:
    rank = Change("lora.r", "4", "8", frozenset({"lora.r"}), "adapters have another rank")
    check_changes_allowed([rank], ["lora"], "checkpoint-3", fits=False)
    with pytest.raises(MismatchError) as raised:
        check_changes_allowed([rank], [], "checkpoint-3", fits=False)
    assert "lora.r  4      8" in (text := raised.value.render())
    assert "do not fit" in text
    assert OPTION not in text


def test_a_leaf_of_a_nested_value_is_named_with_dots() -> None:
    saved, now = {"rope_scaling": LINEAR}, {"rope_scaling": {**LINEAR, "factor": 4.0}}
    assert "rope_scaling.factor  2.0    4.0" in refused(saved, now)
    assert refused(saved, now, "rope_scaling.factor") == ""
    assert refused(saved, now, "rope_scaling.rope_type") != ""


def test_an_incomplete_configuration_is_compared_by_its_own_keys_only() -> None:
    assert changed({"hidden_act": "silu"}, {"hidden_act": "silu", "rope_theta": 2e4}, complete=False) == []
    nested = ({"text_config": one} for one in ({"hidden_act": "silu"}, {"hidden_act": "silu", "rope_theta": 2e4}))
    assert changed(*nested, complete=False) == []
    (change,) = changed({"rope_scaling": {}}, {"rope_scaling": {"factor": 2.0}}, complete=False)
    assert change.key == "rope_scaling.factor"
    assert len(changed({"hidden_act": "silu"}, {"hidden_act": "silu", "rope_theta": 2e4})) == 1


def test_a_long_value_is_distinguished_by_its_digest() -> None:
    one, other = (value_text([*range(100), last]) for last in (1, 2))
    assert one != other
    assert len(one) < 80
