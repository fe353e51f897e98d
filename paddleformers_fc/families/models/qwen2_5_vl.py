"""Qwen 2.5 VL: the text of Qwen 2 and a vision tower, which is whole on every rank."""

from paddleformers_fc.families import language as lang

VISION = lang.tower(
    "vision",
    "vision_config",
    "model.visual",
    canonical="visual",
    layers="blocks.{block}",
    layer=[
        lang.norm("norm{1,2}"),
        lang.replicated("attn.qkv", "hidden", "3 * hidden", "True"),
        lang.replicated("attn.proj", "hidden", "hidden", "True"),
        lang.uncut(lang.ffn("mlp", bias="True")),
    ],
    outside=[
        lang.patches("patch_embed.proj"),
        lang.norm("merger.ln_q"),
        lang.replicated("merger.mlp.0", "merged", "merged", "True"),
        lang.replicated("merger.mlp.2", "merged", "out_hidden_size", "True"),
    ],
    sizes=lang.VISION_SIZES,
    defaults={**lang.VISION_DEFAULTS, "patch_size": 14},
)
FAMILY = lang.family(
    "qwen2_5_vl",
    scope="model.language_model",
    canonical="model",
    key="text_config",
    layer=[
        lang.norm("{input,post_attention}_layernorm"),
        lang.fused_attention("self_attn", bias="True"),
        lang.fused_ffn("mlp"),
    ],
    towers=(VISION,),
    tiny={"vision_config": lang.TINY_VISION},
)
