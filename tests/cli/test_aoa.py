"""``aoa``: statements of every family, in both directions, that stock reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paddleformers_fc.families import own_families
from tests.cli.support import run


def test_llama_is_printed_forward_and_reversed() -> None:
    forward, reverse = run("aoa", "llama", "--toy"), run("aoa", "llama", "--toy", "--reverse")
    layer = "model.layers.$LAYER_ID.self_attn.q_proj.weight"
    assert forward.code == reverse.code == 0
    assert f"{layer}^T -> {layer}" in forward.out.splitlines()
    assert f"{layer}^T -> {layer}" in reverse.out.splitlines()


@pytest.mark.parametrize("family", [family.name for family in own_families()])
def test_every_family_is_rendered_or_refused_with_a_reason(family: str) -> None:
    for options in ((), ("--reverse",)):
        outcome = run("aoa", family, "--toy", "--tp", 2, *options, "--json")
        document = outcome.document
        if outcome.code == 0:
            assert document["family"] == family
            assert document["aoa_statements"]
        else:
            assert document["error"] == "MappingError"
            assert document["evidence"]


def test_a_models_own_configuration_decides(tmp_path: Path) -> None:
    config = {"model_type": "ernie4_5", "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({**config, **sizes}))
    outcome = run("aoa", tmp_path)
    assert outcome.code == 0
    assert "fused_qkv, num_heads=8, num_key_value_groups=2" in outcome.out


def test_a_family_without_sizes_is_refused_with_its_toy_sizes(tmp_path: Path) -> None:
    refused = run("aoa", "llama")
    assert (refused.code, refused.out) == (2, "")
    assert "hidden_size=" in refused.err
    assert "--toy" in refused.err
    assert run("aoa", "llama", "--json").document["error"] == "OptionError"
    shown = run("aoa", "llama", "--toy")
    assert "hidden_size=" in shown.err
    assert "hidden_size=" not in shown.out
    assert run("aoa", "llama", "--toy", "--json").document["toy_sizes"]["hidden_size"] > 0
    assert run("aoa", tmp_path, "--toy").code == 2
    assert run("aoa", tmp_path).code == 2


def test_a_degree_that_does_not_divide_the_model_is_refused() -> None:
    outcome = run("aoa", "llama", "--toy", "--tp", 3, "--json")
    assert outcome.code == 2
    assert "num_attention_heads: 8" in outcome.document["evidence"]
    assert run("aoa", "llama", "--toy", "--tp", 0).code == 2


def test_an_unknown_name_is_refused_with_the_known_families() -> None:
    outcome = run("aoa", "unheard_of", "--json")
    assert outcome.code == 2
    assert "llama" in outcome.document["evidence"][0]
