"""ERNIE 4.5 VL: routed experts of two modalities with separate sizes and routers, a vision tower and a resampler.

No layer is fused. An untied head is transposed. An image vocabulary (``mm_vocab_size``) is not declared.
"""

from typing import Any

from paddleformers_fc.families import language as lang


def sparse(layer: int, moe_layer_interval: int, moe_layer_start_index: Any, moe_layer_end_index: Any) -> bool:
    """Return whether a layer has experts."""
    return (layer + 1) % moe_layer_interval == 0 and moe_layer_start_index[0] <= layer <= moe_layer_end_index[0]


def of_expert(expert: int, moe_intermediate_size: Any, moe_num_experts: Any) -> Any:
    """Return the inner size of an expert. Text experts come first, then image experts."""
    return moe_intermediate_size[0] if expert < moe_num_experts[0] else moe_intermediate_size[1]


EXPERT = lang.uncut(lang.mlp("gate_proj", "up_proj", "down_proj", of_expert, bias="use_bias"))
EXPERTS = (
    lang.layer("mlp.experts.{expert}", EXPERT),
    lang.layer("mlp.shared_experts", lang.mlp("gate_proj", "up_proj", "down_proj", "shared_ffn", bias="use_bias")),
    lang.same("mlp.gate.weight", shape=("hidden", "text_experts"), dtype="float32"),
    lang.same("mlp.gate.weight_1", shape=("hidden", "image_experts"), dtype="float32"),
    lang.when("moe_use_aux_free", lang.balance("mlp.moe_statics.e_score_correction_bias", shape=(2, "text_experts"))),
)
RESAMPLER = lang.layer(
    "model.resampler_model",
    lang.row("spatial_linear.0", inputs="spatial", outputs="spatial", bias=True),
    lang.linear("temporal_linear.0", inputs="temporal", outputs="spatial", bias=True),
    lang.linear("spatial_linear.2", "temporal_linear.2", inputs="spatial", outputs="spatial", bias=True),
    lang.same("spatial_linear.3.weight", "temporal_linear.3.weight", shape=("spatial",)),
    lang.same("spatial_linear.3.bias", "temporal_linear.3.bias", shape=("spatial",)),
    lang.linear("mlp", inputs="spatial", bias=True),
    lang.same("after_norm.weight"),
)
VISION = lang.vision(
    "vision_model",
    lang.linear("patch_embed.proj", inputs="patch"),
    lang.same("ln.weight", "ln.bias"),
    lang.same("blocks.{block}.norm1.weight", "blocks.{block}.norm2.weight"),
    lang.same("blocks.{block}.norm1.bias", "blocks.{block}.norm2.bias"),
    lang.linear("blocks.{block}.attn.qkv", outputs=("hidden", "hidden", "hidden"), bias=True),
    lang.linear("blocks.{block}.attn.proj", bias=True),
    lang.linear("blocks.{block}.mlp.fc1", outputs="ffn", bias=True),
    lang.linear("blocks.{block}.mlp.fc2", inputs="ffn", bias=True),
    sizes={
        "patch": lambda in_channels, patch_size: in_channels * patch_size * patch_size,
        "ffn": lambda intermediate_size, hidden, mlp_ratio: intermediate_size or hidden * mlp_ratio,
    },
)
LAYER = (
    lang.same("input_layernorm.weight", "post_attention_layernorm.weight"),
    lang.attention("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", bias="use_bias"),
    lang.when(sparse, EXPERTS),
    lang.unless(sparse, lang.mlp("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", bias="use_bias")),
)
FAMILY = lang.family(
    "ernie4_5_moe_vl",
    lang.transposed_head(bias="use_bias"),
    lang.same("model.norm.weight", stage=lang.NORM),
    lang.same("model.embed_tokens.weight", shape=("vocab", "hidden"), cut=0, stage=lang.FIRST),
    lang.tied("lm_head.weight", "model.embed_tokens.weight"),
    lang.at(lang.FIRST, RESAMPLER),
    lang.layer("model.layers.{layer}", LAYER),
    towers=(VISION,),
    sizes={
        "experts": ("text_experts", "image_experts"),
        "text_experts": lambda moe_num_experts: moe_num_experts[0],
        "image_experts": lambda moe_num_experts: moe_num_experts[1],
        "shared_ffn": lambda moe_intermediate_size, moe_num_shared_experts: (
            moe_intermediate_size[0] * moe_num_shared_experts
        ),
        "patch_hidden": "vision.hidden",
        "spatial": lambda patch_hidden, spatial_conv_size: (
            patch_hidden * (spatial_conv_size or 2) * (spatial_conv_size or 2)
        ),
        "temporal": lambda spatial, temporal_conv_size: spatial * (temporal_conv_size or 2),
    },
    defaults={"moe_num_shared_experts": 2, "moe_layer_interval": 1, "moe_use_aux_free": True},
    tiny={
        "moe_num_experts": [4, 4],
        "moe_intermediate_size": [16, 8],
        "num_hidden_layers": 3,
        "head_dim": 8,
        "moe_layer_start_index": [1, 1],
        "moe_layer_end_index": [2, 2],
        "vision_config": {**lang.TINY_VISION, "intermediate_size": None, "embed_dim": 16, "mlp_ratio": 2},
    },
)
