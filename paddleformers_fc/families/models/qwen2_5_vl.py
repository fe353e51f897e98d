"""Qwen 2.5 VL: the text model of Qwen 2 and a vision tower, which is replicated on every rank."""

from paddleformers_fc.families import language as lang

VISION = lang.vision(
    "model.visual",
    lang.patches("patch_embed.proj"),
    lang.same("merger.ln_q.weight"),
    lang.linear("merger.mlp.0", inputs="merged", outputs="merged", bias=True),
    lang.linear("merger.mlp.2", inputs="merged", outputs="out_hidden_size", bias=True),
    lang.same("blocks.{block}.norm1.weight", "blocks.{block}.norm2.weight"),
    lang.linear("blocks.{block}.attn.qkv", outputs=("hidden", "hidden", "hidden"), bias=True),
    lang.linear("blocks.{block}.attn.proj", bias=True),
    lang.linear("blocks.{block}.mlp.gate_proj", "blocks.{block}.mlp.up_proj", outputs="ffn", bias=True),
    lang.linear("blocks.{block}.mlp.down_proj", inputs="ffn", bias=True),
    file="visual",
    defaults={"patch_size": 14},
)
LAYER = (
    lang.same("input_layernorm.weight", "post_attention_layernorm.weight"),
    lang.qkv("self_attn.qkv_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=True),
    lang.row("self_attn.o_proj", inputs="q"),
    lang.gated("mlp.up_gate_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
FAMILY = lang.family(
    "qwen2_5_vl",
    lang.ends(
        "model.language_model.embed_tokens",
        "model.language_model.norm",
        "lm_head",
        files=("model.embed_tokens", "model.norm", "lm_head"),
    ),
    lang.layer("model.language_model.layers.{layer}", LAYER, file="model.layers.{layer}"),
    key="text_config",
    towers=(VISION,),
    tiny={"vision_config": lang.TINY_VISION},
)
