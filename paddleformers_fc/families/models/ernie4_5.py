"""ERNIE 4.5 (dense): fused qkv per kv head, fused [gate | up] per tensor-parallel rank.

In Transformers ``use_bias`` means biases in the attention and the feed-forward. PaddleFormers' classes take it for the
attention alone and ``mlp_bias`` for the feed-forward, so that an export of theirs gives both keys.
"""

from paddleformers_fc.families import blocks
from paddleformers_fc.families.declarations import Family, declared

EXPORTED_BIASES = {key: f"({key} or False) if use_bias else None" for key in ("mlp_bias", "lm_head_bias")}
FFN_BIAS = "use_bias if mlp_bias == None else mlp_bias"

FAMILY = Family(
    name="ernie4_5",
    model_types=("ernie4_5",),
    statements=declared(
        blocks.ends(),
        blocks.norm(blocks.LAYER + ".{input,post_attention}_layernorm"),
        blocks.fused_attention(blocks.LAYER + ".self_attn", bias="use_bias", output_bias="use_bias"),
        blocks.fused_ffn(blocks.LAYER + ".mlp", bias=FFN_BIAS),
    ),
    tied=(blocks.TIED_HEAD,),
    defaults={"head_dim": 128, "tie_word_embeddings": True},
    tiny=dict(blocks.TINY, head_dim=4, use_bias=True, mlp_bias=False),
    exported=EXPORTED_BIASES,
)
