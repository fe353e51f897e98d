"""GLM 4 MoE: dense first layers, shared experts, prediction layers numbered after the last layer."""

from paddleformers_fc.families.declarations import FLEET, FORMERS, Statements, choice, declared, only
from paddleformers_fc.families.language import (
    MTP_LAYERS,
    TINY_MOE,
    family,
    fused_attention,
    fused_ffn,
    norm,
    routed_ffn,
)


def _layer(sparse: str) -> Statements:
    return declared(
        norm("{input,post_attention}_layernorm"),
        fused_attention("self_attn", bias="attention_bias"),
        only("use_qk_norm", norm("self_attn.{q,k}_norm", "head")),
        choice(sparse, routed_ffn("mlp", "n_shared_experts", correction=True, turned=False), fused_ffn("mlp")),
    )


FAMILY = family(
    "glm4_moe",
    classes=(FLEET, FORMERS),
    layer=[_layer("layer >= first_k_dense_replace")],
    prediction=[_layer("True")],
    sizes={"mtp_layers": MTP_LAYERS},
    defaults={"first_k_dense_replace": 1, "n_shared_experts": 1},
    tiny=TINY_MOE
    | {"head_dim": 8, "use_qk_norm": True, "num_nextn_predict_layers": 1, "num_empty_layers_add_in_head": 1},
)
