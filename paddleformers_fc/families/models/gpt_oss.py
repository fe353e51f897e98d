"""GPT-OSS: in both spaces the experts of a layer are stacked on a new axis, gate and up columns alternate."""

from paddleformers_fc.families.language import attention, ends, family, fresh, norm, same

FAMILY = family(
    "gpt_oss",
    layer=[
        norm("{input,post_attention}_layernorm"),
        attention("self_attn", bias="attention_bias", output_bias="attention_bias"),
        same("self_attn.sinks", shape=("heads",), cut=0),
        same("mlp.router.weight", shape=("experts", "hidden")),
        same("mlp.router.bias", shape=("experts",)),
        same("mlp.experts.gate_up_proj", shape=("experts", "hidden", "2 * ffn")),
        same("mlp.experts.gate_up_proj_bias", shape=("experts", "2 * ffn")),
        same("mlp.experts.down_proj", shape=("experts", "ffn", "hidden")),
        same("mlp.experts.down_proj_bias", shape=("experts", "hidden")),
    ],
    outside=[
        ends(),
        fresh("model.rotary_emb.{inv_freq,original_inv_freq}", shape=("head // 2",), where="False"),
    ],
    defaults={"attention_bias": True, "head_dim": 64},
    tiny={"head_dim": 4, "num_local_experts": 4},
    exported={"num_experts": "experts", "num_local_experts": "experts"},
)
