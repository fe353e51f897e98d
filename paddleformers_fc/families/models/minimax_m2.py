"""MiniMax M2: experts in every layer under names of their own, norms over all heads together; of PaddleFleet's class.

Not declared: gated, latent, vha and dsv4 attention, and windows with heads of their own. They are no public model's;
names of tensors or the length of the fused layer tell them, and they are refused.
"""

from paddleformers_fc.families import blocks
from paddleformers_fc.families.declarations import Family, Statements, declared, only, renamed, same

NAMES = {
    ".mlp.gate.e_score": ".block_sparse_moe.e_score",
    ".mlp.": ".block_sparse_moe.",
    ".gate_proj.": ".w1.",
    ".down_proj.": ".w2.",
    ".up_proj.": ".w3.",
}

HAS_DENSE = "first_k_dense_replace or use_dense_mtp"
"""Which models have a feed-forward beside the experts; in others ``intermediate_size`` is the size of an expert."""


def _layer(layer: str, dense: str) -> Statements:
    attention, ffn = layer + ".self_attn", layer + ".mlp"
    sparse = declared(blocks.router(ffn + ".gate"), blocks.score_correction(ffn + ".gate"), blocks.fleet_experts(ffn))
    shared = only("n_shared_experts", blocks.fused_ffn(ffn + ".shared_experts", "expert_ffn * n_shared_experts"))
    return declared(
        blocks.norm(layer + ".{input,post_attention}_layernorm"),
        blocks.fused_attention(attention, bias="attention_bias"),
        only("use_qk_norm", same(attention + ".q_norm.weight", shape=("q if qk_norm_type == 'per_layer' else head",))),
        only("use_qk_norm", same(attention + ".k_norm.weight", shape=("kv if qk_norm_type == 'per_layer' else head",))),
        only(dense, blocks.fused_ffn(ffn)),
        only(f"not ({dense})", renamed(NAMES, sparse, shared)),
    )


FAMILY = Family(
    name="minimax_m2",
    model_types=("minimax_m2",),
    statements=declared(
        blocks.fleet_ends(),
        _layer(blocks.LAYER, "layer < first_k_dense_replace"),
        blocks.fleet_prediction(_layer(blocks.PREDICTION, "use_dense_mtp")),
    ),
    tied=(blocks.TIED_FLEET_HEAD,),
    optional=("model.layers.{mtp}.",),
    sizes={
        "expert_ffn": "moe_intermediate_size or intermediate_size",
        "mtp_layers": "mtp_num_layers or num_nextn_predict_layers or 0",
    },
    numbers=blocks.fleet_numbers(),
    defaults={"first_k_dense_replace": 0, "use_qk_norm": True, "qk_norm_type": "per_layer", "head_dim": 128},
    tiny=dict(blocks.TINY, head_dim=8, n_routed_experts=4, moe_intermediate_size=16, num_nextn_predict_layers=1),
    exported=blocks.EXPORTED_PREDICTION
    | {"num_local_experts": "experts", "intermediate_size": f"intermediate_size if {HAS_DENSE} else expert_ffn"},
)
