"""Qwen 3 VL MoE: files stack the experts of a layer, as PaddleFormers' class and the fused experts of PaddleFleet do.

PaddleFleet's class with one tensor per expert is not declared: its own statements give tensors of three axes.
"""

from paddleformers_fc.families import language as lang, towers
from paddleformers_fc.families.models.qwen3_vl import ATTENTION, TINY_VISION

GATE, UP, DOWN = "mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
UP_SHAPE, DOWN_SHAPE = ("hidden", "2 * expert_ffn"), ("expert_ffn", "hidden")
SPARSE = lang.declared(
    lang.of_class(
        lang.FORMERS,
        lang.linear(GATE, shape=("hidden", "experts")),
        lang.stack_of_files(UP, shape=UP_SHAPE),
        lang.stack_of_files(DOWN, shape=DOWN_SHAPE),
    ),
    lang.of_class(
        lang.FLEET,
        lang.same(GATE, shape=("experts", "hidden"), dtype="float32"),
        lang.stack_of_files("mlp.grouped_gemm_experts.weight1", UP, UP_SHAPE),
        lang.stack_of_files("mlp.grouped_gemm_experts.weight2", DOWN, DOWN_SHAPE),
    ),
)
FAMILY = lang.family(
    "qwen3_vl_moe",
    classes=(lang.FLEET, lang.FORMERS),
    scope="model.language_model",
    key="text_config",
    layer=[ATTENTION, lang.choice(lang.STEPPED, SPARSE, lang.fused_ffn("mlp"))],
    towers=(towers.QWEN3_VL,),
    numbers=(towers.DEEP,),
    defaults={"decoder_sparse_step": 1},
    tiny={
        "text_config": {"num_experts": 4, "moe_intermediate_size": 12, "head_dim": 8, "mlp_only_layers": [0]},
        "vision_config": TINY_VISION,
    },
)
