"""Mappings that were proved and wrong: what the model was built with is not in its configuration file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from paddleformers_fc.execute.export import export_checkpoint
from paddleformers_fc.families import family_for
from paddleformers_fc.layout.grid import parse_grid
from paddleformers_fc.plan.simulate import declared_model
from paddleformers_fc.trainer.description import describe_model
from paddleformers_fc.trainer.documents import model_config
from tests.corruption.guarantees import Observed, fault
from tests.families import native
from verification import simulate_ranks

NORM = "input_layernorm.weight"


@fault("G10", "one empty layer before the first, which the `config.json` that PaddleFormers writes does not hold")
def test_g10_layers_are_bound_by_what_the_model_was_built_with(tmp_path: Path) -> Observed:
    from paddleformers.transformers.glm4_moe.configuration import Glm4MoeConfig

    config = Glm4MoeConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        moe_intermediate_size=4,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        n_routed_experts=2,
        num_empty_layers_add_in_head=1,
        tie_word_embeddings=False,
    )
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
    return Observed(
        "its statements bind canonical layer 0 to the model's layer 1 by the live configuration, and to layer 0 by "
        "that of the file",
        "saves, resumes and exports bind it to layer 1 by the live configuration, which `mapping.json` stores",
    )


def stock_layer(settings: dict[str, Any]) -> int:
    """The layer to which PaddleFormers' statements bind the norm of canonical layer 0."""
    known = {key: value for key, value in settings.items() if key.isidentifier()}
    statements = native.statements("glm4_moe", known, inverse=False, fleet=True)
    (found,) = (one for one in statements if one.startswith(f"model.layers.0.{NORM} "))
    return int(found.split("->")[1].split(".")[2])
