"""Gemma 3 (text): four norms per layer, per-head norms, and an embedding that tensor parallelism does not cut."""

from paddleformers_fc.families import language as lang

LAYER = (
    lang.same("input_layernorm.weight", "post_attention_layernorm.weight"),
    lang.same("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"),
    lang.qkv("self_attn.qkv_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias="attention_bias"),
    lang.row("self_attn.o_proj", inputs="q", bias="attention_bias"),
    lang.same("self_attn.q_norm.weight", "self_attn.k_norm.weight", shape=("head",)),
    lang.gated("mlp.up_gate_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", bias="mlp_bias"),
)
FAMILY = lang.family(
    "gemma3_text",
    lang.ends("model.embed_tokens", "model.norm", "lm_head", cut=None),
    lang.layer("model.layers.{layer}", LAYER),
    defaults={"head_dim": 256, "tie_word_embeddings": True},
)
