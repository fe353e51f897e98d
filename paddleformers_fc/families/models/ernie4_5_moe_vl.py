"""ERNIE 4.5 VL: routed experts of two modalities with sizes and routers of their own, a vision tower and a resampler.

No layer is fused. An untied head is transposed. Not declared: a vocabulary of images (``mm_vocab_size``).
"""

from paddleformers_fc.families import language as lang, towers

SPARSE = "(layer + 1) % moe_layer_interval == 0 and moe_layer_start_index[0] <= layer <= moe_layer_end_index[0]"
OF_EXPERT = "(moe_intermediate_size[0] if expert < moe_num_experts[0] else moe_intermediate_size[1])"
EXPERTS = lang.declared(
    lang.uncut(lang.ffn("mlp.experts.{expert}", OF_EXPERT, "use_bias")),
    lang.ffn("mlp.shared_experts", "moe_intermediate_size[0] * moe_num_shared_experts", "use_bias"),
    lang.same("mlp.gate.weight", shape=("hidden", "moe_num_experts[0]"), dtype="float32"),
    lang.same("mlp.gate.weight_1", shape=("hidden", "moe_num_experts[1]"), dtype="float32"),
    lang.only("moe_use_aux_free", lang.balance("mlp.moe_statics", ("2", "moe_num_experts[0]"))),
)
EMBEDDING = lang.same("model.embed_tokens.weight", shape=("vocab", "hidden"), cut=0)
FAMILY = lang.family(
    "ernie4_5_moe_vl",
    layer=[
        lang.norm("{input,post_attention}_layernorm"),
        lang.attention("self_attn", "use_bias", "use_bias"),
        lang.choice(SPARSE, EXPERTS, lang.ffn("mlp", bias="use_bias")),
    ],
    outside=[
        lang.turned_head("use_bias"),
        lang.at(lang.Stage.NORM, lang.norm("model.norm")),
        lang.at(lang.Stage.FIRST, EMBEDDING, lang.within("model.resampler_model", towers.RESAMPLER)),
    ],
    towers=(towers.ERNIE,),
    sizes={"experts": "text_experts + moe_num_experts[1]", "text_experts": "moe_num_experts[0]"}
    | {"spatial": "vision.hidden * conv * conv"}
    | {"conv": "spatial_conv_size or 2", "temporal": "spatial * (temporal_conv_size or 2)"},
    defaults={"moe_num_shared_experts": 2, "moe_layer_interval": 1, "moe_use_aux_free": True},
    tiny={"moe_num_experts": [4, 4], "moe_intermediate_size": [16, 8], "num_hidden_layers": 3, "head_dim": 8}
    | {"moe_layer_start_index": [1, 1], "moe_layer_end_index": [2, 2]}
    | {"vision_config": {**lang.TINY_VISION, "intermediate_size": None, "embed_dim": 16, "mlp_ratio": 2}},
)
