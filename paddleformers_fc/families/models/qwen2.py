"""Qwen 2: fused qkv with a bias, fused [gate | up]; in PaddleNLP's class only fused if the configuration says so."""

from paddleformers_fc.families import language as lang

NORMS = lang.same("input_layernorm.weight", "post_attention_layernorm.weight")
QKV = lang.qkv("self_attn.qkv_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=True)
OUTPUT = lang.row("self_attn.o_proj", inputs="q")
LAYER = (NORMS, QKV, OUTPUT, lang.gated("mlp.up_gate_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"))
FAMILY = lang.family(
    "qwen2",
    lang.ends("model.embed_tokens", "model.norm", "lm_head"),
    lang.layer("model.layers.{layer}", LAYER),
    classes=(lang.FLEET, lang.FORMERS),
    nlp=(
        NORMS,
        lang.when("fuse_attention_qkv", QKV),
        lang.unless("fuse_attention_qkv", lang.column("self_attn.q_proj", outputs="q", bias=True)),
        lang.unless("fuse_attention_qkv", lang.column("self_attn.k_proj", "self_attn.v_proj", outputs="kv", bias=True)),
        OUTPUT,
        lang.when("fuse_attention_ffn", lang.gate_up("mlp.gate_up_fused_proj", "mlp.gate_proj", "mlp.up_proj")),
        lang.unless("fuse_attention_ffn", lang.column("mlp.gate_proj", "mlp.up_proj", outputs="ffn")),
        lang.row("mlp.down_proj", inputs="ffn"),
    ),
)
