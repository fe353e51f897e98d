"""Files that lack what a model has, or hold what it does not want: fresh, dropped, or refused; never guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from paddleformers_fc.distributed.channel import LocalChannel
from paddleformers_fc.errors import MismatchError
from paddleformers_fc.execute.load import LoadReport, prepare_weights
from paddleformers_fc.families import OptionalNames
from tests.families.spaces import BY_NAME, live_weights, model_of, settings, spaces
from tests.mapping.numbers import Arrays

INITIAL = -1.0


def load(tmp_path: Path, name: str, stored: Arrays, **changes: Any) -> tuple[LoadReport, Arrays]:
    """Load a file into a model that was initialised with :data:`INITIAL`: the report, and what the model then holds."""
    family = BY_NAME[name]
    config = settings(family, **changes)
    rules, _, _ = spaces(family, config)
    save_file({key: value.astype(np.float32) for key, value in stored.items()}, tmp_path / "model.safetensors")
    weights = live_weights(rules, INITIAL)
    report = prepare_weights(tmp_path, {"model_state": weights}, model_of(config), LocalChannel()).fill()
    return report, {key: weight.local_tensor.numpy() for key, weight in weights.items()}


def canonical(name: str, **changes: Any) -> Arrays:
    """The open weights of a configuration."""
    family = BY_NAME[name]
    return spaces(family, settings(family, **changes))[1]


def held(arrays: Arrays, names: set[str]) -> bool:
    """Whether these, and no others, still have their initial values."""
    return {name for name, array in arrays.items() if (array == INITIAL).all()} == names


@pytest.mark.parametrize("depth", [0, 1])
def test_prediction_blocks_that_a_file_lacks_keep_their_initial_values(tmp_path: Path, depth: int) -> None:
    config = {"moe_layer_start_index": 0, "tie_word_embeddings": False}
    stored = canonical("ernie4_5_moe", num_nextn_predict_layers=depth, **config)
    report, found = load(tmp_path, "ernie4_5_moe", stored, num_nextn_predict_layers=2, **config)
    blocks = [name for name in found if name.startswith("model.mtp_")]
    lacking = {name for name in blocks if depth == 0 or ".1." in name.split("experts")[0]}
    assert set(report.fresh) == lacking
    assert held(found, lacking)
    assert report.dropped == ()


def test_a_prediction_block_with_a_hole_is_refused_and_the_hole_named(tmp_path: Path) -> None:
    stored = canonical("ernie4_5_moe", tie_word_embeddings=False)
    del stored["model.mtp_block.1.self_attn.k_proj.weight"]
    with pytest.raises(MismatchError, match=r"mtp_block.1.self_attn.(k_proj|qkv_proj)"):
        load(tmp_path, "ernie4_5_moe", stored, tie_word_embeddings=False)


def test_the_bias_of_aux_free_routing_that_one_layer_of_a_file_lacks_is_missing(tmp_path: Path) -> None:
    config = {"num_nextn_predict_layers": 0, "tie_word_embeddings": False}
    stored = canonical("ernie4_5_moe", **config)
    del stored["model.layers.1.mlp.moe_statics.e_score_correction_bias"]
    with pytest.raises(MismatchError, match=r"model\.layers\.1\.mlp\.moe_statics\.e_score_correction_bias"):
        load(tmp_path, "ernie4_5_moe", stored, **config)


def test_repeated_tensors_of_a_deepseek_prediction_layer_are_dropped_and_its_missing_bias_is_uninitialized(
    tmp_path: Path,
) -> None:
    stored = canonical("deepseek_v3")
    layer = "model.layers.2"
    del stored[f"{layer}.eh_proj.bias"]
    repeated = {f"{layer}.shared_head.norm.weight": (32,), f"{layer}.embed_tokens.weight": (64, 32)}
    stored |= {name: np.ones(shape) for name, shape in repeated.items()}
    report, found = load(tmp_path, "deepseek_v3", stored)
    assert set(report.dropped) == set(repeated)
    assert report.fresh == (f"{layer}.eh_proj.bias",)
    assert held(found, {f"{layer}.eh_proj.bias"})


@pytest.mark.parametrize("leaf", ["o_proj.weight_scale_inv", "q_b_proj.bias"])
def test_tensors_of_a_prediction_layer_that_the_model_has_are_not_dropped(tmp_path: Path, leaf: str) -> None:
    name = f"model.layers.2.self_attn.{leaf}"
    stored = canonical("deepseek_v3") | {name: np.ones(1)}
    with pytest.raises(MismatchError, match=name):
        load(tmp_path, "deepseek_v3", stored)
    report, found = load(tmp_path, "deepseek_v3", stored, num_nextn_predict_layers=0)
    assert set(report.dropped) == {one for one in stored if one.startswith("model.layers.2.")}
    assert held(found, set())


@pytest.mark.parametrize(("name", "predicts"), [("deepseek_v3", 0), ("kimi_k2", 1), ("glm4_moe", 1)])
def test_a_file_that_is_deeper_than_its_model_is_refused_and_its_layers_are_no_prediction_layers(
    tmp_path: Path, name: str, predicts: int
) -> None:
    stored = canonical(name, num_hidden_layers=4, num_nextn_predict_layers=predicts)
    with pytest.raises(MismatchError, match=r"model.layers.\{2...3\}.input_layernorm.weight"):
        load(tmp_path, name, stored, num_hidden_layers=2, num_nextn_predict_layers=0)


def test_layers_of_the_model_itself_are_never_optional() -> None:
    family = BY_NAME["glm4_moe"]
    optional = OptionalNames(family, model_of(settings(family, num_hidden_layers=12)))
    assert "model.layers.11.mlp.gate.weight" not in optional
    assert "model.layers.12.mlp.gate.weight" in optional
    assert optional.group("model.layers.12.enorm.weight") == optional.group("model.layers.12.hnorm.weight")
    assert optional.group("model.layers.12.enorm.weight") != optional.group("model.layers.13.enorm.weight")
    for number in ("9" * 5000, "\u0666\u0661"):
        assert f"model.layers.{number}.enorm.weight" not in optional


@pytest.mark.parametrize("name", ["llama", "deepseek_v4", "ernie4_5_moe", "glm4_moe", "kimi_k2", "qwen2_5_vl"])
def test_a_tied_head_that_a_file_repeats_is_taken_where_it_is_equal_and_refused_where_it_is_not(
    tmp_path: Path, name: str
) -> None:
    stored = canonical(name, tie_word_embeddings=True)
    (owner,) = (key for key in stored if key == "embed.weight" or key.endswith("embed_tokens.weight"))
    (head,) = canonical(name, tie_word_embeddings=False).keys() - stored.keys()
    embedding = stored[owner]
    report, found = load(tmp_path, name, stored | {head: embedding}, tie_word_embeddings=True)
    assert report.dropped == ()
    assert held(found, set())
    with pytest.raises(MismatchError, match=f"{head} = {owner}"):
        load(tmp_path, name, stored | {head: 2 * embedding}, tie_word_embeddings=True)


KEY_HEADS = {"linear_num_key_heads": 2, "linear_key_head_dim": 4}
VISION = settings(BY_NAME["qwen2_5_vl"])["vision_config"]
OTHER_HEADS = [
    ("qwen3_next", settings(BY_NAME["qwen3_next"], **KEY_HEADS), "linear_num_key_heads: stored 2, expected 4"),
    (
        "qwen2_5_vl",
        settings(BY_NAME["qwen2_5_vl"], vision_config={**VISION, "num_heads": 2}),
        r"vision_config\.num_attention_heads: stored 2, expected 4",
    ),
]


@pytest.mark.parametrize(("name", "stored", "message"), OTHER_HEADS, ids=[case[0] for case in OTHER_HEADS])
def test_another_number_of_heads_is_refused_although_no_shape_shows_it(
    tmp_path: Path, name: str, stored: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(MismatchError, match=message):
        load(tmp_path, name, canonical(name))
    (tmp_path / "config.json").write_text(json.dumps(settings(BY_NAME[name])))
    load(tmp_path, name, canonical(name))
