"""``families`` lists the families, and ``aoa`` prints their statements, in both directions, as stock reads them."""

from __future__ import annotations

import json
from pathlib import Path

from paddleformers_fc.families import own_families
from paddleformers_fc.families.registry import OWN
from tests.cli.support import run
from tests.parity.evidence import NOT_COMPARED


def test_every_family_is_listed_with_the_libraries_of_its_classes() -> None:
    lines = {line.split()[0]: line for line in run("families").out.splitlines() if line.strip()}
    assert [one.name for one in own_families()] == [*OWN]
    assert lines.keys() >= {one.name for one in own_families()}
    assert lines["qwen2"].split()[1:] == ["PaddleFleet,", "PaddleFormers,", "PaddleNLP"]
    assert lines["llama"].split()[1:] == ["PaddleFormers,", "PaddleNLP"]
    assert {name for name in lines if lines[name].split()[1:] == ["PaddleFleet"]} == NOT_COMPARED.keys()


def test_a_models_own_configuration_decides(tmp_path: Path) -> None:
    config = {"model_type": "ernie4_5", "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({**config, **sizes}))
    outcome = run("aoa", tmp_path)
    assert outcome.code == 0
    assert "fused_qkv, num_heads=8, num_key_value_groups=2" in outcome.out


def test_the_toy_sizes_are_on_the_error_stream_or_in_the_document() -> None:
    shown = run("aoa", "llama", "--toy")
    assert "hidden_size=" in shown.err
    assert "hidden_size=" not in shown.out
    assert run("aoa", "llama", "--toy", "--json").document["toy_sizes"]["hidden_size"] > 0
