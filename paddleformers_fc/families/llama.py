"""Llama: unfused attention and feed-forward, linear weights transposed between Hugging Face and Paddle."""

from paddleformers_fc.families.declarations import Family, TiedName, declared, linear, same

FAMILY = Family(
    name="llama",
    model_types=("llama",),
    statements=declared(
        same("model.embed_tokens.weight"),
        same("model.norm.weight"),
        same("lm_head.weight"),
        same("model.layers.{layer}.{input,post_attention}_layernorm.weight"),
        linear("model.layers.{layer}.self_attn.{q,k,v,o}_proj.weight"),
        same("model.layers.{layer}.self_attn.{q,k,v,o}_proj.bias"),
        linear("model.layers.{layer}.mlp.{gate,up,down}_proj.weight"),
        same("model.layers.{layer}.mlp.{gate,up,down}_proj.bias"),
    ),
    tied=(TiedName("lm_head.weight", "model.embed_tokens.weight"),),
)
