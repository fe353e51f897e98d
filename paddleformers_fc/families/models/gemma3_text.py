"""Gemma 3 (text): four norms per layer, norms over heads, and an embedding that tensor parallelism does not cut."""

from paddleformers_fc.families import blocks
from paddleformers_fc.families.declarations import Family, declared

FAMILY = Family(
    name="gemma3_text",
    model_types=("gemma3_text",),
    statements=declared(
        blocks.ends(embedding_cut=None),
        blocks.norm(blocks.LAYER + ".{input,post_attention,pre_feedforward,post_feedforward}_layernorm"),
        blocks.fused_attention(blocks.LAYER + ".self_attn", bias="attention_bias", output_bias="attention_bias"),
        blocks.norm(blocks.LAYER + ".self_attn.{q,k}_norm", "head"),
        blocks.fused_ffn(blocks.LAYER + ".mlp", bias="mlp_bias"),
    ),
    tied=(blocks.TIED_HEAD,),
    defaults={"head_dim": 256, "tie_word_embeddings": True},
    tiny=dict(blocks.TINY, head_dim=8),
)
