"""Llama: attention and feed-forward as in files, or fused if the configuration says so."""

from paddleformers_fc.families import language as lang

QKV = lang.qkv("self_attn.qkv_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias="attention_bias")
GATE_UP = lang.gate_up("mlp.gate_up_fused_proj", "mlp.gate_proj", "mlp.up_proj", bias="mlp_bias")
LAYER = (
    lang.same("input_layernorm.weight", "post_attention_layernorm.weight"),
    lang.fused_if("fuse_attention_qkv", QKV),
    lang.row("self_attn.o_proj", inputs="q", bias="attention_bias"),
    lang.fused_if("fuse_attention_ffn", GATE_UP),
    lang.row("mlp.down_proj", inputs="ffn", bias="mlp_bias"),
)
# Other classes of this family use another name for the same layer.
OTHER = lang.alias(lang.gate_up("mlp.up_gate_proj", "mlp.gate_proj", "mlp.up_proj"))
FAMILY = lang.family(
    "llama",
    lang.decoder("model.embed_tokens", "model.layers.{layer}", "model.norm", "lm_head", LAYER, OTHER),
    lang.optional("model.layers.{layer}.self_attn.rotary_emb.inv_freq"),
    nlp=LAYER,
    # The attention of PaddleNLP's class has no biases.
    sizes={"attention_bias": lambda attention_bias, is_nlp: attention_bias and not is_nlp},
)
