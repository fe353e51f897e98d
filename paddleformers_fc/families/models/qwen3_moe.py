"""Qwen 3 MoE: routed experts in all layers except ``mlp_only_layers``."""

from paddleformers_fc.families import language as lang

LAYER = (
    lang.same("input_layernorm.weight", "post_attention_layernorm.weight"),
    lang.qkv("self_attn.qkv_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias="attention_bias"),
    lang.row("self_attn.o_proj", inputs="q", bias="attention_bias"),
    lang.same("self_attn.q_norm.weight", fleet="self_attn.q_layernorm.weight", shape=("head",)),
    lang.same("self_attn.k_norm.weight", fleet="self_attn.k_layernorm.weight", shape=("head",)),
    lang.when(
        lang.stepped,
        lang.router("mlp.gate"),
        lang.experts(
            "mlp.experts.{expert}", lang.gated("up_gate_proj", "gate_proj", "up_proj", "down_proj", "expert_ffn")
        ),
    ),
    lang.unless(lang.stepped, lang.gated("mlp.up_gate_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")),
)
FAMILY = lang.family(
    "qwen3_moe",
    lang.decoder("model.embed_tokens", "model.layers.{layer}", "model.norm", "lm_head", LAYER),
    classes=(lang.FLEET, lang.FORMERS),
    defaults={"decoder_sparse_step": 1},
    tiny={"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16, "mlp_only_layers": [0]},
    exported={"num_experts": "experts", "num_local_experts": "experts"},
)
