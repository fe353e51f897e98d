"""DeepSeek V3: latent attention, unfused experts, prediction layers numbered after the last layer.

Prediction layers have a bias that canonical files lack, and lack the norm, head and embedding that files repeat there.
Without ``q_lora_rank`` the class still creates the norm of the latent query, which no layer uses.
"""

from paddleformers_fc.families import language as lang


def sparse(layer: int, experts: int, first_k_dense_replace: int, moe_layer_freq: int) -> bool:
    """Return whether a layer has experts."""
    return bool(experts) and layer >= first_k_dense_replace and layer % moe_layer_freq == 0


EXPERT = lang.gated("up_gate_proj", "gate_proj", "up_proj", "down_proj", "expert_ffn")
EXPERTS = (
    lang.router("mlp.gate"),
    lang.balance("mlp.gate.e_score_correction_bias"),
    lang.experts("mlp.experts.{expert}", EXPERT, formers=lang.uncut(lang.separate(EXPERT))),
    lang.layer("mlp.shared_experts", lang.mlp("gate_proj", "up_proj", "down_proj", "shared_ffn")),
)
LAYER = (
    lang.same("input_layernorm.weight", "post_attention_layernorm.weight"),
    lang.when("q_lora_rank", lang.linear("self_attn.q_a_proj", outputs="q_lora_rank", bias="attention_bias")),
    lang.when("q_lora_rank", lang.column("self_attn.q_b_proj", inputs="q_lora_rank", outputs="latent_query")),
    lang.when("q_lora_rank", lang.same("self_attn.q_a_layernorm.weight", shape=("q_lora_rank",))),
    lang.unless("q_lora_rank", lang.column("self_attn.q_proj", outputs="latent_query")),
    lang.linear("self_attn.kv_a_proj_with_mqa", outputs=("kv_lora_rank", "qk_rope_head_dim"), bias="attention_bias"),
    lang.same("self_attn.kv_a_layernorm.weight", shape=("kv_lora_rank",)),
    lang.column("self_attn.kv_b_proj", inputs="kv_lora_rank", outputs="latent_kv"),
    lang.row("self_attn.o_proj", inputs="latent_value", bias="attention_bias"),
    lang.unless("q_lora_rank", lang.fresh("self_attn.q_a_layernorm.weight")),
    lang.when(sparse, EXPERTS),
    lang.unless(sparse, lang.mlp("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")),
)
FAMILY = lang.family(
    "deepseek_v3",
    lang.ends("model.embed_tokens", "model.norm", "lm_head"),
    lang.same("model.layers.{mtp}.enorm.weight", "model.layers.{mtp}.hnorm.weight"),
    lang.linear("model.layers.{mtp}.eh_proj", inputs=("hidden", "hidden"), bias=True),
    lang.layer("model.layers.{layer}", LAYER),
    lang.optional("model.layers.{mtp}.eh_proj.bias", "model.layers.{mtp}."),
    numbers=(lang.Numbers("layer", ("layers", "mtp_layers")), lang.Numbers("mtp", "mtp_layers", start="layers")),
    defaults={"moe_layer_freq": 1, "first_k_dense_replace": 0},
    tiny={
        **lang.TINY_LATENT,
        **lang.TINY_MOE,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    },
    divided=("vocab",),
)
