"""MiniMax M2: experts in every layer under canonical names of their own, norms over all heads together.

Not declared: gated, latent, vha and dsv4 attention, and windows with heads of their own. No public model has them.
Names of tensors or the length of the fused layer identify them, and they are refused. In models without a feed-forward
beside the experts, ``intermediate_size`` is the size of an expert.
"""

from paddleformers_fc.families import language as lang

NAMES = {"mlp.gate.e_score": "block_sparse_moe.e_score", "mlp.": "block_sparse_moe."}
NAMES |= {".gate_proj.": ".w1.", ".down_proj.": ".w2.", ".up_proj.": ".w3."}
DENSE = "layer < first_k_dense_replace or layer >= layers and use_dense_mtp"
SHARED = lang.only("n_shared_experts", lang.fused_ffn("mlp.shared_experts", "expert_ffn * n_shared_experts"))
EXPORTED_SIZE = "intermediate_size if first_k_dense_replace or use_dense_mtp else expert_ffn"
LAYER = (
    lang.norm("{input,post_attention}_layernorm"),
    lang.fused_attention("self_attn", bias="attention_bias"),
    lang.only("use_qk_norm", lang.norm("self_attn.q_norm", "q if qk_norm_type == 'per_layer' else head")),
    lang.only("use_qk_norm", lang.norm("self_attn.k_norm", "kv if qk_norm_type == 'per_layer' else head")),
    lang.choice(DENSE, lang.fused_ffn("mlp"), lang.renamed(NAMES, lang.routed_ffn("mlp", correction=True), SHARED)),
)
FAMILY = lang.family(
    "minimax_m2",
    classes=(lang.FLEET,),
    layer=LAYER,
    prediction=LAYER,
    sizes={"expert_ffn": "moe_intermediate_size or intermediate_size", "mtp_layers": lang.MTP_LAYERS},
    defaults={"first_k_dense_replace": 0, "use_qk_norm": True, "qk_norm_type": "per_layer", "head_dim": 128},
    tiny={**lang.TINY_MOE, "num_nextn_predict_layers": 1},
    exported={"num_local_experts": "experts", "intermediate_size": EXPORTED_SIZE},
    divided=("vocab",),
)
