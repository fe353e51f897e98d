"""Qwen 3 MoE: routed experts in all layers but ``mlp_only_layers``."""

from paddleformers_fc.families.declarations import FLEET, FORMERS, choice
from paddleformers_fc.families.language import (
    STEPPED,
    family,
    fused_attention,
    fused_ffn,
    head_norms,
    norm,
    routed_ffn,
)

FAMILY = family(
    "qwen3_moe",
    classes=(FLEET, FORMERS),
    layer=[
        norm("{input,post_attention}_layernorm"),
        fused_attention("self_attn", bias="attention_bias", output_bias="attention_bias"),
        head_norms("self_attn"),
        choice(STEPPED, routed_ffn("mlp"), fused_ffn("mlp")),
    ],
    defaults={"decoder_sparse_step": 1},
    tiny={"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16, "mlp_only_layers": [0]},
    exported={"num_experts": "experts", "num_local_experts": "experts"},
)
