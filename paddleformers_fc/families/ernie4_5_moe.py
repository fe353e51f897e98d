"""ERNIE 4.5 MoE: the dense family's layers, routed and shared experts, and multi-token-prediction blocks.

Routed experts are not cut by tensor parallelism; their fused layout has one round, which the shards themselves say.
"""

from paddleformers_fc.families.declarations import (
    Family,
    Statement,
    TiedName,
    declared,
    fused_ffn,
    fused_qkv,
    linear,
    same,
)


def _block(block: str) -> tuple[Statement, ...]:
    ffns = (block + ".mlp", block + ".mlp.shared_experts", block + ".mlp.experts.{expert}")
    return declared(
        same(block + ".{input,post_attention}_layernorm.weight"),
        same(block + ".{input,post_attention}_layernorm.bias"),
        fused_qkv(block + ".self_attn"),
        fused_qkv(block + ".self_attn", leaf="bias"),
        linear(block + ".self_attn.o_proj.weight"),
        same(block + ".self_attn.o_proj.bias"),
        linear(block + ".mlp.gate.weight"),
        same(block + ".mlp.moe_statics.e_score_correction_bias"),
        *(fused_ffn(ffn) for ffn in ffns),
        *(fused_ffn(ffn, leaf="bias") for ffn in ffns),
        *(linear(ffn + ".down_proj.weight") for ffn in ffns),
        *(same(ffn + ".down_proj.bias") for ffn in ffns),
    )


FAMILY = Family(
    name="ernie4_5_moe",
    model_types=("ernie4_5_moe",),
    statements=declared(
        same("model.embed_tokens.weight"),
        same("model.norm.{weight,bias}"),
        same("lm_head.{weight,bias}"),
        _block("model.layers.{layer}"),
        _block("model.mtp_block.{index}"),
        same("model.mtp_{emb,hidden}_norm.{index}.weight"),
        same("model.mtp_{emb,hidden}_norm.{index}.bias"),
        linear("model.mtp_linear_proj.{index}.weight"),
        same("model.mtp_linear_proj.{index}.bias"),
    ),
    tied=(TiedName("lm_head.weight", "model.embed_tokens.weight"),),
    optional=("model.mtp_",),
)
