"""ERNIE 4.5 (dense): fused qkv per kv head, fused [gate | up] per tensor-parallel rank.

In Transformers, ``use_bias`` enables biases in attention and feed-forward. In PaddleFormers it only affects attention,
and ``mlp_bias`` the feed-forward, so exports contain both keys.
"""

from typing import Any

from paddleformers_fc.families import language as lang


def ffn_bias(mlp_bias: Any, use_bias: Any) -> Any:
    """Return whether the feed-forward has biases."""
    return use_bias if mlp_bias is None else mlp_bias


EXPORTED_BIASES = {
    "mlp_bias": lambda mlp_bias, use_bias: (mlp_bias or False) if use_bias else None,
    "lm_head_bias": lambda lm_head_bias, use_bias: (lm_head_bias or False) if use_bias else None,
}
ATTENTION = (
    lang.same("input_layernorm.weight", "post_attention_layernorm.weight"),
    lang.qkv("self_attn.qkv_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias="use_bias"),
    lang.row("self_attn.o_proj", inputs="q", bias="use_bias"),
)
FFN = lang.gated("mlp.up_gate_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", bias=ffn_bias)
FAMILY = lang.family(
    "ernie4_5",
    lang.decoder("model.embed_tokens", "model.layers.{layer}", "model.norm", "lm_head", ATTENTION, FFN),
    defaults={"head_dim": 128, "tie_word_embeddings": True},
    tiny={"head_dim": 4, "use_bias": True, "mlp_bias": False},
    exported=EXPORTED_BIASES,
)
