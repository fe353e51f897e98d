"""DeepSeek V3: latent attention, unfused experts, prediction layers numbered after the last layer.

A prediction layer has a bias that canonical files lack, and lacks the norm, head and embedding that they repeat in it.
Without ``q_lora_rank`` the class still creates a norm for it, which no layer uses.
"""

from paddleformers_fc.families.declarations import FORMERS, Numbers, choice, declared, fresh, whole, within
from paddleformers_fc.families.language import (
    PREDICTION,
    PREDICTION_KEY,
    TINY_LATENT,
    TINY_MOE,
    ends,
    experts,
    family,
    ffn,
    latent_attention,
    norm,
    replicated,
    router,
)

SPARSE = "experts and layer >= first_k_dense_replace and layer % moe_layer_freq == 0"
ROUTED = declared(
    router("mlp.gate", correction=True),
    experts("mlp", formers=whole(ffn("mlp.experts.{expert}", "expert_ffn"))),
    ffn("mlp.shared_experts", "expert_ffn * n_shared_experts"),
)

FAMILY = family(
    "deepseek_v3",
    classes=(FORMERS,),
    layer=[
        norm("{input,post_attention}_layernorm"),
        latent_attention("self_attn", down_bias="attention_bias"),
        fresh("self_attn.q_a_layernorm.weight", shape=("hidden",), where="not q_lora_rank"),
        choice(SPARSE, ROUTED, ffn("mlp")),
    ],
    outside=[
        ends(),
        within(PREDICTION, norm("{enorm,hnorm}"), replicated("eh_proj", "2 * hidden", "hidden", bias="True")),
    ],
    optional=(f"{PREDICTION}.eh_proj.bias", f"{PREDICTION}."),
    numbers=(Numbers("layer", "layers + mtp_layers"), Numbers("mtp", "mtp_layers", start="layers")),
    defaults={"moe_layer_freq": 1, "first_k_dense_replace": 0},
    tiny=TINY_LATENT | TINY_MOE | {"n_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1},
    exported=PREDICTION_KEY,
)
