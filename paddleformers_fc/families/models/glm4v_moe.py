"""GLM 4.5 V: the text model of GLM 4 MoE and a vision tower, which is replicated on every rank."""

from paddleformers_fc.families import language as lang
from paddleformers_fc.families.models.glm4_moe import EXPERTS

VISION = lang.vision(
    "model.visual",
    lang.patches("patch_embed.proj", bias=True),
    lang.same("post_layernorm.weight"),
    lang.same("downsample.weight", shape=("out_hidden_size", "hidden", "spatial_merge_size", "spatial_merge_size")),
    lang.same("downsample.bias", shape=("out_hidden_size",)),
    lang.linear("merger.proj", inputs="out_hidden_size", outputs="out_hidden_size"),
    lang.same("merger.post_projection_norm.weight", "merger.post_projection_norm.bias", shape=("out_hidden_size",)),
    lang.linear("merger.gate_proj", "merger.up_proj", inputs="out_hidden_size", outputs="ffn"),
    lang.linear("merger.down_proj", inputs="ffn", outputs="out_hidden_size"),
    lang.same("post_conv_layernorm.weight"),
    lang.same("embeddings.position_embedding.weight", shape=("positions", "hidden")),
    lang.same("blocks.{block}.norm1.weight", "blocks.{block}.norm2.weight"),
    lang.linear("blocks.{block}.attn.qkv", outputs=("hidden", "hidden", "hidden"), bias="attention_bias"),
    lang.linear("blocks.{block}.attn.proj"),
    lang.linear("blocks.{block}.mlp.gate_proj", "blocks.{block}.mlp.up_proj", outputs="out_hidden_size"),
    lang.linear("blocks.{block}.mlp.down_proj", inputs="out_hidden_size"),
    defaults={"patch_size": 14, "image_size": 336},
)
LAYER = (
    lang.same("input_layernorm.weight", "post_attention_layernorm.weight"),
    lang.qkv("self_attn.qkv_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias="attention_bias"),
    lang.row("self_attn.o_proj", inputs="q"),
    lang.when(lang.after_dense, EXPERTS),
    lang.unless(lang.after_dense, lang.gated("mlp.up_gate_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")),
)
FAMILY = lang.family(
    "glm4v_moe",
    lang.ends("model.language_model.embed_tokens", "model.language_model.norm", "lm_head"),
    lang.layer("model.language_model.layers.{layer}", LAYER),
    key="text_config",
    towers=(VISION,),
    defaults={"attention_bias": True, "first_k_dense_replace": 1, "n_shared_experts": 1},
    tiny={
        "text_config": {**lang.TINY_MOE, "attention_bias": True},
        "vision_config": {**lang.TINY_VISION, "image_size": 6},
    },
)
