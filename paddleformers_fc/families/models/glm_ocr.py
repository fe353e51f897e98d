"""GLM-OCR: a text with four norms per layer and a vision tower. PaddleFormers' class has no tensor parallelism.

The head is transposed and never tied, though the class has ``tie_word_embeddings`` always set. The prediction layer of
files is not built.
"""

from dataclasses import replace

from paddleformers_fc.families import language as lang, towers

NORM, SCOPE = "{input,post_attention,post_self_attn,post_mlp}_layernorm", "model.language_model"
PREDICTION = f"{SCOPE}.layers.{{mtp}}"
PREDICTED = lang.declared(lang.norm("{enorm,hnorm,shared_head.norm}"), lang.row("eh_proj", "2 * hidden", "hidden"))
BODY = lang.within(SCOPE, lang.norm("norm"), lang.same("embed_tokens.weight", shape=("vocab", "hidden")))
FAMILY = replace(
    lang.family(
        "glm_ocr",
        scope=SCOPE,
        key="text_config",
        layer=[
            lang.norm(NORM),
            lang.uncut(lang.attention("self_attn")),
            lang.replicated("mlp.gate_up_proj", "hidden", "2 * ffn"),
            lang.replicated("mlp.down_proj", "ffn", "hidden"),
        ],
        outside=[
            lang.replicated("lm_head", "hidden", "vocab"),
            lang.at(lang.Stage.FIRST, BODY),
            lang.only("False", lang.within(PREDICTION, PREDICTED)),
        ],
        towers=(
            towers.glm(
                "out_hidden_size * in_channels",
                layer=[lang.uncut(lang.ffn("mlp", bias="attention_bias")), lang.norm("attn.{q,k}_norm", "head")],
                output_bias="attention_bias",
                defaults={"attention_bias": True},
            ),
        ),
        optional=(f"{PREDICTION}.",),
        exported={"tie_word_embeddings": "False"},
        numbers=(lang.Numbers("mtp", "text.mtp_layers", start="text.layers"),),
        tiny={"text_config": {"head_dim": 8}, "vision_config": {**lang.TINY_VISION, "attention_bias": True}},
    ),
    tied=(),
)
