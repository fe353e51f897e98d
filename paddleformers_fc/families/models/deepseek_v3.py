"""DeepSeek V3: latent attention, unfused experts, prediction layers numbered after the last layer.

A prediction layer has a bias that canonical files lack, and lacks the norm, head and embedding that they repeat in it.
Without ``q_lora_rank`` the class still creates a norm for it, which no layer uses.
"""

from paddleformers_fc.families import language as lang

SPARSE = "experts and layer >= first_k_dense_replace and layer % moe_layer_freq == 0"
EXPERTS = lang.experts("mlp", formers=lang.uncut(lang.ffn("mlp.experts.{expert}", "expert_ffn")))
SHARED = lang.ffn("mlp.shared_experts", "expert_ffn * n_shared_experts")
JOINED = lang.replicated("eh_proj", "2 * hidden", "hidden", bias="True")
FAMILY = lang.family(
    "deepseek_v3",
    layer=[
        lang.norm("{input,post_attention}_layernorm"),
        lang.latent_attention("self_attn", down_bias="attention_bias"),
        lang.fresh("self_attn.q_a_layernorm.weight", shape=("hidden",), where="not q_lora_rank"),
        lang.choice(SPARSE, lang.declared(lang.router("mlp.gate", correction=True), EXPERTS, SHARED), lang.ffn("mlp")),
    ],
    outside=[lang.ends(), lang.within(lang.PREDICTION, lang.norm("{enorm,hnorm}"), JOINED)],
    optional=(f"{lang.PREDICTION}.eh_proj.bias", f"{lang.PREDICTION}."),
    numbers=(lang.Numbers("layer", "layers + mtp_layers"), lang.Numbers("mtp", "mtp_layers", start="layers")),
    defaults={"moe_layer_freq": 1, "first_k_dense_replace": 0},
    tiny=lang.TINY_LATENT
    | {**lang.TINY_MOE, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1},
    divided=("vocab",),
)
