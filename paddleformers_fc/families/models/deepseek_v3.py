"""DeepSeek V3: latent attention, unfused experts, prediction layers numbered after the last layer.

A prediction layer has a bias that canonical files lack, and does not have the norm, head and embedding that they repeat
in it. Without ``q_lora_rank`` the class still creates a norm for it, which nothing uses.
"""

from paddleformers_fc.families import blocks
from paddleformers_fc.families.declarations import Family, Numbers, declared, fresh, only

ATTENTION, FFN, PREDICTION = blocks.LAYER + ".self_attn", blocks.LAYER + ".mlp", "model.layers.{mtp}"
SPARSE = "experts and layer >= first_k_dense_replace and layer % moe_layer_freq == 0"

FAMILY = Family(
    name="deepseek_v3",
    model_types=("deepseek_v3",),
    statements=declared(
        blocks.ends(),
        blocks.norm(blocks.LAYER + ".{input,post_attention}_layernorm"),
        blocks.latent_attention(ATTENTION, down_bias="attention_bias"),
        fresh(ATTENTION + ".q_a_layernorm.weight", shape=("hidden",), where="not q_lora_rank"),
        only(f"not ({SPARSE})", blocks.ffn(FFN)),
        only(SPARSE, blocks.turned_router(FFN + ".gate"), blocks.score_correction(FFN + ".gate")),
        only(f"{SPARSE} and not fd_fallback", blocks.whole(blocks.ffn(FFN + ".experts.{expert}", "expert_ffn"))),
        only(f"{SPARSE} and fd_fallback", blocks.grouped_experts(FFN, "experts.gate_up_proj", "experts.down_proj")),
        only(SPARSE, blocks.ffn(FFN + ".shared_experts", "expert_ffn * n_shared_experts")),
        blocks.norm(PREDICTION + ".{enorm,hnorm}"),
        blocks.replicated(PREDICTION + ".eh_proj", "2 * hidden", "hidden", bias="True"),
    ),
    tied=(blocks.TIED_HEAD,),
    optional=(PREDICTION + ".eh_proj.bias", PREDICTION + "."),
    numbers=(Numbers("layer", "layers + mtp_layers"), Numbers("mtp", "mtp_layers", start="layers")),
    defaults={"moe_layer_freq": 1, "first_k_dense_replace": 0},
    tiny=dict(
        blocks.TINY | blocks.TINY_LATENT,
        n_routed_experts=4,
        n_shared_experts=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        num_nextn_predict_layers=1,
    ),
    exported=blocks.EXPORTED_PREDICTION,
)
