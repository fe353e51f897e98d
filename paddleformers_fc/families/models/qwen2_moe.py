"""Qwen 2 MoE: routed experts and one shared expert with a gate, which PaddleFleet's class names in another way."""

from paddleformers_fc.families import language as lang

GATE, GATE_SHAPE = "mlp.shared_expert_gate.weight", ("hidden", "1")
SHARED = lang.fused_ffn("mlp.shared_expert", "shared_ffn")
FLEET_GATE = lang.linear("mlp.shared_experts.gate_weight", GATE, GATE_SHAPE)
FLEET_SHARED = lang.renamed({"shared_experts": "shared_expert"}, lang.fused_ffn("mlp.shared_experts", "shared_ffn"))
SPARSE = lang.declared(
    lang.routed_ffn("mlp"),
    lang.of_class(lang.FORMERS, SHARED, lang.linear(GATE, shape=GATE_SHAPE)),
    lang.of_class(lang.FLEET, FLEET_SHARED, FLEET_GATE),
)
FAMILY = lang.family(
    "qwen2_moe",
    classes=(lang.FLEET, lang.FORMERS),
    layer=[
        lang.norm("{input,post_attention}_layernorm"),
        lang.fused_attention("self_attn", bias="qkv_bias"),
        lang.choice(lang.STEPPED, SPARSE, lang.fused_ffn("mlp")),
    ],
    sizes={"shared_ffn": "shared_expert_intermediate_size"},
    defaults={"qkv_bias": True, "decoder_sparse_step": 1},
    tiny={"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
)
