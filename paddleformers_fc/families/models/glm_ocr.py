"""GLM-OCR: a text model with four norms per layer and a vision tower. PaddleFormers' class has no tensor parallelism.

The head is transposed and never tied, although the class always sets ``tie_word_embeddings``. Files contain a
prediction layer that the class does not build.
"""

from paddleformers_fc.families import language as lang

VISION = lang.vision(
    "model.visual",
    lang.patches("patch_embed.proj", bias=True),
    lang.same("post_layernorm.weight"),
    lang.same("downsample.weight", shape=("out_hidden_size", "hidden", "spatial_merge_size", "spatial_merge_size")),
    lang.same("downsample.bias", shape=("out_hidden_size",)),
    lang.linear("merger.proj", inputs="out_hidden_size", outputs="out_hidden_size"),
    lang.same("merger.post_projection_norm.weight", "merger.post_projection_norm.bias", shape=("out_hidden_size",)),
    lang.linear("merger.gate_proj", "merger.up_proj", inputs="out_hidden_size", outputs="merger_ffn"),
    lang.linear("merger.down_proj", inputs="merger_ffn", outputs="out_hidden_size"),
    lang.same("blocks.{block}.norm1.weight", "blocks.{block}.norm2.weight"),
    lang.linear("blocks.{block}.attn.qkv", outputs=("hidden", "hidden", "hidden"), bias="attention_bias"),
    lang.linear("blocks.{block}.attn.proj", bias="attention_bias"),
    lang.linear("blocks.{block}.mlp.gate_proj", "blocks.{block}.mlp.up_proj", outputs="ffn", bias="attention_bias"),
    lang.linear("blocks.{block}.mlp.down_proj", inputs="ffn", bias="attention_bias"),
    lang.same("blocks.{block}.attn.q_norm.weight", "blocks.{block}.attn.k_norm.weight", shape=("head",)),
    sizes={"merger_ffn": lambda out_hidden_size, in_channels: out_hidden_size * in_channels},
    defaults={"patch_size": 14, "image_size": 336, "attention_bias": True},
)
PREDICTION = (
    lang.same("enorm.weight", "hnorm.weight", "shared_head.norm.weight"),
    lang.row("eh_proj", inputs=("hidden", "hidden")),
)
LAYER = (
    lang.same("input_layernorm.weight", "post_attention_layernorm.weight"),
    lang.same("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight"),
    lang.uncut(lang.attention("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")),
    lang.linear("mlp.gate_up_proj", outputs=("ffn", "ffn")),
    lang.linear("mlp.down_proj", inputs="ffn"),
)
FAMILY = lang.family(
    "glm_ocr",
    lang.linear("lm_head", outputs="vocab"),
    lang.same("model.language_model.norm.weight", stage=lang.FIRST),
    lang.same("model.language_model.embed_tokens.weight", shape=("vocab", "hidden"), stage=lang.FIRST),
    lang.alias(lang.layer("model.language_model.layers.{mtp}", PREDICTION)),
    lang.layer("model.language_model.layers.{layer}", LAYER),
    lang.optional("model.language_model.layers.{mtp}."),
    key="text_config",
    towers=(VISION,),
    numbers=(lang.Numbers("mtp", "text.mtp_layers", start="text.layers"),),
    exported={"tie_word_embeddings": False},
    tiny={"text_config": {"head_dim": 8}, "vision_config": {**lang.TINY_VISION, "attention_bias": True}},
)
