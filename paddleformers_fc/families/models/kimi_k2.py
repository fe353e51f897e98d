"""Kimi K2: latent attention, dense first layers, fused experts."""

from paddleformers_fc.families import language as lang

EXPERTS = (
    lang.router("mlp.gate"),
    lang.balance("mlp.gate.e_score_correction_bias"),
    lang.experts("mlp.experts.{expert}", lang.gated("up_gate_proj", "gate_proj", "up_proj", "down_proj", "expert_ffn")),
    lang.layer("mlp.shared_experts", lang.gated("up_gate_proj", "gate_proj", "up_proj", "down_proj", "shared_ffn")),
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
    lang.when(lang.after_dense, EXPERTS),
    lang.unless(lang.after_dense, lang.gated("mlp.up_gate_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")),
)
FAMILY = lang.family(
    "kimi_k2",
    lang.decoder("model.embed_tokens", "model.layers.{layer}", "model.norm", "lm_head", LAYER),
    lang.prediction("model.layers.{mtp}", LAYER),
    classes=(lang.FLEET,),
    defaults={"first_k_dense_replace": 3, "n_shared_experts": 1},
    tiny={**lang.TINY_LATENT, **lang.TINY_MOE, "first_k_dense_replace": 1, "moe_expert_fusion": True},
    divided=("vocab",),
)
