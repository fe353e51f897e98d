"""Qwen 3 VL MoE: files stack the experts of a layer, like PaddleFormers' class and PaddleFleet's fused experts.

PaddleFleet's class with one tensor per expert is not declared, because its AOA statements give tensors of three axes.
"""

from paddleformers_fc.families import language as lang
from paddleformers_fc.families.models.qwen3_vl import ATTENTION, DEEP, FFN, TINY, VISION

UP, DOWN = ("hidden", ("expert_ffn", "expert_ffn")), ("expert_ffn", "hidden")
STACKS = (
    lang.stack_of_files("mlp.experts.gate_up_proj", shape=UP),
    lang.stack_of_files("mlp.experts.down_proj", shape=DOWN),
)
FLEET_STACKS = (
    lang.stack_of_files("mlp.grouped_gemm_experts.weight1", file="mlp.experts.gate_up_proj", shape=UP),
    lang.stack_of_files("mlp.grouped_gemm_experts.weight2", file="mlp.experts.down_proj", shape=DOWN),
)
LAYER = (
    ATTENTION,
    lang.when(
        lang.stepped,
        lang.router("mlp.gate"),
        lang.of_class(lang.FORMERS, STACKS),
        lang.of_class(lang.FLEET, FLEET_STACKS),
    ),
    lang.unless(lang.stepped, FFN),
)
FAMILY = lang.family(
    "qwen3_vl_moe",
    lang.ends("model.language_model.embed_tokens", "model.language_model.norm", "lm_head"),
    lang.layer("model.language_model.layers.{layer}", LAYER),
    classes=(lang.FLEET, lang.FORMERS),
    key="text_config",
    towers=(VISION,),
    numbers=(DEEP,),
    defaults={"decoder_sparse_step": 1},
    tiny={
        "text_config": {"num_experts": 4, "moe_intermediate_size": 12, "head_dim": 8, "mlp_only_layers": [0]},
        "vision_config": TINY,
    },
)
