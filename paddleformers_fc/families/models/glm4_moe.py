"""GLM 4 MoE: dense first layers, shared experts, prediction layers numbered after the last layer."""

from paddleformers_fc.families import language as lang

EXPERTS = (
    lang.same("mlp.gate.weight", shape=("experts", "hidden"), dtype="float32"),
    lang.balance("mlp.gate.e_score_correction_bias"),
    lang.experts("mlp.experts.{expert}", lang.gated("up_gate_proj", "gate_proj", "up_proj", "down_proj", "expert_ffn")),
    lang.layer("mlp.shared_experts", lang.gated("up_gate_proj", "gate_proj", "up_proj", "down_proj", "shared_ffn")),
)
LAYER = (
    lang.same("input_layernorm.weight", "post_attention_layernorm.weight"),
    lang.qkv("self_attn.qkv_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias="attention_bias"),
    lang.row("self_attn.o_proj", inputs="q"),
    lang.when("use_qk_norm", lang.same("self_attn.q_norm.weight", "self_attn.k_norm.weight", shape=("head",))),
    lang.when(lang.after_dense, EXPERTS),
    lang.unless(lang.after_dense, lang.gated("mlp.up_gate_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")),
)
FAMILY = lang.family(
    "glm4_moe",
    lang.decoder("model.embed_tokens", "model.layers.{layer}", "model.norm", "lm_head", LAYER),
    lang.prediction("model.layers.{mtp}", LAYER),
    classes=(lang.FLEET, lang.FORMERS),
    sizes={"mtp_layers": lang.mtp_layers},
    defaults={"first_k_dense_replace": 1, "n_shared_experts": 1},
    tiny={
        **lang.TINY_MOE,
        "head_dim": 8,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 1,
        "num_empty_layers_add_in_head": 1,
    },
)
