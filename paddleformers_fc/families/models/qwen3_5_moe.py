"""Qwen 3.5 MoE: files stack the experts of a layer, as the model does, and not those of a prediction layer.

A class with one tensor per expert is not declared: its own statements give tensors of three axes.
"""

from paddleformers_fc.families import language as lang
from paddleformers_fc.families.models import qwen2_moe, qwen3_5

GROUPED, FILES = "mlp.grouped_gemm_experts.weight", "mlp.experts."
SHARED = lang.declared(
    lang.same("mlp.gate.weight", shape=("experts", "hidden"), dtype="float32"),
    qwen2_moe.FLEET_SHARED,
    qwen2_moe.FLEET_GATE,
)
STACKS = lang.declared(
    lang.stack_of_files(f"{GROUPED}1", f"{FILES}gate_up_proj", ("hidden", "2 * expert_ffn"), turned=True),
    lang.stack_of_files(f"{GROUPED}2", f"{FILES}down_proj", ("expert_ffn", "hidden"), turned=True),
)
SINGLE = lang.uncut(lang.fused_ffn("mlp.experts.{expert}", "expert_ffn"))
FAMILY = qwen3_5.family(
    "qwen3_5_moe",
    lang.declared(SHARED, STACKS),
    lang.declared(SHARED, SINGLE),
    {"num_experts": 4, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 24},
    shared_ffn="shared_expert_intermediate_size",
)
