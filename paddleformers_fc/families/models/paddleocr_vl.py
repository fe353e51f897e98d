"""PaddleOCR VL: the text of ERNIE 4.5, not fused, and a vision tower, which is whole on every rank.

The head of published towers is not built. Files of Transformers lack the positions of packed images.
"""

from paddleformers_fc.families import language as lang
from paddleformers_fc.families.models.ernie4_5 import FFN_BIAS

NORMS = lang.norm("{input,post_attention}_layernorm")
VISION = lang.tower(
    "vision",
    "vision_config",
    "visual.vision_model",
    layers="encoder.layers.{block}",
    layer=[
        lang.norm("layer_norm{1,2}", bias="True"),
        lang.replicated("self_attn.{q,k,v,out}_proj", "hidden", "hidden", "True"),
        lang.replicated("mlp.fc1", "hidden", "ffn", "True"),
        lang.replicated("mlp.fc2", "ffn", "hidden", "True"),
    ],
    outside=[
        lang.norm("post_layernorm", bias="True"),
        lang.patches("embeddings.patch_embedding", "True", frames=""),
        lang.same("embeddings.position_embedding.weight", shape=("side * side", "hidden")),
        lang.same("embeddings.packing_position_embedding.weight", shape=("32768", "hidden")),
    ],
    sizes={"in_channels": "num_channels", "merged": "hidden * 4", "side": "image_size // patch_size"},
    defaults={"num_channels": 3, "image_size": 224, "patch_size": 14},
)
PROJECTOR = lang.declared(
    lang.norm("pre_norm", "vision.hidden", "True"),
    lang.column("linear_1", "vision.merged", "vision.merged", "True"),
    lang.column("linear_2", "vision.merged", "hidden", "True"),
)
FAMILY = lang.family(
    "paddleocr_vl",
    key="text_config",
    layer=[NORMS, lang.attention("self_attn", "use_bias", "use_bias"), lang.ffn("mlp", bias=FFN_BIAS)],
    outside=[lang.ends(), lang.at(lang.Stage.FIRST, lang.within("mlp_AR", PROJECTOR))],
    towers=(VISION,),
    optional=("visual.vision_model.embeddings.packing_position_embedding.", "visual.vision_model.head."),
    defaults={"head_dim": 128},
    tiny={"text_config": {"head_dim": 8}, "vision_config": {**lang.TINY, "image_size": 4, "patch_size": 2}},
)
