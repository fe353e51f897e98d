"""Qwen 3 MoE: routed experts in all layers but ``mlp_only_layers``; of PaddleFleet's or of PaddleFormers' classes."""

from paddleformers_fc.families import blocks
from paddleformers_fc.families.declarations import Family, declared, only

FFN = blocks.LAYER + ".mlp"
SPARSE = blocks.STEPPED

FAMILY = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    statements=declared(
        blocks.either_ends(),
        blocks.norm(blocks.LAYER + ".{input,post_attention}_layernorm"),
        blocks.fused_attention(blocks.LAYER + ".self_attn", bias="attention_bias", output_bias="attention_bias"),
        blocks.either_head_norms(blocks.LAYER + ".self_attn"),
        only(f"not ({SPARSE})", blocks.fused_ffn(FFN)),
        only(SPARSE, blocks.either_router(FFN + ".gate"), blocks.either_experts(FFN)),
    ),
    tied=(blocks.TIED_HEAD, blocks.TIED_FLEET_HEAD),
    defaults={"decoder_sparse_step": 1},
    tiny=dict(blocks.TINY, head_dim=8, num_experts=4, moe_intermediate_size=16, mlp_only_layers=[0]),
    exported={"num_experts": "experts", "num_local_experts": "experts"},
)
