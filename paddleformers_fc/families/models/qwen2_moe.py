"""Qwen 2 MoE: routed experts and one shared expert with a gate; of PaddleFleet's or of PaddleFormers' classes."""

from paddleformers_fc.families import blocks
from paddleformers_fc.families.declarations import Family, declared, linear, only, renamed

FFN = blocks.LAYER + ".mlp"
SPARSE = blocks.STEPPED
GATE = FFN + ".shared_expert_gate.weight"

FAMILY = Family(
    name="qwen2_moe",
    model_types=("qwen2_moe",),
    statements=declared(
        blocks.either_ends(),
        blocks.norm(blocks.LAYER + ".{input,post_attention}_layernorm"),
        blocks.fused_attention(blocks.LAYER + ".self_attn", bias="qkv_bias"),
        only(f"not ({SPARSE})", blocks.fused_ffn(FFN)),
        only(
            SPARSE,
            blocks.either_router(FFN + ".gate"),
            blocks.either_experts(FFN),
            only("not is_fleet", blocks.fused_ffn(FFN + ".shared_expert", "shared_ffn")),
            only("not is_fleet", linear(GATE, shape=("hidden", "1"))),
            only(
                "is_fleet",
                renamed({"shared_experts": "shared_expert"}, blocks.fused_ffn(FFN + ".shared_experts", "shared_ffn")),
                linear(FFN + ".shared_experts.gate_weight", GATE, shape=("hidden", "1")),
            ),
        ),
    ),
    tied=(blocks.TIED_HEAD, blocks.TIED_FLEET_HEAD),
    sizes={"shared_ffn": "shared_expert_intermediate_size"},
    defaults={"qkv_bias": True, "decoder_sparse_step": 1},
    tiny=dict(blocks.TINY, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=24),
)
