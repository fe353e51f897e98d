"""DeepSeek V4: attention over compressed keys, several residual streams, separately named prediction layers.

A layer compresses its keys if its entry in ``csa_compress_ratios`` is positive, and has an indexer if the entry is also
at most 4. In the first layers, the router is a table of experts by token. Files store the three factors of a connection
in one tensor.
"""

from typing import Any

from paddleformers_fc.families import language as lang


def ratio(ratios: Any, layer: int) -> Any:
    """Return the number of keys that a layer compresses into one; 0 for none."""
    return ratios[layer] if len(ratios) > layer else 0


def compressed(ratios: Any, layer: int) -> bool:
    """Return whether a layer compresses its keys."""
    return bool(ratio(ratios, layer) > 0)


def indexed(ratios: Any, layer: int) -> bool:
    """Return whether a layer has an indexer."""
    return bool(0 < ratio(ratios, layer) <= 4)


def hashed(layer: int, hash_layers: int) -> bool:
    """Return whether the router of a layer is a table."""
    return layer < hash_layers


def wide_value(value: int, ratios: Any, layer: int) -> int:
    """Return the width of compressed keys."""
    return value * (2 if ratio(ratios, layer) == 4 else 1)


def wide_index(index_head: int, ratios: Any, layer: int) -> int:
    """Return the width of the indexer's compressed keys."""
    return index_head * (2 if ratio(ratios, layer) == 4 else 1)


def compressor(name: str, file: str, size: str, wide: lang.Size) -> lang.Group:
    """Declare the layers that compress keys."""
    return lang.layer(
        name,
        lang.same("ape", shape=(ratio, wide), dtype="float32"),
        lang.linear("linear_wgate", file="wgate", outputs=wide),
        lang.linear("linear_wkv", file="wkv", outputs=wide),
        lang.same("norm.weight", shape=(size,)),
        file=file,
    )


INDEXER = lang.layer(
    "self_attn.core_attention.indexer",
    compressor("compressor", "compressor", "index_head", wide_index),
    lang.linear("linear_weights_proj", file="weights_proj", outputs="index_heads"),
    lang.linear("linear_wq_b", file="wq_b", inputs="q_lora_rank", outputs="index_size"),
    file="attn.indexer",
)
ATTENTION = (
    lang.linear("self_attn.linear_q_down_proj", file="attn.wq_a", outputs="q_lora_rank"),
    lang.same("self_attn.q_layernorm.weight", file="attn.q_norm.weight", shape=("q_lora_rank",)),
    lang.column("self_attn.linear_q_up_proj", file="attn.wq_b", inputs="q_lora_rank", outputs="q"),
    lang.column("self_attn.linear_kv_proj", file="attn.wkv", outputs="value"),
    lang.same("self_attn.kv_layernorm.weight", file="attn.kv_norm.weight", shape=("value",)),
    lang.same("self_attn.linear_o_group_proj", file="attn.wo_a.weight", shape=("o_groups_rank", "q_group")),
    lang.row("self_attn.o_proj", file="attn.wo_b", inputs="o_groups_rank"),
    lang.same("self_attn.core_attention.attn_sink", file="attn.attn_sink", shape=("heads",), dtype="float32"),
    lang.when(compressed, compressor("self_attn.core_attention.compressor", "attn.compressor", "value", wide_value)),
    lang.when(indexed, INDEXER),
)


def connection(name: str, file: str) -> lang.Group:
    """Declare the connection of a layer to the residual streams."""
    alphas = (f"{name}.alpha_pre", f"{name}.alpha_post", f"{name}.alpha_res")
    return (
        lang.stored_in_one(*alphas, file=f"{file}_scale", shape=(1,)),
        lang.same(f"{name}.bias", file=f"{file}_base", shape=("mixes",)),
        lang.transposed(f"{name}.mapping_proj.weight", file=f"{file}_fn", shape=("stream_hidden", "mixes")),
    )


