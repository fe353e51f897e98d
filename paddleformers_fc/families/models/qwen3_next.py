"""Qwen 3 Next: gated delta nets or gated attention by layer, and the experts of Qwen 2 MoE.

Every query is next to its gate. The class does not build the prediction layers of files.
"""

from typing import Any

from paddleformers_fc.families import language as lang
from paddleformers_fc.families.models.qwen2_moe import SPARSE


def is_linear(layer: int, layer_types: Any, full_attention_interval: int) -> bool:
    """Return whether a layer has linear attention: by a list of all layers, or all layers except every n-th."""
    return layer_types[layer] == "linear_attention" if layer_types else (layer + 1) % full_attention_interval != 0


DELTA_NET = (
    lang.same("linear_attn.A_log", "linear_attn.dt_bias", shape=("linear_num_value_heads",)),
    lang.same(
        "linear_attn.conv1d.weight", shape=(("delta_keys", "delta_keys", "delta_values"), 1, "linear_conv_kernel_dim")
    ),
    lang.linear("linear_attn.in_proj_qkvz", outputs=("delta_keys", "delta_keys", "delta_values", "delta_values")),
    lang.linear("linear_attn.in_proj_ba", outputs=("linear_num_value_heads", "linear_num_value_heads")),
    lang.same("linear_attn.norm.weight", shape=("linear_value_head_dim",)),
    lang.linear("linear_attn.out_proj", inputs="delta_values"),
)
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATED = (
    lang.qkv("self_attn.qkv_proj", *QKV, bias="attention_bias", parts=("gated_q", "kv", "kv")),
    lang.row("self_attn.o_proj", inputs="q", bias="attention_bias"),
    lang.same("self_attn.q_norm.weight", "self_attn.k_norm.weight", shape=("head",)),
)
LAYER = (
    lang.same("input_layernorm.weight", "post_attention_layernorm.weight"),
    lang.when(is_linear, DELTA_NET),
    lang.unless(is_linear, GATED),
    lang.when(lang.stepped, SPARSE),
    lang.unless(lang.stepped, lang.mlp("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")),
)
FAMILY = lang.family(
    "qwen3_next",
    lang.decoder("model.embed_tokens", "model.layers.{layer}", "model.norm", "lm_head", LAYER),
    lang.optional("mtp."),
    sizes={"gated_q": ("q", "q"), "shared_ffn": "shared_expert_intermediate_size"},
    defaults={"decoder_sparse_step": 1, "full_attention_interval": 4, "head_dim": 256, "linear_conv_kernel_dim": 4},
    tiny={**lang.TINY_DELTA, "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
)
