"""Qwen 3.5 MoE: model and files stack the experts of layers, but not of prediction layers.

A class with one tensor per expert is not declared, because its own AOA statements give tensors of three axes.
"""

from paddleformers_fc.families import language as lang
from paddleformers_fc.families.models import qwen3_5

EXPERT = lang.gated("up_gate_proj", "gate_proj", "up_proj", "down_proj", "expert_ffn")
SHARED_EXPERT = lang.gated("up_gate_proj", "gate_proj", "up_proj", "down_proj", "shared_ffn")
SHARED = (
    lang.same("mlp.gate.weight", shape=("experts", "hidden"), dtype="float32"),
    lang.layer("mlp.shared_experts", SHARED_EXPERT, file="mlp.shared_expert"),
    lang.transposed("mlp.shared_experts.gate_weight", file="mlp.shared_expert_gate.weight", shape=("hidden", 1)),
)
UP, DOWN = ("hidden", ("expert_ffn", "expert_ffn")), ("expert_ffn", "hidden")
STACKS = (
    lang.stack_of_files("mlp.grouped_gemm_experts.weight1", file="mlp.experts.gate_up_proj", shape=UP, transposed=True),
    lang.stack_of_files("mlp.grouped_gemm_experts.weight2", file="mlp.experts.down_proj", shape=DOWN, transposed=True),
)
SINGLE = lang.uncut(lang.layer("mlp.experts.{expert}", EXPERT))
FAMILY = qwen3_5.declared(
    "qwen3_5_moe",
    (SHARED, STACKS),
    (SHARED, SINGLE),
    {"num_experts": 4, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 24},
    shared_ffn="shared_expert_intermediate_size",
)