BIAS = lang.balance("mlp.gate.e_score_correction_bias", file="ffn.gate.bias")
TABLE_SHAPE = ("table", "num_experts_per_tok")
TABLE = lang.same("mlp.gate.tid2eid", file="ffn.gate.tid2eid", shape=TABLE_SHAPE, dtype="int64", trained=False)
EXPERT = lang.gated("up_gate_proj", "w1", "w3", "down_proj", "expert_ffn", file="w2")
SHARED = lang.gated("up_gate_proj", "w1", "w3", "down_proj", "shared_ffn", file="w2")
EXPERTS = (
    lang.experts("mlp.experts.{expert}", EXPERT, file="ffn.experts.{expert}"),
    lang.when("n_shared_experts", lang.layer("mlp.shared_experts", SHARED, file="ffn.shared_experts")),
)
BODY = (
    lang.same("input_layernorm.weight", file="attn_norm.weight"),
    lang.same("post_attention_layernorm.weight", file="ffn_norm.weight"),
    ATTENTION,
    connection("self_attention_hyper_connection", "hc_attn"),
    connection("mlp_hyper_connection", "hc_ffn"),
    lang.router("mlp.gate", file="ffn.gate"),
)
ROUTER = (lang.unless(hashed, BIAS), lang.when(hashed, TABLE))
CONTRACT = (
    lang.same("hc_head_base", shape=("streams",)),
    lang.transposed("hc_head_fn", shape=("stream_hidden", "streams")),
    lang.same("hc_head_scale", shape=(1,)),
)
PREDICTION = lang.layer(
    "model.layers.{mtp}",
    lang.column("e_proj", "h_proj"),
    lang.same("enorm.weight", "hnorm.weight", "norm.weight"),
    CONTRACT,
    lang.renumbered(("layers", "mtp"), lang.layer("transformer_layer", BODY, BIAS, EXPERTS, file="")),
    file="mtp.{mtp}",
)
FAMILY = lang.family(
    "deepseek_v4",
    lang.ends("model.embed_tokens", "model.norm", "lm_head", files=("embed", "norm", "head")),
    lang.at(lang.NORM, lang.layer("model.mhc_contract", CONTRACT, file="")),
    PREDICTION,
    lang.layer("model.layers.{layer}", BODY, ROUTER, EXPERTS, file="layers.{layer}"),
    lang.optional("mtp.{mtp}."),
    classes=(lang.FLEET,),
    sizes={
        "value": lang.OneOf(("v_head_dim", "head_dim")),
        "streams": lang.OneOf(("num_residual_streams", "hc_mult")),
        "ratios": lang.OneOf(("csa_compress_ratios", "compress_ratios")),
        "hash_layers": lang.OneOf(("moe_n_hash_layers", "num_hash_layers")),
        "index_heads": lang.OneOf(("dsa_index_n_heads", "index_n_heads")),
        "index_head": lang.OneOf(("dsa_index_head_dim", "index_head_dim")),
        "index_size": lambda index_heads, index_head: index_heads * index_head,
        "q": lambda heads, value: heads * value,
        "q_group": lambda q, o_groups: q // o_groups,
        "o_groups_rank": lambda o_groups, o_lora_rank: o_groups * o_lora_rank,
        "stream_hidden": lambda streams, hidden: streams * hidden,
        "mixes": lambda streams: streams * streams + 2 * streams,
        "table": lambda actual_vocab_size, vocab: actual_vocab_size or vocab,
        "mtp_layers": lang.mtp_layers,
    },
    numbers=(
        lang.Numbers("layer", "layers", shift="empty"),
        lang.Numbers("mtp", "mtp_layers", shift=("layers", "empty")),
    ),
    defaults={"moe_n_hash_layers": 3, "n_shared_experts": 1, "num_residual_streams": 4},
    tiny={
        **lang.TINY_MOE,
        "num_hidden_layers": 3,
        "csa_compress_ratios": [0, 4, 8, 4],
        "moe_n_hash_layers": 1,
        "q_lora_rank": 16,
        "v_head_dim": 4,
        "o_groups": 2,
        "o_lora_rank": 6,
        "num_residual_streams": 2,
        "dsa_index_n_heads": 4,
        "dsa_index_head_dim": 6,
        "num_experts_per_tok": 2,
        "actual_vocab_size": 64,
        "num_nextn_predict_layers": 1,
    },
    exported={
        "head_dim": "value",
        "hc_mult": "streams",
        "compress_ratios": "ratios",
        "num_hash_layers": "hash_layers",
        "index_n_heads": "index_heads",
        "index_head_dim": "index_head",
        "index_topk": lang.OneOf(("dsa_index_topk", "index_topk")),
        "compress_rope_theta": lang.OneOf(("csa_compress_rotary_base", "compress_rope_theta")),
        "sliding_window": lang.OneOf(("csa_window_size", "sliding_window")),
        "hc_sinkhorn_iters": lang.OneOf(("mhc_sinkhorn_iterations", "hc_sinkhorn_iters")),
    },
    divided=("vocab",),
)
