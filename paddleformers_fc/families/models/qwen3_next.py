"""Qwen 3 Next: gated delta nets and gated attention by layer, experts as of Qwen 2 MoE.

Every query has its gate beside it. Prediction layers of files are not built.
"""

from paddleformers_fc.families import language as lang
from paddleformers_fc.families.models.qwen2_moe import SPARSE

GATED = lang.declared(
    lang.fused_qkv("self_attn", bias="attention_bias", parts=("2 * q", "kv", "kv")),
    lang.row("self_attn.o_proj", "q", "hidden", "attention_bias"),
    lang.norm("self_attn.{q,k}_norm", "head"),
)
FAMILY = lang.family(
    "qwen3_next",
    layer=[
        lang.norm("{input,post_attention}_layernorm"),
        lang.choice(lang.IS_LINEAR, lang.delta_net("linear_attn"), GATED),
        lang.choice(lang.STEPPED, SPARSE, lang.ffn("mlp")),
    ],
    optional=("mtp.",),
    sizes={**lang.DELTA_SIZES, "shared_ffn": "shared_expert_intermediate_size"},
    defaults={"decoder_sparse_step": 1, "full_attention_interval": 4, "head_dim": 256, "linear_conv_kernel_dim": 4},
    tiny={**lang.TINY_DELTA, "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
)
