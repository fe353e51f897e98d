"""Qwen 2 MoE: routed experts and one shared expert with a gate, which PaddleFleet's class names in another way."""

from paddleformers_fc.families.declarations import FLEET, FORMERS, choice, declared, linear, of_class, renamed
from paddleformers_fc.families.language import STEPPED, family, fused_attention, fused_ffn, norm, routed_ffn

GATE = "mlp.shared_expert_gate.weight"
SHARED = {FORMERS: ("mlp.shared_expert", GATE), FLEET: ("mlp.shared_experts", "mlp.shared_experts.gate_weight")}
SPARSE = declared(
    routed_ffn("mlp"),
    *(
        of_class(
            model_class,
            renamed({"shared_experts": "shared_expert"}, fused_ffn(scope, "shared_ffn")),
            linear(gate, GATE, shape=("hidden", "1")),
        )
        for model_class, (scope, gate) in SHARED.items()
    ),
)

FAMILY = family(
    "qwen2_moe",
    classes=(FLEET, FORMERS),
    layer=[
        norm("{input,post_attention}_layernorm"),
        fused_attention("self_attn", bias="qkv_bias"),
        choice(STEPPED, SPARSE, fused_ffn("mlp")),
    ],
    sizes={"shared_ffn": "shared_expert_intermediate_size"},
    defaults={"qkv_bias": True, "decoder_sparse_step": 1},
    tiny={"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
)
