"""Llama: attention and feed-forward as canonical files have them, or fused where the configuration says so."""

from paddleformers_fc.families import blocks
from paddleformers_fc.families.declarations import Family, declared, only

ATTENTION, FFN = blocks.LAYER + ".self_attn", blocks.LAYER + ".mlp"

FAMILY = Family(
    name="llama",
    model_types=("llama",),
    statements=declared(
        blocks.ends(),
        blocks.norm(blocks.LAYER + ".{input,post_attention}_layernorm"),
        only("not fuse_attention_qkv", blocks.qkv(ATTENTION, bias="attention_bias")),
        only("fuse_attention_qkv", blocks.fused_qkv(ATTENTION, bias="attention_bias")),
        blocks.attention_output(ATTENTION, bias="attention_bias"),
        only("not fuse_attention_ffn", blocks.gate_and_up(FFN, bias="mlp_bias")),
        only("fuse_attention_ffn", blocks.gate_up(FFN, bias="mlp_bias", name="gate_up_fused_proj")),
        # What other classes of this family call the same layer.
        only("False", blocks.gate_up(FFN, name="up_gate_proj")),
        blocks.down(FFN, bias="mlp_bias"),
    ),
    tied=(blocks.TIED_HEAD,),
    optional=(ATTENTION + ".rotary_emb.inv_freq",),
    tiny=blocks.TINY,
)
