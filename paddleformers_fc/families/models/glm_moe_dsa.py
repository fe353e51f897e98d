"""GLM 5: latent attention with a sparse indexer, dense first layers, fused experts, prediction layers."""

from paddleformers_fc.families import language as lang

SPARSE = lang.routed_ffn("mlp", "n_shared_experts", correction=True)
LAYER = (
    lang.norm("{input,post_attention}_layernorm"),
    lang.latent_attention("self_attn", down_bias="attention_bias"),
    lang.only("index_n_heads", lang.indexer("self_attn")),
    lang.choice(lang.AFTER_DENSE, SPARSE, lang.fused_ffn("mlp")),
)
TINY = {**lang.TINY_LATENT, **lang.TINY_MOE, "index_n_heads": 4, "index_head_dim": 6, "first_k_dense_replace": 1}
FAMILY = lang.family(
    "glm_moe_dsa",
    classes=(lang.FLEET,),
    layer=LAYER,
    prediction=LAYER,
    sizes={"mtp_layers": lang.MTP_LAYERS},
    defaults={"first_k_dense_replace": 3, "n_shared_experts": 1},
    tiny={**TINY, "moe_expert_fusion": True, "num_nextn_predict_layers": 1},
    divided=("vocab",),
)
