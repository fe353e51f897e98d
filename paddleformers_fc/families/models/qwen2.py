"""Qwen 2: fused qkv with a bias, fused [gate | up]; in PaddleNLP's class fused where the configuration requests it."""

from paddleformers_fc.families.language import (
    FLEET,
    FORMERS,
    attention,
    family,
    ffn,
    fused_attention,
    fused_ffn,
    norm,
)

_NORMS = norm("{input,post_attention}_layernorm")

FAMILY = family(
    "qwen2",
    classes=(FLEET, FORMERS),
    layer=[_NORMS, fused_attention("self_attn", bias="True"), fused_ffn("mlp")],
    nlp=[
        _NORMS,
        attention("self_attn", bias="True", fused_where="fuse_attention_qkv"),
        ffn("mlp", fused_where="fuse_attention_ffn", name="gate_up_fused_proj"),
    ],
)
