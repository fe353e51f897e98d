"""Qwen 2: fused qkv with a bias, fused [gate | up]; of PaddleFleet's or of PaddleFormers' classes."""

from paddleformers_fc.families import blocks
from paddleformers_fc.families.declarations import Family, declared

FAMILY = Family(
    name="qwen2",
    model_types=("qwen2",),
    statements=declared(
        blocks.either_ends(),
        blocks.norm(blocks.LAYER + ".{input,post_attention}_layernorm"),
        blocks.fused_attention(blocks.LAYER + ".self_attn", bias="True"),
        blocks.fused_ffn(blocks.LAYER + ".mlp"),
    ),
    tied=(blocks.TIED_HEAD, blocks.TIED_FLEET_HEAD),
    tiny=blocks.TINY,
)
