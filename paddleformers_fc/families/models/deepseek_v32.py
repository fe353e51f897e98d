"""DeepSeek V3.2: the layers of GLM 5 under DeepSeek's defaults."""

from paddleformers_fc.families import language as lang
from paddleformers_fc.families.models.glm_moe_dsa import LAYER, SIZES, TINY

FAMILY = lang.family(
    "deepseek_v32",
    lang.decoder("model.embed_tokens", "model.layers.{layer}", "model.norm", "lm_head", LAYER),
    lang.prediction("model.layers.{mtp}", LAYER),
    classes=(lang.FLEET,),
    sizes=SIZES,
    defaults={"first_k_dense_replace": 3, "n_shared_experts": 1, "index_n_heads": 64, "index_head_dim": 128},
    tiny={**TINY, "num_nextn_predict_layers": 1},
    divided=("vocab",),
)
