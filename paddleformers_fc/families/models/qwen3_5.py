"""Qwen 3.5: gated delta nets or gated attention by layer, a vision tower, prediction layers; only PaddleFleet's class.

In files every query head is next to its gate; in the model the queries of a kv head precede their gates. The model's
delta net has query, key, value, gate, beta and alpha side by side for every rank.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from paddleformers_fc.families import language as lang
from paddleformers_fc.families.declarations import Family, Geometry
from paddleformers_fc.families.models.qwen3_vl import FLEET_BLOCK


def is_linear(layer: int, layer_types: Any) -> bool:
    """Return whether a layer has linear attention."""
    return bool(layer_types) and layer_types[layer] == "linear_attention"


def mtp_layers(num_nextn_predict_layers: Any, mtp_num_hidden_layers: Any) -> Any:
    """Return the number of prediction layers."""
    return num_nextn_predict_layers or mtp_num_hidden_layers or 0


SCOPE = "model.language_model"
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
NORMS = lang.same("input_layernorm.weight", "post_attention_layernorm.weight")
GATED = lang.qkv("self_attn.qkv_proj", *QKV, bias="attention_bias", parts=(("q", "q"), "kv", "kv"), groups="heads")
ATTENTION = (
    lang.when("attn_output_gate", GATED),
    lang.unless("attn_output_gate", lang.qkv("self_attn.qkv_proj", *QKV, bias="attention_bias")),
    lang.row("self_attn.o_proj", inputs="q", bias="attention_bias"),
    lang.same("self_attn.q_norm.weight", "self_attn.k_norm.weight", shape=("head",)),
)
MIXED = ("delta_keys", "delta_keys", "delta_values")
PER_HEAD = "linear_num_value_heads"
IN_PROJ = lang.qkv(
    "self_attn.in_proj",
    *("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    parts=(MIXED, "delta_values", PER_HEAD, PER_HEAD),
    per_rank=True,
)
SHAPE = (MIXED, 1, "linear_conv_kernel_dim")
CONV = tuple(
    structs.replace(one, geometry=Geometry.FUSED_QKV_PER_RANK, transposed=False, parts=MIXED)
    for one in lang.same("self_attn.conv1d.weight", file="linear_attn.conv1d.weight", shape=SHAPE, cut=0)
)
DELTA_NET = (
    lang.same("self_attn.A_log", file="linear_attn.A_log", shape=(PER_HEAD,), cut=0, dtype="float32"),
    lang.same("self_attn.dt_bias", file="linear_attn.dt_bias", shape=(PER_HEAD,), cut=0, dtype="float32"),
    CONV,
    IN_PROJ,
    lang.same("self_attn.out_norm.weight", file="linear_attn.norm.weight", shape=("linear_value_head_dim",)),
    lang.row("self_attn.out_proj", file="linear_attn.out_proj", inputs="delta_values"),
)
VISION = lang.vision(
    "model.vision_model",
    lang.patches("patch_embed", file="patch_embed.proj", bias=True),
    lang.same("pos_embed.weight", shape=("num_position_embeddings", "hidden")),
    lang.same("merger.norm.weight", "merger.norm.bias"),
    lang.column("merger.mlp.up_gate_proj", file="merger.linear_fc1", inputs="merged", outputs="merged", bias=True),
    lang.row("merger.mlp.down_proj", file="merger.linear_fc2", inputs="merged", outputs="out_hidden_size", bias=True),
    FLEET_BLOCK,
    file="model.visual",
    defaults={"patch_size": 16, "num_position_embeddings": 2304},
)
MIXERS = (lang.when(is_linear, DELTA_NET), lang.unless(is_linear, ATTENTION))
KINDS = {"layer_types": ["linear_attention", "full_attention"]}
TINY = {**lang.TINY_DELTA, **KINDS, "attn_output_gate": True, "mtp_num_hidden_layers": 1}


def declared(name: str, ffn: lang.Group, predicted: lang.Group, tiny: Mapping[str, Any], **sizes: lang.Size) -> Family:
    """Declare a family with these feed-forward layers, in layers and in prediction layers."""
    return lang.family(
        name,
        lang.ends(f"{SCOPE}.embed_tokens", f"{SCOPE}.norm", "lm_head"),
        lang.column(f"{SCOPE}.layers.{{mtp}}.eh_proj", file="mtp.fc", inputs=("hidden", "hidden")),
        lang.same(f"{SCOPE}.layers.{{mtp}}.enorm.weight", file="mtp.pre_fc_norm_embedding.weight"),
        lang.same(f"{SCOPE}.layers.{{mtp}}.hnorm.weight", file="mtp.pre_fc_norm_hidden.weight"),
        lang.same(f"{SCOPE}.layers.{{mtp}}.norm.weight", file="mtp.norm.weight"),
        lang.layer(f"{SCOPE}.layers.{{mtp}}.transformer_layer", NORMS, ATTENTION, predicted, file="mtp.layers.{mtp}"),
        lang.layer(f"{SCOPE}.layers.{{layer}}", NORMS, MIXERS, ffn),
        lang.optional("mtp."),
        classes=(lang.FLEET,),
        key="text_config",
        towers=(VISION,),
        sizes={"mtp_layers": mtp_layers, **sizes},
        numbers=(lang.Numbers("mtp", "mtp_layers", shift="layers"),),
        defaults={"linear_conv_kernel_dim": 4},
        tiny={"text_config": {**TINY, **tiny}, "vision_config": lang.TINY_VISION},
    )


FFN = lang.gated("mlp.up_gate_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
FAMILY = declared("qwen3_5", FFN, FFN, {})
