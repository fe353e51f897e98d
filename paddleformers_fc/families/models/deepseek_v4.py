"""DeepSeek V4: attention over compressed keys, several residual streams, prediction layers with names of their own."""

from paddleformers_fc.families import language as lang, streams

CONTRACT = lang.at(lang.Stage.NORM, lang.within("model.mhc_contract", streams.HEAD, canonical=""))
MTP = lang.within("model.layers.{mtp}", streams.prediction("(layers + mtp)"), canonical="mtp.{mtp}")
TINY = {**lang.TINY_MOE, "num_hidden_layers": 3, "csa_compress_ratios": [0, 4, 8, 4], "moe_n_hash_layers": 1}
FAMILY = lang.family(
    "deepseek_v4",
    classes=(lang.FLEET,),
    canonical="",
    layer=[streams.layer(hashed=True)],
    outside=[lang.renamed({"embed_tokens": "embed", "lm_head": "head"}, lang.ends(canonical="")), CONTRACT, MTP],
    optional=("mtp.{mtp}.",),
    sizes={**streams.SIZES, "mtp_layers": lang.MTP_LAYERS},
    numbers=(lang.Numbers("layer", "layers", shift="empty"), lang.Numbers("mtp", "mtp_layers", shift="layers + empty")),
    defaults={"moe_n_hash_layers": 3, "n_shared_experts": 1, "num_residual_streams": 4},
    tiny={**streams.TINY, **TINY, "num_nextn_predict_layers": 1},
    exported=streams.EXPORTED,
    divided=("vocab",),
)
