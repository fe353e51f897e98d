"""config.json of exports: of PaddleFormers' own configuration classes, and read by Transformers."""

from __future__ import annotations

import os
from typing import Any

import pytest

from paddleformers_fc.families import family_for
from tests.families.jobs import exported_configs
from tests.families.test_transformers import CASES
from tests.harness.on_ranks import run_on_ranks
from tools import config_readers
from verification.forkserver import ForkServer

LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
ROUTING = {"norm_topk_prob": True, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 2, "topk_group": 1}
DEEPSEEK = {**LATENT, **EXPERTS, **ROUTING, "n_routed_experts": 4, "first_k_dense_replace": 1}
TOY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "bfloat16",
    "architectures": ["AModel"],
    "use_cache": True,
}
# PaddleFormers reads another key for the experts of the one, and no nested configuration of the text of the others.
UNREAD = ("minimax_m2, of", "paddleocr_vl, ", "ernie4_5_moe_vl, ")
SOURCES: dict[str, dict[str, Any]] = {
    name: source for name, source in config_readers.sources().items() if not name.startswith(UNREAD)
}
READERS = config_readers.entries()
OLD, NEW_ONE = "4.57.1", "5.3.0"
WRITE = "FLEX_WRITE_READERS"

ROTARY = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor")
"""Keys that Transformers 5 replaces by ``rope_parameters``. An export has them as well, for other readers."""


def exported(ranks: ForkServer, sources: dict[str, dict[str, Any]], kept: bool, **changed: Any) -> dict[str, Any]:
    """The configurations that a process of PaddleFormers writes, by name."""
    (found,) = run_on_ranks(ranks, 1, exported_configs, sources=sources, kept=kept, changed=changed)
    return dict(found)


@pytest.fixture(scope="module")
def exports(ranks: ForkServer) -> dict[str, dict[str, Any]]:
    """The configuration of an export of every source."""
    return exported(ranks, SOURCES, kept=True)


def undeclared(source: dict[str, Any], changes: dict[str, list[Any]]) -> list[str]:
    """The changes that the product does not declare: other values than those of its reasons."""
    found, text = [], source.get("text_config", source)
    rotary = text.get("rope_parameters", {})
    for path, (before, after) in changes.items():
        key, *within = path.removeprefix("text_config.").split(".")
        full, sliding = rotary.get("full_attention", rotary), rotary.get("sliding_attention", {})
        described = {"rope_local_base_freq": sliding.get("rope_theta"), **full}
        declared = {
            # A family declares sizes under each of their names, and keys of layers that a class does not build.
            **dict.fromkeys(family_for(source).exported, after),
            # A text has the tie of the whole model: Transformers 4 and PaddleFormers read it there.
            "tie_word_embeddings": source.get("tie_word_embeddings") if path.startswith("text_config.") else None,
            # A window without an effect is None, as Transformers reads it.
            "sliding_window": None if not text.get("use_sliding_window") else before,
            # Exports are not quantized.
            "quantization_config": config_readers.LOST,
        }
        if key in (*ROTARY, "rope_parameters") and rotary:
            # Transformers 4 reads an absent scaling as None, or as a default, and either adds `type` to `rope_type`.
            name, own = (within or [key])[-1], sliding if "sliding_attention" in within else full
            declared[key] = after if name in ("type", "rope_scaling") else {**described, **own}.get(name)
        if key not in declared or declared[key] != after:
            found.append(f"{path}: {before} -> {after}")
    return found


def test_an_export_has_the_configuration_of_its_source_but_for_declared_changes(
    exports: dict[str, dict[str, Any]],
) -> None:
    changes = {name: config_readers.changes(source, exports[name]) for name, source in SOURCES.items()}
    assert {name: lines for name, one in changes.items() if (lines := undeclared(SOURCES[name], one))} == {}
    for name, one in exports.items():
        parts = (one, *(part for part in one.values() if isinstance(part, dict)))
        dtypes = {part[key] for part in parts for key in ("dtype", "torch_dtype") if key in part}
        assert dtypes == {"float32"}, name
    # The configurations that versions of Transformers read.
    if os.environ.get(WRITE):
        given = {name: {**READERS.get(name, {}), "changes": one} for name, one in changes.items()}
        config_readers.write({**READERS, **given})
    stored = {name: one["changes"] for name, one in config_readers.entries().items() if "changes" in one}
    assert changes == stored, f"run the steps of tools/config_readers.py ({WRITE}=1)"


