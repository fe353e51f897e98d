"""The parallel degrees of a job without a Trainer: those with which Paddle's fleet was initialised."""

from __future__ import annotations

from paddle.distributed import fleet
from paddle.distributed.fleet.base.topology import EPHybridCommunicateGroup, HybridCommunicateGroup


def fleet_degrees(world_size: int) -> dict[str, int]:
    """Return the degree of every parallel axis, as :func:`.degrees.parallel_degrees`.

    Args:
        world_size: number of ranks.
    Returns:
        the degrees; empty if several ranks have not initialised fleet, because their axes are unknown.
    """
    group = getattr(fleet.fleet, "_hcg", None)
    if not isinstance(group, HybridCommunicateGroup):
        return dict.fromkeys(("dp", "tp", "pp", "sharding", "ep", "sep", "cp"), 1) if world_size == 1 else {}
    has_experts = isinstance(group, EPHybridCommunicateGroup)
    return {
        "dp": group.get_data_parallel_world_size(),
        "tp": group.get_model_parallel_world_size(),
        "pp": group.get_pipe_parallel_world_size(),
        "sharding": group.get_sharding_parallel_world_size(),
        "ep": group.get_expert_parallel_world_size() if has_experts else 1,
        "sep": group.get_sep_parallel_world_size(),
        "cp": group.get_context_parallel_world_size() if has_experts else 1,
    }
