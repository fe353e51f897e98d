"""Layers of DeepSeek V4 in PaddleFleet's class: compressed attention, and connections of several residual streams."""

from __future__ import annotations

from paddleformers_fc.families import language as lang
from paddleformers_fc.families.declarations import Statements, untrained

SIZES = {
    "value": "v_head_dim | head_dim",
    "streams": "num_residual_streams | hc_mult",
    "mixes": "streams * streams + 2 * streams",
    "ratios": "csa_compress_ratios | compress_ratios",
    "hash_layers": "moe_n_hash_layers | num_hash_layers",
    "index_heads": "dsa_index_n_heads | index_n_heads",
    "index_head": "dsa_index_head_dim | index_head_dim",
    "table": "actual_vocab_size or vocab",
    "empty": "num_empty_layers_add_in_head or 0",
}
"""The names of sizes in PaddleFormers' configuration and in that of the open weights."""

EXPORTED = {
    "head_dim": "value",
    "hc_mult": "streams",
    "compress_ratios": "ratios",
    "num_hash_layers": "hash_layers",
    "index_n_heads": "index_heads",
    "index_head_dim": "index_head",
    "index_topk": "dsa_index_topk | index_topk",
    "compress_rope_theta": "csa_compress_rotary_base | compress_rope_theta",
    "sliding_window": "csa_window_size | sliding_window",
    "hc_sinkhorn_iters": "mhc_sinkhorn_iterations | hc_sinkhorn_iters",
}
"""The keys of the open weights' configuration, which PaddleFormers renames."""

TINY = {
    "q_lora_rank": 16,
    "v_head_dim": 4,
    "o_groups": 2,
    "o_lora_rank": 6,
    "num_residual_streams": 2,
    "dsa_index_n_heads": 4,
    "dsa_index_head_dim": 6,
    "num_experts_per_tok": 2,
    "actual_vocab_size": 64,
}
"""Part of the tiny configuration."""

_COMPRESSED = "len(ratios) > layer and ratios[layer] > 0"
_INDEXED = "len(ratios) > layer and 0 < ratios[layer] <= 4"
_NAMES = {
    "self_attn.core_attention.": "attn.",
    "self_attn.": "attn.",
    "q_layernorm": "q_norm",
    "kv_layernorm": "kv_norm",
}
_NAMES |= {"linear_q_down_proj": "wq_a", "linear_q_up_proj": "wq_b", "linear_kv_proj": "wkv"}
_NAMES |= {"linear_o_group_proj": "wo_a", "o_proj": "wo_b", "linear_": ""}
_FFN = {
    "e_score_correction_bias": "bias",
    ".gate_proj.": ".w1.",
    ".down_proj.": ".w2.",
    ".up_proj.": ".w3.",
    "mlp.": "ffn.",
}


def _compressor(name: str, size: str) -> Statements:
    wide = f"{size} * (2 if ratios[layer] == 4 else 1)"
    return lang.declared(
        lang.same(f"{name}.ape", shape=("ratios[layer]", wide), dtype="float32"),
        lang.replicated(f"{name}.linear_{{wgate,wkv}}", "hidden", wide),
        lang.norm(f"{name}.norm", size),
    )


def _attention(prefix: str) -> Statements:
    """Declare attention over compressed keys, with an indexer where a layer compresses by 4."""
    core, group = f"{prefix}.core_attention", f"{prefix}.linear_o_group_proj"
    indexer = lang.declared(
        _compressor(f"{core}.indexer.compressor", "index_head"),
        lang.replicated(f"{core}.indexer.linear_weights_proj", "hidden", "index_heads"),
        lang.replicated(f"{core}.indexer.linear_wq_b", "q_lora_rank", "index_heads * index_head"),
    )
    return lang.renamed(
        _NAMES,
        lang.replicated(f"{prefix}.linear_q_down_proj", "hidden", "q_lora_rank"),
        lang.norm(f"{prefix}.q_layernorm", "q_lora_rank"),
        lang.column(f"{prefix}.linear_q_up_proj", "q_lora_rank", "heads * value"),
        lang.column(f"{prefix}.linear_kv_proj", "hidden", "value"),
        lang.norm(f"{prefix}.kv_layernorm", "value"),
        lang.same(group, f"{group}.weight", shape=("o_groups * o_lora_rank", "heads * value // o_groups")),
        lang.row(f"{prefix}.o_proj", "o_groups * o_lora_rank", "hidden"),
        lang.same(f"{core}.attn_sink", shape=("heads",), dtype="float32"),
        lang.only(_COMPRESSED, _compressor(f"{core}.compressor", "value")),
        lang.only(_INDEXED, indexer),
    )


def _connection(name: str, files: str) -> Statements:
    """Declare the connection of a layer with the residual streams; files hold its three factors in one tensor."""
    return lang.declared(
        lang.held_together(f"{name}.alpha_{{pre,post,res}}", f"{files}_scale", ("1",)),
        lang.same(f"{name}.bias", f"{files}_base", ("mixes",)),
        lang.linear(f"{name}.mapping_proj.weight", f"{files}_fn", ("streams * hidden", "mixes")),
    )


HEAD = lang.declared(
    lang.same("hc_head_base", shape=("streams",)),
    lang.linear("hc_head_fn", shape=("streams * hidden", "streams")),
    lang.same("hc_head_scale", shape=("1",)),
)
"""The layer that joins the streams."""


def _routed_ffn(hashed: bool) -> Statements:
    """Declare a router and experts; the router of the first layers is a table of experts by token if ``hashed``."""
    bias = lang.balance("mlp.gate")
    table = untrained(lang.same("mlp.gate.tid2eid", shape=("table", "num_experts_per_tok"), dtype="int64"))
    return lang.renamed(
        _FFN,
        lang.router("mlp.gate"),
        lang.choice("layer >= hash_layers", bias, table) if hashed else bias,
        lang.experts("mlp"),
        lang.only("n_shared_experts", lang.fused_ffn("mlp.shared_experts", "expert_ffn * n_shared_experts")),
    )


def layer(hashed: bool) -> Statements:
    """Declare a layer; the router of the first ones is a table of experts by token if ``hashed``."""
    return lang.declared(
        lang.renamed({"input_layernorm": "attn_norm"}, lang.norm("input_layernorm")),
        lang.renamed({"post_attention_layernorm": "ffn_norm"}, lang.norm("post_attention_layernorm")),
        _attention("self_attn"),
        _connection("self_attention_hyper_connection", "hc_attn"),
        _connection("mlp_hyper_connection", "hc_ffn"),
        _routed_ffn(hashed),
    )


def prediction(number: str) -> Statements:
    """Declare a prediction layer around a layer of this number, which has no table."""
    return lang.declared(
        lang.column("{e,h}_proj", "hidden", "hidden"),
        lang.norm("{enorm,hnorm,norm}"),
        HEAD,
        lang.renumbered(number, lang.within("transformer_layer", layer(hashed=False), canonical="")),
    )