@pytest.mark.parametrize("version", [OLD, NEW_ONE])
def test_transformers_reads_an_export_as_it_reads_the_source(version: str) -> None:
    read = {name: one[version] for name, one in READERS.items() if one.get(version, "unread") != "unread"}
    assert len(read) > 80
    sources = config_readers.sources()
    assert {name: lines for name, one in read.items() if (lines := undeclared(sources[name], one))} == {}


def test_transformers_4_reads_an_export_of_weights_of_transformers_5_as_the_published_ones() -> None:
    published = {name: one["published"] for name, one in READERS.items() if "published" in one}
    assert len(published) > 15
    for name, one in published.items():
        source = SOURCES[name]
        both = {
            key: pair for key, pair in one.items() if config_readers.LOST not in pair and "architectures" not in key
        }
        text = {
            key: pair for key, pair in both.items() if key.startswith("text_config.") or "text_config" not in source
        }
        assert undeclared(source, text) == [], name


def test_a_value_that_a_run_changes_is_exported_wherever_the_source_has_it(ranks: ForkServer) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 7e6, "factor": 2.0, "original_max_position_embeddings": 128}
    changed = {"max_position_embeddings": 256, "rope_parameters": yarn, "initializer_range": 0.5}
    sources = {name: SOURCES[name] for name in ("qwen3", "qwen2_5_vl", "qwen2_5_vl, saved by 5.3.0", "qwen3_vl_moe")}
    scaling = {key: value for key, value in yarn.items() if key != "rope_theta"}
    for name, export in exported(ranks, sources, True, **changed).items():
        found = config_readers.changes(sources[name], export)
        text = "text_config." if "text_config" in sources[name] else ""
        rotary = {"rope_parameters": yarn, "rope_scaling": scaling, "rope_theta": 7e6}
        part = export.get("text_config", export)
        assert {key: part[key] for key in rotary} == rotary, name
        assert found.pop(f"{text}max_position_embeddings") == [128, 256], name
        keys = {key.removeprefix("text_config.").partition(".")[0] for key in found}
        assert keys <= {*rotary, "sliding_window", "tie_word_embeddings"}, name


NEW: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("qwen3_moe", {**EXPERTS, "num_experts": 4}, {"num_experts": 4, "num_local_experts": 4, "use_cache": True}),
    ("minimax_m2", {**EXPERTS, "n_routed_experts": 4}, {"num_local_experts": 4, "intermediate_size": 16}),
    (
        "minimax_m2",
        {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1},
        {"num_local_experts": 4, "intermediate_size": 64, "num_nextn_predict_layers": 1},
    ),
    ("deepseek_v3", DEEPSEEK, {"num_nextn_predict_layers": 0}),
    (
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_use_aux_free": False, "num_nextn_predict_layers": 0, "use_bias": True},
        {"moe_use_aux_free": False, "num_nextn_predict_layers": 0, "mlp_bias": False, "lm_head_bias": False},
    ),
    ("ernie4_5_moe", {"moe_num_experts": 4, "use_bias": False}, {"moe_use_aux_free": True, "mlp_bias": "lost"}),
    ("ernie4_5", {"use_bias": True, "mlp_bias": True}, {"mlp_bias": True}),
]


def test_a_model_without_a_source_exports_every_key_that_describes_it(ranks: ForkServer) -> None:
    sources = {str(index): {"model_type": name, **TOY, **keys} for index, (name, keys, _) in enumerate(NEW)}
    written = exported(ranks, sources, kept=False)
    for index, (name, _, wanted) in enumerate(NEW):
        assert {key: written[str(index)].get(key, "lost") for key in wanted} == wanted, name


def test_sizes_that_the_class_of_minimax_m2_does_not_read_are_refused(ranks: ForkServer) -> None:
    # It takes n_routed_experts alone, and builds 256 experts in place of four.
    (message,) = exported(ranks, {"minimax_m2": CASES["minimax_m2"]["config"]}, kept=True).values()
    assert "num_local_experts and n_routed_experts are names of one key, and their values differ" in message
    assert "n_routed_experts: 256" in message
