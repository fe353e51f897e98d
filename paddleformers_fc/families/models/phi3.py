"""Phi-3 and Phi-4: fused in canonical files as for one rank; in the model [Q | K | V] and [gate | up] per rank."""

from paddleformers_fc.families.language import PER_RANK, family, fused_qkv, gate_up, norm, row

FAMILY = family(
    "phi3",
    layer=[
        norm("{input,post_attention}_layernorm"),
        fused_qkv("self_attn", canonical=("qkv_proj",), geometry=PER_RANK),
        row("self_attn.o_proj", "q", "hidden"),
        gate_up("mlp", canonical=("gate_up_proj",), name="gate_up_proj"),
        row("mlp.down_proj", "ffn", "hidden"),
    ],
)
