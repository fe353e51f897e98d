"""Phi-3 and Phi-4: fused in canonical files as for one rank; in the model [Q | K | V] and [gate | up] per rank."""

from paddleformers_fc.families import blocks
from paddleformers_fc.families.declarations import Family, Geometry, declared

ATTENTION, FFN = blocks.LAYER + ".self_attn", blocks.LAYER + ".mlp"

FAMILY = Family(
    name="phi3",
    model_types=("phi3",),
    statements=declared(
        blocks.ends(),
        blocks.norm(blocks.LAYER + ".{input,post_attention}_layernorm"),
        blocks.fused_qkv(ATTENTION, canonical=("qkv_proj",), geometry=Geometry.FUSED_QKV_PER_RANK),
        blocks.attention_output(ATTENTION),
        blocks.gate_up(FFN, canonical=("gate_up_proj",), name="gate_up_proj"),
        blocks.down(FFN),
    ),
    tied=(blocks.TIED_HEAD,),
    tiny=blocks.TINY,
)
