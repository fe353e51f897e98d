"""The parallel degrees of a run, for readers of a manifest and of the log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def parallel_degrees(args: Any) -> dict[str, int]:
    """Return the degree of every parallel axis, for readers of a manifest."""
    sharding = max(args.sharding_parallel_size, 1)
    return {
        "dp": max(args.dataset_world_size // sharding, 1),
        "tp": max(args.tensor_model_parallel_size, 1),
        "pp": max(args.pipeline_model_parallel_size, 1),
        "sharding": sharding,
        "ep": max(args.expert_model_parallel_size, 1),
        "sep": max(args.sep_parallel_size, 1),
        "cp": max(args.context_parallel_size, 1),
    }


def degrees_text(degrees: Mapping[str, int]) -> str:
    """Return parallel degrees above one as text, such as ``tp=2 pp=2``; of a single rank ``dp=1``.

    Empty where none are recorded, as in conversions of open weights.
    """
    text = " ".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1)
    return text or ("dp=1" if degrees else "")
