"""Qwen 3: Qwen 2 with per-head norms."""

from paddleformers_fc.families import language as lang

LAYER = (
    lang.same("input_layernorm.weight", "post_attention_layernorm.weight"),
    lang.qkv("self_attn.qkv_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias="attention_bias"),
    lang.row("self_attn.o_proj", inputs="q", bias="attention_bias"),
    lang.same("self_attn.q_norm.weight", fleet="self_attn.q_layernorm.weight", shape=("head",)),
    lang.same("self_attn.k_norm.weight", fleet="self_attn.k_layernorm.weight", shape=("head",)),
    lang.gated("mlp.up_gate_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
FAMILY = lang.family(
    "qwen3",
    lang.decoder("model.embed_tokens", "model.layers.{layer}", "model.norm", "lm_head", LAYER),
    classes=(lang.FLEET, lang.FORMERS),
    defaults={"head_dim": 128},
)
