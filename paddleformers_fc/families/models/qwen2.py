"""Qwen 2: fused qkv with a bias, fused [gate | up]."""

from paddleformers_fc.families.language import FLEET, FORMERS, family, fused_attention, fused_ffn, norm

FAMILY = family(
    "qwen2",
    classes=(FLEET, FORMERS),
    layer=[
        norm("{input,post_attention}_layernorm"),
        fused_attention("self_attn", bias="True"),
        fused_ffn("mlp"),
    ],
)
