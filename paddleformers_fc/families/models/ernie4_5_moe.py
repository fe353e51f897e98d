"""ERNIE 4.5 MoE: the dense family's layers, routed and shared experts, and multi-token-prediction blocks.

Prediction blocks are beside the layers, in a class that pipelines do not build. A block has experts by its own number,
as the layer of that number would have. Biases are those of the dense family; ``use_bias`` of Transformers sets one of
the head as well, and none of a routed expert.
"""

from paddleformers_fc.families import language as lang
from paddleformers_fc.families.models.ernie4_5 import DENSE, EXPORTED_BIASES, FFN_BIAS

SPARSE = "(layer + 1) % moe_layer_interval == 0 and moe_layer_start_index <= layer <= last_moe_layer"
LAST = "layers - 1 if moe_layer_end_index == -1 else moe_layer_end_index"
STATICS_NAMES = tuple(f"model.{block}.mlp.moe_statics." for block in ("layers.{layer}", "mtp_block.{index}"))
STATICS = lang.balance("mlp.moe_statics", ("1", "experts"))
EXPERT = lang.uncut(lang.fused_ffn("mlp.experts.{expert}", "expert_ffn", bias="mlp_bias"))
SHARED = lang.fused_ffn("mlp.shared_experts", "expert_ffn * moe_num_shared_experts", bias=FFN_BIAS)
OPTIONAL = (lang.only("moe_use_aux_free", STATICS), lang.only("moe_num_shared_experts > 0", SHARED))
*ATTENTION, FFN = DENSE
LAYER = (*ATTENTION, lang.choice(SPARSE, lang.declared(lang.router("mlp.gate"), EXPERT, *OPTIONAL), FFN))
PREDICTIONS = lang.outside_pipelines(
    lang.renumbered("index", lang.within("model.mtp_block.{index}", *LAYER)),
    lang.norm("model.mtp_{emb,hidden}_norm.{index}"),
    lang.replicated("model.mtp_linear_proj.{index}", "2 * hidden", "hidden", bias="use_bias"),
)
FAMILY = lang.family(
    "ernie4_5_moe",
    layer=LAYER,
    outside=(lang.ends(head_bias="use_bias if lm_head_bias == None else lm_head_bias"), PREDICTIONS),
    optional=(*STATICS_NAMES, "model.mtp_{block,emb_norm,hidden_norm,linear_proj}.{index}."),
    sizes={"experts": "moe_num_experts | num_experts", "last_moe_layer": LAST},
    numbers=(lang.Numbers("index", "mtp_layers"),),
    defaults={"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1, "moe_use_aux_free": True}
    | {"moe_num_shared_experts": 2, "num_nextn_predict_layers": 1, "tie_word_embeddings": True},
    tiny={"num_hidden_layers": 3, "num_nextn_predict_layers": 2, "moe_num_experts": 4, "moe_intermediate_size": 16}
    | {"use_bias": True, "mlp_bias": False, "lm_head_bias": False},
    exported={"moe_use_aux_free": "moe_use_aux_free", "moe_norm_min": "moe_norm_min", **EXPORTED_BIASES},
    built=("mtp_block", "mtp_hidden_norm", "mtp_emb_norm", "mtp_linear_proj"),
)
