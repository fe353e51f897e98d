"""MiniMax M2: experts in every layer under canonical names of their own, norms over all heads together.

Not declared: gated, latent, vha and dsv4 attention, and windows with heads of their own. No public model has them.
Names of tensors or the length of the fused layer identify them, and they are refused.
"""

from paddleformers_fc.families.declarations import FLEET, Statements, choice, declared, only, renamed
from paddleformers_fc.families.language import (
    MTP_LAYERS,
    TINY_MOE,
    family,
    fused_attention,
    fused_ffn,
    norm,
    routed_ffn,
)

NAMES = {"mlp.gate.e_score": "block_sparse_moe.e_score", "mlp.": "block_sparse_moe."}
NAMES |= {".gate_proj.": ".w1.", ".down_proj.": ".w2.", ".up_proj.": ".w3."}

EXPORTED_SIZE = "intermediate_size if first_k_dense_replace or use_dense_mtp else expert_ffn"
"""In models without a feed-forward beside the experts, ``intermediate_size`` is the size of an expert."""


def _layer(dense: str) -> Statements:
    shared = only("n_shared_experts", fused_ffn("mlp.shared_experts", "expert_ffn * n_shared_experts"))
    return declared(
        norm("{input,post_attention}_layernorm"),
        fused_attention("self_attn", bias="attention_bias"),
        only("use_qk_norm", norm("self_attn.q_norm", "q if qk_norm_type == 'per_layer' else head")),
        only("use_qk_norm", norm("self_attn.k_norm", "kv if qk_norm_type == 'per_layer' else head")),
        choice(dense, fused_ffn("mlp"), renamed(NAMES, routed_ffn("mlp", correction=True), shared)),
    )


FAMILY = family(
    "minimax_m2",
    classes=(FLEET,),
    layer=[_layer("layer < first_k_dense_replace")],
    prediction=[_layer("use_dense_mtp")],
    sizes={"expert_ffn": "moe_intermediate_size or intermediate_size", "mtp_layers": MTP_LAYERS},
    defaults={"first_k_dense_replace": 0, "use_qk_norm": True, "qk_norm_type": "per_layer", "head_dim": 128},
    tiny={**TINY_MOE, "num_nextn_predict_layers": 1},
    exported={"num_local_experts": "experts", "intermediate_size": EXPORTED_SIZE},
)
