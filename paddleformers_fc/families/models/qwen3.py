"""Qwen 3: as Qwen 2, with norms over heads."""

from paddleformers_fc.families.language import FLEET, FORMERS, family, fused_attention, fused_ffn, head_norms, norm

FAMILY = family(
    "qwen3",
    classes=(FLEET, FORMERS),
    layer=[
        norm("{input,post_attention}_layernorm"),
        fused_attention("self_attn", bias="attention_bias", output_bias="attention_bias"),
        head_norms("self_attn"),
        fused_ffn("mlp"),
    ],
    defaults={"head_dim": 128},
)
