"""GLM 4.5 V: the text of GLM 4 MoE and a vision tower, which is whole on every rank."""

from paddleformers_fc.families import language as lang, towers

SPARSE = lang.routed_ffn("mlp", "n_shared_experts", correction=True, turned=False)
POSITIONS = ("(image_size // patch_size) * (image_size // patch_size)", "hidden")
FAMILY = lang.family(
    "glm4v_moe",
    scope="model.language_model",
    key="text_config",
    layer=[
        lang.norm("{input,post_attention}_layernorm"),
        lang.fused_attention("self_attn", bias="attention_bias"),
        lang.choice(lang.AFTER_DENSE, SPARSE, lang.fused_ffn("mlp")),
    ],
    towers=(
        towers.glm(
            "ffn",
            layer=[lang.uncut(lang.ffn("mlp", "out_hidden_size"))],
            outside=[
                lang.norm("post_conv_layernorm"),
                lang.same("embeddings.position_embedding.weight", shape=POSITIONS),
            ],
        ),
    ),
    defaults={"attention_bias": True, "first_k_dense_replace": 1, "n_shared_experts": 1},
    tiny={
        "text_config": {**lang.TINY_MOE, "attention_bias": True},
        "vision_config": {**lang.TINY_VISION, "image_size": 6},
    },
)
