"""Qwen 2: fused qkv with a bias, fused [gate | up]; in PaddleNLP's class only fused if the configuration says so."""

from paddleformers_fc.families import language as lang

NORMS = lang.same("input_layernorm.weight", "post_attention_layernorm.weight")
QKV = lang.qkv("self_attn.qkv_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=True)
OUTPUT = lang.row("self_attn.o_proj", inputs="q")
FUSED_FFN = lang.gate_up("mlp.gate_up_fused_proj", "mlp.gate_proj", "mlp.up_proj")
FFN = (lang.fused_if("fuse_attention_ffn", FUSED_FFN), lang.row("mlp.down_proj", inputs="ffn"))
LAYER = (NORMS, QKV, OUTPUT, lang.gated("mlp.up_gate_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"))
FAMILY = lang.family(
    "qwen2",
    lang.decoder("model.embed_tokens", "model.layers.{layer}", "model.norm", "lm_head", LAYER),
    classes=(lang.FLEET, lang.FORMERS),
    nlp=(NORMS, lang.fused_if("fuse_attention_qkv", QKV), OUTPUT, FFN),
)
