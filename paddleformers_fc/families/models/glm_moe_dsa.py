"""GLM 5: the layers of Kimi K2 with a sparse attention indexer, which is replicated on every rank."""

from paddleformers_fc.families import language as lang
from paddleformers_fc.families.models import kimi_k2

INDEXER = lang.layer(
    "self_attn.core_attention.indexer",
    lang.linear("wq_b", inputs="q_lora_rank", outputs="index_size"),
    lang.linear("wk", outputs="index_head_dim"),
    lang.linear("weights_proj", outputs="index_n_heads"),
    lang.same("k_norm.weight", "k_norm.bias", shape=("index_head_dim",)),
    file="self_attn.indexer",
)
LAYER = (kimi_k2.LAYER, lang.when("index_n_heads", INDEXER))
SIZES = {
    "index_size": lambda index_n_heads, index_head_dim: index_n_heads * index_head_dim,
    "mtp_layers": lang.mtp_layers,
}
TINY = {**lang.TINY_LATENT, **lang.TINY_MOE, "index_n_heads": 4, "index_head_dim": 6, "first_k_dense_replace": 1}
FAMILY = lang.family(
    "glm_moe_dsa",
    lang.decoder("model.embed_tokens", "model.layers.{layer}", "model.norm", "lm_head", LAYER),
    lang.prediction("model.layers.{mtp}", LAYER),
    classes=(lang.FLEET,),
    sizes=SIZES,
    defaults={"first_k_dense_replace": 3, "n_shared_experts": 1},
    tiny={**TINY, "moe_expert_fusion": True, "num_nextn_predict_layers": 1},
    divided=("vocab",),
)
