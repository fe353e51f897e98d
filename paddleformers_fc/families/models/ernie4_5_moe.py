"""ERNIE 4.5 MoE: the dense family's layers, routed and shared experts, and multi-token-prediction blocks.

Prediction blocks are separate from the layers, in a class that pipelines do not build. A block has experts if the layer
with the same number would have them. Biases are those of the dense family, but in Transformers ``use_bias`` also adds
a bias to the head, and none to routed experts.
"""

from typing import Any

from paddleformers_fc.families import language as lang
from paddleformers_fc.families.declarations import Stage
from paddleformers_fc.families.models.ernie4_5 import ATTENTION, EXPORTED_BIASES, FFN, ffn_bias


def sparse(layer: int, moe_layer_interval: int, moe_layer_start_index: int, last_moe_layer: int) -> bool:
    """Return whether a layer has experts."""
    return (layer + 1) % moe_layer_interval == 0 and moe_layer_start_index <= layer <= last_moe_layer


def head_bias(lm_head_bias: Any, use_bias: Any) -> Any:
    """Return whether the head has a bias."""
    return use_bias if lm_head_bias is None else lm_head_bias


EXPERT = lang.gated("up_gate_proj", "gate_proj", "up_proj", "down_proj", "expert_ffn", bias="mlp_bias")
SHARED = lang.gated("up_gate_proj", "gate_proj", "up_proj", "down_proj", "shared_ffn", bias=ffn_bias)
EXPERTS = (
    lang.router("mlp.gate"),
    lang.uncut(lang.layer("mlp.experts.{expert}", EXPERT)),
    lang.when("moe_use_aux_free", lang.balance("mlp.moe_statics.e_score_correction_bias", shape=(1, "experts"))),
    lang.when("moe_num_shared_experts", lang.layer("mlp.shared_experts", SHARED)),
)
LAYER = (ATTENTION, lang.when(sparse, EXPERTS), lang.unless(sparse, FFN))
PREDICTIONS = (
    lang.renumbered("index", lang.layer("model.mtp_block.{index}", LAYER)),
    lang.same("model.mtp_emb_norm.{index}.weight", "model.mtp_hidden_norm.{index}.weight"),
    lang.linear("model.mtp_linear_proj.{index}", inputs=("hidden", "hidden"), bias="use_bias"),
)
FAMILY = lang.family(
    "ernie4_5_moe",
    lang.ends("model.embed_tokens", "model.norm", "lm_head", bias=head_bias),
    lang.at(Stage.ABSENT, PREDICTIONS),
    lang.layer("model.layers.{layer}", LAYER),
    lang.optional("model.layers.{layer}.mlp.moe_statics.", "model.mtp_block.{index}.mlp.moe_statics."),
    lang.optional("model.mtp_{block,emb_norm,hidden_norm,linear_proj}.{index}."),
    sizes={
        "experts": lang.OneOf(("moe_num_experts", "num_experts")),
        "shared_ffn": lambda expert_ffn, moe_num_shared_experts: expert_ffn * moe_num_shared_experts,
        "last_moe_layer": lambda layers, moe_layer_end_index: (
            layers - 1 if moe_layer_end_index == -1 else moe_layer_end_index
        ),
    },
    numbers=(lang.Numbers("index", "mtp_layers"),),
    defaults={
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_use_aux_free": True,
        "moe_num_shared_experts": 2,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": True,
    },
    tiny={
        "num_hidden_layers": 3,
        "num_nextn_predict_layers": 2,
        "moe_num_experts": 4,
        "moe_intermediate_size": 16,
        "use_bias": True,
        "mlp_bias": False,
        "lm_head_bias": False,
    },
    exported={"moe_use_aux_free": "moe_use_aux_free", "moe_norm_min": "moe_norm_min", **EXPORTED_BIASES},
    built=("mtp_block", "mtp_hidden_norm", "mtp_emb_norm", "mtp_linear_proj"),
)
