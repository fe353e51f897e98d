"""ERNIE 4.5 (dense): fused qkv per kv head, fused [gate | up] per tensor-parallel rank."""

from paddleformers_fc.families.declarations import Family, TiedName, declared, fused_ffn, fused_qkv, linear, same

LAYER = "model.layers.{layer}"

FAMILY = Family(
    name="ernie4_5",
    model_types=("ernie4_5",),
    statements=declared(
        same("model.embed_tokens.weight"),
        same("model.norm.{weight,bias}"),
        same("lm_head.{weight,bias}"),
        same(LAYER + ".{input,post_attention}_layernorm.weight"),
        same(LAYER + ".{input,post_attention}_layernorm.bias"),
        fused_qkv(LAYER + ".self_attn"),
        fused_qkv(LAYER + ".self_attn", leaf="bias"),
        linear(LAYER + ".self_attn.o_proj.weight"),
        same(LAYER + ".self_attn.o_proj.bias"),
        fused_ffn(LAYER + ".mlp"),
        fused_ffn(LAYER + ".mlp", leaf="bias"),
        linear(LAYER + ".mlp.down_proj.weight"),
        same(LAYER + ".mlp.down_proj.bias"),
    ),
    tied=(TiedName("lm_head.weight", "model.embed_tokens.weight"),),
)
