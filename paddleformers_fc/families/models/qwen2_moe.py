"""Qwen 2 MoE: routed experts and one shared expert with a gate, which has another name in PaddleFleet's class."""

from paddleformers_fc.families import language as lang

SHARED = lang.gated("up_gate_proj", "gate_proj", "up_proj", "down_proj", "shared_ffn")
SPARSE = (
    lang.router("mlp.gate"),
    lang.experts("mlp.experts.{expert}", lang.gated("up_gate_proj", "gate_proj", "up_proj", "down_proj", "expert_ffn")),
    lang.of_class(lang.FORMERS, lang.layer("mlp.shared_expert", SHARED)),
    lang.of_class(lang.FLEET, lang.layer("mlp.shared_experts", SHARED, file="mlp.shared_expert")),
    lang.transposed("mlp.shared_expert_gate.weight", fleet="mlp.shared_experts.gate_weight", shape=("hidden", 1)),
)
LAYER = (
    lang.same("input_layernorm.weight", "post_attention_layernorm.weight"),
    lang.qkv("self_attn.qkv_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias="qkv_bias"),
    lang.row("self_attn.o_proj", inputs="q"),
    lang.when(lang.stepped, SPARSE),
    lang.unless(lang.stepped, lang.gated("mlp.up_gate_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")),
)
FAMILY = lang.family(
    "qwen2_moe",
    lang.decoder("model.embed_tokens", "model.layers.{layer}", "model.norm", "lm_head", LAYER),
    classes=(lang.FLEET, lang.FORMERS),
    sizes={"shared_ffn": "shared_expert_intermediate_size"},
    defaults={"qkv_bias": True, "decoder_sparse_step": 1},
    tiny={"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
)
