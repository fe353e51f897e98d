"""Kimi K2: latent attention, dense first layers, fused experts."""

from paddleformers_fc.families import language as lang

SPARSE = lang.routed_ffn("mlp", "n_shared_experts", correction=True)
LAYER = (
    lang.norm("{input,post_attention}_layernorm"),
    lang.latent_attention("self_attn", down_bias="attention_bias"),
    lang.choice(lang.AFTER_DENSE, SPARSE, lang.fused_ffn("mlp")),
)
FAMILY = lang.family(
    "kimi_k2",
    classes=(lang.FLEET,),
    layer=LAYER,
    prediction=LAYER,
    defaults={"first_k_dense_replace": 3, "n_shared_experts": 1},
    tiny={**lang.TINY_LATENT, **lang.TINY_MOE, "first_k_dense_replace": 1, "moe_expert_fusion": True},
    divided=("vocab",),
)
