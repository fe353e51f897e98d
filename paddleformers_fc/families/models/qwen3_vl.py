"""Qwen 3 VL: the text of Qwen 3 and a vision tower with several mergers."""

from paddleformers_fc.families import language as lang, towers

ATTENTION = lang.declared(
    lang.norm("{input,post_attention}_layernorm"),
    lang.fused_attention("self_attn", "attention_bias", "attention_bias"),
    lang.norm("self_attn.{q,k}_norm", "head"),
)
TINY_VISION = {**lang.TINY_VISION, "deepstack_visual_indexes": [0]}
FAMILY = lang.family(
    "qwen3_vl",
    classes=(lang.FLEET, lang.FORMERS),
    scope="model.language_model",
    key="text_config",
    layer=[ATTENTION, lang.fused_ffn("mlp")],
    towers=(towers.QWEN3_VL,),
    numbers=(towers.DEEP,),
    defaults={"head_dim": 128},
    tiny={"vision_config": TINY_VISION},
)
