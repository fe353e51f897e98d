"""GLM 4 MoE: dense first layers, shared experts, prediction layers numbered after the last layer.

PaddleFleet's class may count empty layers before the first one: a model's numbers are larger than canonical ones.
"""

from paddleformers_fc.families import blocks
from paddleformers_fc.families.declarations import Family, Statements, declared, only


def _layer(layer: str, sparse: str) -> Statements:
    attention, ffn = layer + ".self_attn", layer + ".mlp"
    return declared(
        blocks.norm(layer + ".{input,post_attention}_layernorm"),
        blocks.fused_attention(attention, bias="attention_bias"),
        only("use_qk_norm", blocks.norm(attention + ".{q,k}_norm", "head")),
        only(f"not ({sparse})", blocks.fused_ffn(ffn)),
        only(sparse, blocks.router(ffn + ".gate"), blocks.score_correction(ffn + ".gate"), blocks.either_experts(ffn)),
        only(sparse, blocks.fused_ffn(ffn + ".shared_experts", "expert_ffn * n_shared_experts")),
    )


FAMILY = Family(
    name="glm4_moe",
    model_types=("glm4_moe",),
    statements=declared(
        blocks.either_ends(),
        _layer(blocks.LAYER, "layer >= first_k_dense_replace"),
        blocks.fleet_prediction(_layer(blocks.PREDICTION, "True")),
    ),
    tied=(blocks.TIED_HEAD, blocks.TIED_FLEET_HEAD),
    optional=("model.layers.{mtp}.",),
    sizes={"mtp_layers": "(mtp_num_layers or num_nextn_predict_layers or 0) * is_fleet"},
    numbers=blocks.either_numbers(),
    defaults={"first_k_dense_replace": 1, "n_shared_experts": 1},
    tiny=dict(
        blocks.TINY,
        head_dim=8,
        use_qk_norm=True,
        n_routed_experts=4,
        moe_intermediate_size=16,
        num_nextn_predict_layers=1,
        num_empty_layers_add_in_head=1,
    ),
    exported=blocks.EXPORTED_PREDICTION,
)
