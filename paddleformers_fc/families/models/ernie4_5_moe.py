"""ERNIE 4.5 MoE: the dense family's layers, routed and shared experts, and multi-token-prediction blocks.

A prediction block has experts by its own number, as the layer of that number would have. Biases are those of the dense
family; ``use_bias`` of Transformers sets one of the head as well, and none of a routed expert.
"""

from paddleformers_fc.families.declarations import (
    FORMERS,
    Numbers,
    Statements,
    choice,
    declared,
    only,
    same,
    whole,
    within,
)
from paddleformers_fc.families.language import (
    PREDICTION_KEY,
    ends,
    family,
    fused_attention,
    fused_ffn,
    norm,
    replicated,
    router,
)
from paddleformers_fc.families.models.ernie4_5 import EXPORTED_BIASES, FFN_BIAS

STATICS = ("model.layers.{layer}.mlp.moe_statics.", "model.mtp_block.{index}.mlp.moe_statics.")
LAST = "layers - 1 if moe_layer_end_index == -1 else moe_layer_end_index"


def _block(number: str) -> Statements:
    sparse = f"({number} + 1) % moe_layer_interval == 0 and moe_layer_start_index <= {number} <= last_moe_layer"
    statics = same("mlp.moe_statics.e_score_correction_bias", shape=("1", "experts"), dtype="float32")
    shared = fused_ffn("mlp.shared_experts", "expert_ffn * moe_num_shared_experts", bias=FFN_BIAS)
    routed = declared(
        router("mlp.gate"),
        whole(fused_ffn("mlp.experts.{expert}", "expert_ffn", bias="mlp_bias")),
        only("moe_use_aux_free", statics),
        only("moe_num_shared_experts > 0", shared),
    )
    return declared(
        norm("{input,post_attention}_layernorm"),
        fused_attention("self_attn", bias="use_bias", output_bias="use_bias"),
        choice(sparse, routed, fused_ffn("mlp", bias=FFN_BIAS)),
    )


FAMILY = family(
    "ernie4_5_moe",
    classes=(FORMERS,),
    layer=[_block("layer")],
    outside=[
        ends(head_bias="use_bias if lm_head_bias == None else lm_head_bias"),
        within("model.mtp_block.{index}", _block("index")),
        norm("model.mtp_{emb,hidden}_norm.{index}"),
        replicated("model.mtp_linear_proj.{index}", "2 * hidden", "hidden", bias="use_bias"),
    ],
    optional=(*STATICS, "model.mtp_{block,emb_norm,hidden_norm,linear_proj}.{index}."),
    sizes={"experts": "moe_num_experts | num_experts", "last_moe_layer": LAST},
    numbers=(Numbers("index", "mtp_layers"),),
    defaults={"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1, "moe_use_aux_free": True}
    | {"moe_num_shared_experts": 2, "num_nextn_predict_layers": 1, "tie_word_embeddings": True},
    tiny={"num_hidden_layers": 3, "num_nextn_predict_layers": 2, "moe_num_experts": 4, "moe_intermediate_size": 16}
    | {"use_bias": True, "mlp_bias": False, "lm_head_bias": False},
    exported={key: key for key in ("moe_use_aux_free", "moe_norm_min")} | PREDICTION_KEY | EXPORTED_BIASES,
)
