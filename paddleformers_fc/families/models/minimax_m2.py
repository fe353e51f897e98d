"""MiniMax M2: experts in every layer, with special canonical names, and norms over all heads together.

Gated, latent, vha and dsv4 attention and windows with separate heads are not declared, because no public model has
them. Tensor names or the length of the fused layer show them, and binding fails. In models that only have experts,
``intermediate_size`` is the size of an expert.
"""

from typing import Any

from paddleformers_fc.families import language as lang


def dense(layer: int, first_k_dense_replace: int, layers: int, use_dense_mtp: Any) -> bool:
    """Return whether a layer has no experts."""
    return layer < first_k_dense_replace or (layer >= layers and bool(use_dense_mtp))


EXPERT = lang.gated("up_gate_proj", "w1", "w3", "down_proj", "expert_ffn", file="w2")
SHARED = lang.gated("up_gate_proj", "w1", "w3", "down_proj", "shared_ffn", file="w2")
EXPERTS = (
    lang.router("mlp.gate", file="block_sparse_moe.gate"),
    lang.balance("mlp.gate.e_score_correction_bias", file="block_sparse_moe.e_score_correction_bias"),
    lang.experts("mlp.experts.{expert}", EXPERT, file="block_sparse_moe.experts.{expert}"),
    lang.when("n_shared_experts", lang.layer("mlp.shared_experts", SHARED, file="block_sparse_moe.shared_experts")),
)
LAYER = (
    lang.same("input_layernorm.weight", "post_attention_layernorm.weight"),
    lang.qkv("self_attn.qkv_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias="attention_bias"),
    lang.row("self_attn.o_proj", inputs="q"),
    lang.when("use_qk_norm", lang.same("self_attn.q_norm.weight", shape=("q_norm",))),
    lang.when("use_qk_norm", lang.same("self_attn.k_norm.weight", shape=("k_norm",))),
    lang.when(dense, lang.gated("mlp.up_gate_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")),
    lang.unless(dense, EXPERTS),
)
FAMILY = lang.family(
    "minimax_m2",
    lang.decoder("model.embed_tokens", "model.layers.{layer}", "model.norm", "lm_head", LAYER),
    lang.prediction("model.layers.{mtp}", LAYER),
    classes=(lang.FLEET,),
    sizes={
        "expert_ffn": lambda moe_intermediate_size, intermediate_size: moe_intermediate_size or intermediate_size,
        "q_norm": lambda qk_norm_type, q, head: q if qk_norm_type == "per_layer" else head,
        "k_norm": lambda qk_norm_type, kv, head: kv if qk_norm_type == "per_layer" else head,
        "mtp_layers": lang.mtp_layers,
        "exported_ffn": lambda first_k_dense_replace, use_dense_mtp, intermediate_size, expert_ffn: (
            intermediate_size if first_k_dense_replace or use_dense_mtp else expert_ffn
        ),
    },
    defaults={"first_k_dense_replace": 0, "use_qk_norm": True, "qk_norm_type": "per_layer", "head_dim": 128},
    tiny={**lang.TINY_MOE, "num_nextn_predict_layers": 1},
    exported={"num_local_experts": "experts", "intermediate_size": "exported_ffn"},
    divided=("vocab",),
)
