"""GPT-OSS: in model and files, experts are stacked on a new axis, and columns of gate and up alternate."""

from paddleformers_fc.families import language as lang

LAYER = (
    lang.same("input_layernorm.weight", "post_attention_layernorm.weight"),
    lang.attention(
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", bias="attention_bias"
    ),
    lang.same("self_attn.sinks", shape=("heads",), cut=0),
    lang.same("mlp.router.weight", shape=("experts", "hidden")),
    lang.same("mlp.router.bias", shape=("experts",)),
    lang.same("mlp.experts.gate_up_proj", shape=("experts", "hidden", ("ffn", "ffn"))),
    lang.same("mlp.experts.gate_up_proj_bias", shape=("experts", ("ffn", "ffn"))),
    lang.same("mlp.experts.down_proj", shape=("experts", "ffn", "hidden")),
    lang.same("mlp.experts.down_proj_bias", shape=("experts", "hidden")),
)
FAMILY = lang.family(
    "gpt_oss",
    lang.decoder("model.embed_tokens", "model.layers.{layer}", "model.norm", "lm_head", LAYER),
    lang.alias(lang.fresh("model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq")),
    defaults={"attention_bias": True, "head_dim": 64},
    tiny={"head_dim": 4, "num_local_experts": 4},
    exported={"num_experts": "experts", "num_local_experts": "experts"},
)
