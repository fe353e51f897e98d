"""PaddleOCR VL: the text model of ERNIE 4.5, not fused, and a vision tower, which is replicated on every rank.

The class does not build the head of published towers. Files of Transformers lack the positions of packed images.
"""

from paddleformers_fc.families import language as lang
from paddleformers_fc.families.models.ernie4_5 import ffn_bias

BLOCK = (
    lang.same("layer_norm1.weight", "layer_norm2.weight", "layer_norm1.bias", "layer_norm2.bias"),
    lang.linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", bias=True),
    lang.linear("mlp.fc1", outputs="ffn", bias=True),
    lang.linear("mlp.fc2", inputs="ffn", bias=True),
)
VISION = lang.tower(
    "vision",
    "visual.vision_model",
    lang.same("post_layernorm.weight", "post_layernorm.bias"),
    lang.patches("embeddings.patch_embedding", bias=True, frames=()),
    lang.same("embeddings.position_embedding.weight", shape=("positions", "hidden")),
    lang.same("embeddings.packing_position_embedding.weight", shape=(32768, "hidden")),
    lang.layer("encoder.layers.{block}", BLOCK),
    sizes={
        "in_channels": "num_channels",
        "merged": ("hidden", "hidden", "hidden", "hidden"),
        "positions": lambda image_size, patch_size: (image_size // patch_size) * (image_size // patch_size),
    },
    defaults={"num_channels": 3, "image_size": 224, "patch_size": 14},
)
PROJECTOR = lang.layer(
    "mlp_AR",
    lang.same("pre_norm.weight", "pre_norm.bias", shape=("vision.hidden",)),
    lang.column("linear_1", inputs="vision.merged", outputs="vision.merged", bias=True),
    lang.column("linear_2", inputs="vision.merged", bias=True),
)
LAYER = (
    lang.same("input_layernorm.weight", "post_attention_layernorm.weight"),
    lang.attention("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", bias="use_bias"),
    lang.mlp("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", bias=ffn_bias),
)
FAMILY = lang.family(
    "paddleocr_vl",
    lang.ends("model.embed_tokens", "model.norm", "lm_head"),
    lang.at(lang.FIRST, PROJECTOR),
    lang.layer("model.layers.{layer}", LAYER),
    lang.optional("visual.vision_model.embeddings.packing_position_embedding.", "visual.vision_model.head."),
    key="text_config",
    towers=(VISION,),
    defaults={"head_dim": 128},
    tiny={"text_config": {"head_dim": 8}, "vision_config": {**lang.TINY, "image_size": 4, "patch_size": 2}},
)
