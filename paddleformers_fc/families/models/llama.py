"""Llama: attention and feed-forward as in canonical files, or fused where the configuration requests it."""

from paddleformers_fc.families.language import attention, family, ffn, gate_up, norm, only

_NORMS = norm("{input,post_attention}_layernorm")
_FFN = ffn("mlp", bias="mlp_bias", fused_where="fuse_attention_ffn", name="gate_up_fused_proj")

FAMILY = family(
    "llama",
    layer=[
        _NORMS,
        attention("self_attn", "attention_bias", "attention_bias", fused_where="fuse_attention_qkv"),
        _FFN,
        only("False", gate_up("mlp")),  # The name of the same layer in other classes of this family.
    ],
    nlp=[_NORMS, attention("self_attn", fused_where="fuse_attention_qkv"), _FFN],
    optional=("model.layers.{layer}.self_attn.rotary_emb.inv_freq",),
)
