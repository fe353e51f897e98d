"""Phi-3 and Phi-4: [Q | K | V] and [gate | up] are fused in canonical files, and per rank in the model."""

from paddleformers_fc.families import language as lang

LAYER = (
    lang.same("input_layernorm.weight", "post_attention_layernorm.weight"),
    lang.qkv("self_attn.qkv_proj", "self_attn.qkv_proj", per_rank=True),
    lang.row("self_attn.o_proj", inputs="q"),
    lang.gate_up("mlp.gate_up_proj", "mlp.gate_up_proj"),
    lang.row("mlp.down_proj", inputs="ffn"),
)
FAMILY = lang.family(
    "phi3",
    lang.decoder("model.embed_tokens", "model.layers.{layer}", "model.norm", "lm_head", LAYER),
)
