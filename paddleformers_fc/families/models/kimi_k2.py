"""Kimi K2: latent attention, dense first layers, fused experts."""

from paddleformers_fc.families.declarations import FLEET, Statements, choice, declared
from paddleformers_fc.families.language import (
    TINY_LATENT,
    TINY_MOE,
    family,
    fused_ffn,
    latent_attention,
    norm,
    routed_ffn,
)


def _layer(sparse: str) -> Statements:
    return declared(
        norm("{input,post_attention}_layernorm"),
        latent_attention("self_attn", down_bias="attention_bias"),
        choice(sparse, routed_ffn("mlp", "n_shared_experts", correction=True), fused_ffn("mlp")),
    )


FAMILY = family(
    "kimi_k2",
    classes=(FLEET,),
    layer=[_layer("layer >= first_k_dense_replace")],
    prediction=[_layer("True")],
    defaults={"first_k_dense_replace": 3, "n_shared_experts": 1},
    tiny=TINY_LATENT | TINY_MOE | {"first_k_dense_replace": 1, "moe_expert_fusion": True},
)
