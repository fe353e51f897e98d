"""Qwen 3.5: gated delta nets or gated attention by layer, a vision tower, prediction layers; PaddleFleet's class alone.

In files every query head has its gate beside it; in the model the queries of a key precede their gates.
"""

from paddleformers_fc.families import language as lang, towers
from paddleformers_fc.families.declarations import Family, Statements

SCOPE, DEPTH = "model.language_model", "num_nextn_predict_layers or mtp_num_hidden_layers or 0"
LINEAR = "layer_types and layer_types[layer] == 'linear_attention'"
NAMES = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
GATED = lang.fused_qkv("self_attn", bias="attention_bias", parts=(("q", "q"), "kv", "kv"), groups="heads")
NORMS = lang.norm("{input,post_attention}_layernorm")
ATTENTION = lang.declared(
    lang.choice("attn_output_gate", GATED, lang.fused_qkv("self_attn", bias="attention_bias")),
    lang.row("self_attn.o_proj", "q", "hidden", "attention_bias"),
    lang.norm("self_attn.{q,k}_norm", "head"),
)
DELTA_NET = lang.renamed({"self_attn.": "linear_attn."}, lang.fleet_delta_net("self_attn"))
KINDS = {"layer_types": ["linear_attention", "full_attention"]}
TINY = {**lang.TINY_DELTA, **KINDS, "attn_output_gate": True, "mtp_num_hidden_layers": 1}


def family(name: str, ffn: Statements, predicted: Statements, tiny: dict[str, int], **sizes: str) -> Family:
    """Declare the family with these feed-forward layers, also of prediction layers."""
    joined = lang.declared(lang.column("eh_proj", "2 * hidden", "hidden"), lang.norm("{enorm,hnorm,norm}"))
    layer = lang.within("transformer_layer", NORMS, ATTENTION, predicted, canonical="layers.{mtp}")
    mtp = lang.within(f"{SCOPE}.layers.{{mtp}}", lang.renamed(NAMES, joined), layer, canonical="mtp")
    return lang.family(
        name,
        classes=(lang.FLEET,),
        scope=SCOPE,
        key="text_config",
        layer=[NORMS, lang.choice(LINEAR, DELTA_NET, ATTENTION), ffn],
        outside=[lang.ends(scope=SCOPE), mtp],
        towers=(towers.QWEN3_5,),
        optional=("mtp.",),
        sizes={**lang.DELTA_SIZES, "mtp_layers": DEPTH, **sizes},
        numbers=(lang.Numbers("mtp", "mtp_layers", shift="layers"),),
        defaults={"linear_conv_kernel_dim": 4},
        tiny={"text_config": {**TINY, **tiny}, "vision_config": lang.TINY_VISION},
    )


FAMILY = family("qwen3_5", lang.fused_ffn("mlp"), lang.fused_ffn("mlp"), {})
