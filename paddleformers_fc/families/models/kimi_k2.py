"""Kimi K2: latent attention, dense first layers, fused experts; of PaddleFleet's class."""

from paddleformers_fc.families import blocks
from paddleformers_fc.families.declarations import Family, Statements, declared, only


def _layer(layer: str, sparse: str) -> Statements:
    return declared(
        blocks.norm(layer + ".{input,post_attention}_layernorm"),
        blocks.latent_attention(layer + ".self_attn", down_bias="attention_bias"),
        only(f"not ({sparse})", blocks.fused_ffn(layer + ".mlp")),
        only(sparse, blocks.router(layer + ".mlp.gate"), blocks.score_correction(layer + ".mlp.gate")),
        only(sparse, blocks.fleet_experts(layer + ".mlp")),
        only(sparse, blocks.fused_ffn(layer + ".mlp.shared_experts", "expert_ffn * n_shared_experts")),
    )


FAMILY = Family(
    name="kimi_k2",
    model_types=("kimi_k2",),
    statements=declared(
        blocks.fleet_ends(),
        _layer(blocks.LAYER, "layer >= first_k_dense_replace"),
        blocks.fleet_prediction(_layer(blocks.PREDICTION, "True")),
    ),
    tied=(blocks.TIED_FLEET_HEAD,),
    optional=("model.layers.{mtp}.",),
    numbers=blocks.fleet_numbers(),
    defaults={"first_k_dense_replace": 3, "n_shared_experts": 1},
    tiny=dict(
        blocks.TINY | blocks.TINY_LATENT,
        n_routed_experts=4,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        moe_expert_fusion=True,
    ),
    exported=blocks.EXPORTED_PREDICTION,
)
