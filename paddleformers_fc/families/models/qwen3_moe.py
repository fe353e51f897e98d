"""Qwen 3 MoE: routed experts in all layers but ``mlp_only_layers``."""

from paddleformers_fc.families import language as lang

FAMILY = lang.family(
    "qwen3_moe",
    classes=(lang.FLEET, lang.FORMERS),
    layer=[
        lang.norm("{input,post_attention}_layernorm"),
        lang.fused_attention("self_attn", bias="attention_bias", output_bias="attention_bias"),
        lang.head_norms("self_attn"),
        lang.choice(lang.STEPPED, lang.routed_ffn("mlp"), lang.fused_ffn("mlp")),
    ],
    defaults={"decoder_sparse_step": 1},
    tiny={"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16, "mlp_only_layers": [0]},
    exported={"num_experts": "experts", "num_local_experts": "experts"},
)
