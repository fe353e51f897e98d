"""Gemma 3 (text): four norms per layer, norms over heads, and an embedding that tensor parallelism does not cut."""

from paddleformers_fc.families.language import ends, family, fused_attention, fused_ffn, head_norms, norm

FAMILY = family(
    "gemma3_text",
    layer=[
        norm("{input,post_attention,pre_feedforward,post_feedforward}_layernorm"),
        fused_attention("self_attn", bias="attention_bias", output_bias="attention_bias"),
        head_norms("self_attn"),
        fused_ffn("mlp", bias="mlp_bias"),
    ],
    outside=[ends(embedding_cut=None)],
    defaults={"head_dim": 256, "tie_word_embeddings": True},
)
