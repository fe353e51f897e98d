"""Qwen 3 VL: the text model of Qwen 3 and a vision tower with several mergers.

One merger follows the tower, the others follow the layers in ``deepstack_visual_indexes``. Query, key and value of the
tower are fused per head in PaddleFleet's class, and side by side in files.
"""

from paddleformers_fc.families import language as lang

EMBEDDINGS = (
    lang.patches("patch_embed.proj", bias=True),
    lang.same("pos_embed.weight", shape=("num_position_embeddings", "hidden")),
)
MERGERS = (
    lang.same("merger.norm.weight", "merger.norm.bias"),
    lang.linear("merger.linear_fc1", inputs="merged", outputs="merged", bias=True),
    lang.linear("merger.linear_fc2", inputs="merged", outputs="out_hidden_size", bias=True),
    lang.same("deepstack_merger_list.{deep}.norm.weight", "deepstack_merger_list.{deep}.norm.bias", shape=("merged",)),
    lang.linear("deepstack_merger_list.{deep}.linear_fc1", inputs="merged", outputs="merged", bias=True),
    lang.linear("deepstack_merger_list.{deep}.linear_fc2", inputs="merged", outputs="out_hidden_size", bias=True),
)
BLOCK = lang.layer(
    "blocks.{block}",
    lang.same("norm1.weight", "norm2.weight", "norm1.bias", "norm2.bias"),
    lang.linear("attn.qkv", outputs=("hidden", "hidden", "hidden"), bias=True),
    lang.linear("attn.proj", bias=True),
    lang.linear("mlp.linear_fc1", outputs="ffn", bias=True),
    lang.linear("mlp.linear_fc2", inputs="ffn", bias=True),
)
FLEET_BLOCK = lang.layer(
    "layers.{block}",
    lang.same("input_layernorm.weight", file="norm1.weight"),
    lang.same("post_attention_layernorm.weight", file="norm2.weight"),
    lang.same("input_layernorm.bias", file="norm1.bias"),
    lang.same("post_attention_layernorm.bias", file="norm2.bias"),
    lang.qkv("self_attn.qkv_proj", "attn.qkv", bias=True),
    lang.row("self_attn.o_proj", file="attn.proj", bias=True),
    lang.column("mlp.up_gate_proj", file="mlp.linear_fc1", outputs="ffn", bias=True),
    lang.row("mlp.down_proj", file="mlp.linear_fc2", inputs="ffn", bias=True),
    file="blocks.{block}",
)
VISION = lang.vision(
    "model",
    lang.of_class(lang.FORMERS, lang.layer("visual", EMBEDDINGS, MERGERS, BLOCK)),
    lang.of_class(lang.FLEET, lang.layer("vision_model", EMBEDDINGS, file="visual")),
    lang.of_class(lang.FLEET, lang.layer("vision_model.decoder", MERGERS, FLEET_BLOCK, file="visual")),
    sizes={"mergers": lambda deepstack_visual_indexes: len(deepstack_visual_indexes)},
    defaults={"patch_size": 16, "num_position_embeddings": 2304},
)
DEEP = lang.Numbers("deep", "vision.mergers")
TINY = {**lang.TINY_VISION, "deepstack_visual_indexes": [0]}
ATTENTION = (
    lang.same("input_layernorm.weight", "post_attention_layernorm.weight"),
    lang.qkv("self_attn.qkv_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias="attention_bias"),
    lang.row("self_attn.o_proj", inputs="q", bias="attention_bias"),
    lang.same("self_attn.q_norm.weight", "self_attn.k_norm.weight", shape=("head",)),
)
FFN = lang.gated("mlp.up_gate_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
FAMILY = lang.family(
    "qwen3_vl",
    lang.ends("model.language_model.embed_tokens", "model.language_model.norm", "lm_head"),
    lang.layer("model.language_model.layers.{layer}", ATTENTION, FFN),
    classes=(lang.FLEET, lang.FORMERS),
    key="text_config",
    towers=(VISION,),
    numbers=(DEEP,),
    defaults={"head_dim": 128},
    tiny={"vision_config": TINY},
)
