"""ERNIE 4.5 (dense): fused qkv per kv head, fused [gate | up] per tensor-parallel rank.

In Transformers ``use_bias`` sets biases in the attention and the feed-forward. In PaddleFormers it sets those of the
attention alone and ``mlp_bias`` those of the feed-forward, so that its exports contain both keys.
"""

from paddleformers_fc.families.language import family, fused_attention, fused_ffn, norm

EXPORTED_BIASES = {key: f"({key} or False) if use_bias else None" for key in ("mlp_bias", "lm_head_bias")}
FFN_BIAS = "use_bias if mlp_bias == None else mlp_bias"
DENSE = (
    norm("{input,post_attention}_layernorm"),
    fused_attention("self_attn", bias="use_bias", output_bias="use_bias"),
    fused_ffn("mlp", bias=FFN_BIAS),
)
FAMILY = family(
    "ernie4_5",
    layer=DENSE,
    defaults={"head_dim": 128, "tie_word_embeddings": True},
    tiny={"head_dim": 4, "use_bias": True, "mlp_bias": False},
    exported=EXPORTED_BIASES,
)
