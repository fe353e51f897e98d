"""What describes a model is lost between its configuration, its open weights and an export."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddleformers_fc.execute.export import export_checkpoint
from paddleformers_fc.families import family_for
from paddleformers_fc.layout.grid import parse_grid
from paddleformers_fc.plan.simulate import declared_model
from paddleformers_fc.trainer.description import describe_model
from paddleformers_fc.trainer.documents import model_config
from tests.corruption.guarantees import Seen, fault
from tests.corruption.jobs import config_by_stock, export_by_stock
from tests.families import native
from tests.families.test_exported_configs import READERS, SOURCES, exported
from tests.families.test_transformers import CASES
from tests.harness.on_ranks import run_on_ranks
from tests.harness.tiny import SINGLE
from tests.trainer.test_exported_documents import GENERATION, exports, live, source_of
from tools.config_readers import changes, read
from verification import simulate_ranks
from verification.forkserver import ForkServer


def described(directory: Path) -> tuple[Any, bytes | None]:
    """``use_cache`` and the generation settings of an export."""
    use_cache = json.loads((directory / "config.json").read_text())["use_cache"]
    generation = directory / "generation_config.json"
    return use_cache, generation.read_bytes() if generation.exists() else None


@pytest.mark.slow
@fault("G80")
def test_g80_an_export_keeps_the_settings_of_its_source(ranks: ForkServer, tmp_path: Path) -> None:
    source, config = source_of(ranks, tmp_path, "llama")
    stock = tmp_path / "stock"
    run_on_ranks(ranks, 1, export_by_stock, source=source, target=stock)
    assert described(stock) == (False, None)
    for path in exports(ranks, tmp_path, SINGLE, model_type="llama", model=live(config), source=source).values():
        assert described(path) == (True, GENERATION)


@fault("G81")
def test_g81_transformers_builds_an_exported_gpt_oss(ranks: ForkServer) -> None:
    source = CASES["gpt_oss"]["config"]
    (stock,) = run_on_ranks(ranks, 1, config_by_stock, source=source)
    assert read(stock)["num_local_experts"] == 128
    (ours,) = exported(ranks, {"gpt_oss": source}, kept=False).values()
    found, wanted = read(ours), read(source)
    keys = ("num_local_experts", "rope_parameters")
    assert {key: found[key] for key in keys} == {key: wanted[key] for key in keys}


@fault("G114")
def test_g114_transformers_reads_the_rope_settings_of_an_exported_vision_language_model(ranks: ForkServer) -> Seen:
    name, keys = "qwen3_vl, saved by 5.3.0", ("rope_theta", "mrope_section")
    (stock,) = run_on_ranks(ranks, 1, config_by_stock, source=SOURCES[name])
    (ours,) = exported(ranks, {name: SOURCES[name]}, kept=True).values()
    found = [read(one)["text_config"]["rope_parameters"] for one in (SOURCES[name], stock, ours)]
    wanted, lost, kept = ({key: one.get(key) for key in keys} for one in found)
    assert kept == wanted == {"rope_theta": 5000000, "mrope_section": [2, 1, 1]}
    assert changes(SOURCES[name], ours) == READERS[name]["changes"]
    # Transformers 4 reads it as the published weights.
    assert not any(key in path for path in READERS[name]["published"] for key in keys if "parameters" not in path)
    read_so = f"`rope_theta: {kept['rope_theta']}` and `mrope_section: {kept['mrope_section']}`"
    return {"lost": lost["rope_theta"], "kept": read_so}


NORM = "input_layernorm.weight"
SIZES = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 16,
    "moe_intermediate_size": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "n_routed_experts": 2,
}


@fault("G10")
def test_g10_layers_are_mapped_by_the_live_configuration(tmp_path: Path) -> None:
    from paddleformers.transformers.glm4_moe.configuration import Glm4MoeConfig

    config = Glm4MoeConfig(**SIZES, num_empty_layers_add_in_head=1, tie_word_embeddings=False)
    live = SimpleNamespace(config=config, config_to_save=config, is_fleet=True, parameters=list)
    bound = {name: stock_layer(settings) for name, settings in (("live", vars(config)), ("file", model_config(live)))}
    assert bound == {"live": 1, "file": 0}
    described = describe_model(live)
    model = declared_model(family_for(described.config), described, parse_grid("dp=1"))
    held = simulate_ranks.filled(model.roles(0), simulate_ranks.value_of)
    simulate_ranks.save(tmp_path / "checkpoint-1", [held], model)
    export_checkpoint(tmp_path / "checkpoint-1", tmp_path / "hf")
    exported = load_file(tmp_path / "hf/model.safetensors")
    weights = held["model_state"]
    for layer in range(2):
        own = weights[f"model.layers.{layer + 1}.{NORM}"].local_tensor.array
        assert np.array_equal(exported[f"model.layers.{layer}.{NORM}"], own)


def stock_layer(settings: dict[str, Any]) -> int:
    """The layer to which PaddleFormers' statements bind the norm of canonical layer 0."""
    known = {key: value for key, value in settings.items() if key.isidentifier()}
    statements = native.statements("glm4_moe", known, inverse=False, fleet=True)
    (found,) = (one for one in statements if one.startswith(f"model.layers.0.{NORM} "))
    return int(found.split("->")[1].split(".")[2])
