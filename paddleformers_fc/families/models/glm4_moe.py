"""GLM 4 MoE: dense first layers, shared experts, prediction layers numbered after the last layer."""

from paddleformers_fc.families import language as lang

SPARSE = lang.routed_ffn("mlp", "n_shared_experts", correction=True, turned=False)
LAYER = (
    lang.norm("{input,post_attention}_layernorm"),
    lang.fused_attention("self_attn", bias="attention_bias"),
    lang.only("use_qk_norm", lang.norm("self_attn.{q,k}_norm", "head")),
    lang.choice(lang.AFTER_DENSE, SPARSE, lang.fused_ffn("mlp")),
)
FAMILY = lang.family(
    "glm4_moe",
    classes=(lang.FLEET, lang.FORMERS),
    layer=LAYER,
    prediction=LAYER,
    sizes={"mtp_layers": lang.MTP_LAYERS},
    defaults={"first_k_dense_replace": 1, "n_shared_experts": 1},
    tiny={**lang.TINY_MOE, "head_dim": 8, "use_qk_norm": True, "num_nextn_predict_layers": 1}
    | {"num_empty_layers_add_in_head": 1},
)
