"""Qwen 3: as Qwen 2, with norms over heads; of PaddleFleet's or of PaddleFormers' classes."""

from paddleformers_fc.families import blocks
from paddleformers_fc.families.declarations import Family, declared

FAMILY = Family(
    name="qwen3",
    model_types=("qwen3",),
    statements=declared(
        blocks.either_ends(),
        blocks.norm(blocks.LAYER + ".{input,post_attention}_layernorm"),
        blocks.fused_attention(blocks.LAYER + ".self_attn", bias="attention_bias", output_bias="attention_bias"),
        blocks.either_head_norms(blocks.LAYER + ".self_attn"),
        blocks.fused_ffn(blocks.LAYER + ".mlp"),
    ),
    tied=(blocks.TIED_HEAD, blocks.TIED_FLEET_HEAD),
    defaults={"head_dim": 128},
    tiny=dict(blocks.TINY, head_dim=8),
)
