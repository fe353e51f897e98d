"""ERNIE 4.5 MoE: the dense family's layers, routed and shared experts, and multi-token-prediction blocks.

A prediction block is dense or has experts by its own number, as if it were the layer of that number. Biases are those
of the dense family; ``use_bias`` of Transformers gives one to the head as well, and to no routed expert.
"""

from paddleformers_fc.families import blocks
from paddleformers_fc.families.declarations import Family, Numbers, Statements, declared, only, same
from paddleformers_fc.families.models.ernie4_5 import EXPORTED_BIASES, FFN_BIAS

BLOCK = "model.mtp_block.{index}"
STATICS = (blocks.LAYER + ".mlp.moe_statics.", BLOCK + ".mlp.moe_statics.")


def _block(block: str, number: str) -> Statements:
    sparse = f"({number} + 1) % moe_layer_interval == 0 and moe_layer_start_index <= {number} <= last_moe_layer"
    statics = same(block + ".mlp.moe_statics.e_score_correction_bias", shape=("1", "experts"), dtype="float32")
    shared = blocks.fused_ffn(block + ".mlp.shared_experts", "expert_ffn * moe_num_shared_experts", bias=FFN_BIAS)
    return declared(
        blocks.norm(block + ".{input,post_attention}_layernorm"),
        blocks.fused_attention(block + ".self_attn", bias="use_bias", output_bias="use_bias"),
        only(f"not ({sparse})", blocks.fused_ffn(block + ".mlp", bias=FFN_BIAS)),
        only(sparse, blocks.turned_router(block + ".mlp.gate"), blocks.experts(block + ".mlp", bias="mlp_bias")),
        only(sparse, only("moe_use_aux_free", statics), only("moe_num_shared_experts > 0", shared)),
    )


FAMILY = Family(
    name="ernie4_5_moe",
    model_types=("ernie4_5_moe",),
    statements=declared(
        blocks.ends(head_bias="use_bias if lm_head_bias == None else lm_head_bias"),
        _block(blocks.LAYER, "layer"),
        _block(BLOCK, "index"),
        blocks.norm("model.mtp_{emb,hidden}_norm.{index}"),
        blocks.replicated("model.mtp_linear_proj.{index}", "2 * hidden", "hidden", bias="use_bias"),
    ),
    tied=(blocks.TIED_HEAD,),
    optional=(*STATICS, "model.mtp_{block,emb_norm,hidden_norm,linear_proj}.{index}."),
    sizes={
        "experts": "moe_num_experts | num_experts",
        "last_moe_layer": "layers - 1 if moe_layer_end_index == -1 else moe_layer_end_index",
    },
    numbers=(Numbers("index", "mtp_layers"),),
    defaults={
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_use_aux_free": True,
        "moe_num_shared_experts": 2,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": True,
    },
    tiny=blocks.TINY
    | {"num_hidden_layers": 3, "num_nextn_predict_layers": 2, "moe_num_experts": 4, "moe_intermediate_size": 16}
    | {"use_bias": True, "mlp_bias": False, "lm_head_bias": False},
    exported={key: key for key in ("moe_use_aux_free", "moe_norm_min")}
    | {**blocks.EXPORTED_PREDICTION, **EXPORTED_BIASES},
)
