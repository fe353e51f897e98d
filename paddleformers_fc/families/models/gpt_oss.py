"""GPT-OSS: in both spaces a layer's experts are stacked on an axis of their own, gate and up columns taking turns."""

from paddleformers_fc.families import blocks
from paddleformers_fc.families.declarations import Family, declared, fresh, same

EXPERTS = blocks.LAYER + ".mlp.experts."

FAMILY = Family(
    name="gpt_oss",
    model_types=("gpt_oss",),
    statements=declared(
        blocks.ends(),
        blocks.norm(blocks.LAYER + ".{input,post_attention}_layernorm"),
        blocks.attention(blocks.LAYER + ".self_attn", bias="attention_bias"),
        same(blocks.LAYER + ".self_attn.sinks", shape=("heads",), cut=0),
        same(blocks.LAYER + ".mlp.router.weight", shape=("experts", "hidden")),
        same(blocks.LAYER + ".mlp.router.bias", shape=("experts",)),
        same(EXPERTS + "gate_up_proj", shape=("experts", "hidden", "2 * ffn")),
        same(EXPERTS + "gate_up_proj_bias", shape=("experts", "2 * ffn")),
        same(EXPERTS + "down_proj", shape=("experts", "ffn", "hidden")),
        same(EXPERTS + "down_proj_bias", shape=("experts", "hidden")),
        fresh("model.rotary_emb.{inv_freq,original_inv_freq}", shape=("head // 2",), where="False"),
    ),
    tied=(blocks.TIED_HEAD,),
    defaults={"attention_bias": True, "head_dim": 64},
    tiny=dict(blocks.TINY, head_dim=4, num_local_experts=4),
    exported={"num_experts": "experts", "num_local_experts": "experts"},
)
