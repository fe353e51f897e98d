"""Why the Llama matrix has no fused rows: PaddleFormers 1.2.0 accepts the keys and builds unfused layers all the same.

When this fails, upstream builds them, and the matrix of fused Llama can be run; the family declares them already.
"""

from __future__ import annotations

from pathlib import Path

from paddleformers_fc.families import ModelDescription, ModelTensor, bind, family_for
from paddleformers_fc.mapping import prove
from tests.harness import tiny
from verification.forkserver import ForkServer

FUSED = {"fuse_attention_qkv": True, "fuse_attention_ffn": True}


def names(layout: dict[str, object], output_dir: str) -> list[str]:
    """A job: the tensors of a Llama that is asked to fuse."""
    args = tiny.training_arguments(layout, output_dir)
    return sorted(tiny.build("llama", layout, args, **FUSED).sharded_state_dict())


def test_a_llama_with_the_options_of_fusion_does_not_fuse(ranks: ForkServer, tmp_path: Path) -> None:
    job = {"layout": tiny.SINGLE.to_json(), "output_dir": str(tmp_path)}
    (found,) = ranks.run("tests.verification.matrix.test_fused_llama:names", 1, job).values
    assert "model.layers.0.self_attn.q_proj.weight" in found
    assert "model.layers.0.mlp.gate_proj.weight" in found
    assert not [name for name in found if "qkv" in name or "gate_up" in name]


def test_a_fused_llama_is_declared_and_proved_at_every_degree() -> None:
    config = {
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "hidden_size": 16,
        "head_dim": 4,
    }
    config["intermediate_size"] = 24
    for tp in (1, 2, 4):
        tensors = [
            ModelTensor("model.layers.0.self_attn.qkv_proj.weight", (16, 48), "float32", (1, tp)),
            ModelTensor("model.layers.0.mlp.gate_up_fused_proj.weight", (16, 48), "float32", (1, tp)),
        ]
        mapping = bind(family_for(config), ModelDescription(config), tensors).mapping()
        prove(mapping)
        prove(mapping.reversed())
        assert "model.layers.0.self_attn.k_proj.weight" in mapping.sources
