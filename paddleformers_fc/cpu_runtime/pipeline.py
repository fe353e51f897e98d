"""Input data of the ranks of a pipeline and of a tensor parallel group.

``broadcast_input_data`` sends the first member's batch to every member of a tensor parallel group. It fails on a CPU
only because it requests the name of an accelerator; the rest runs anywhere.

Cost: one small broadcast per tensor of the batch.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle.distributed.fleet.utils import hybrid_parallel_util

from ._replace import replace_everywhere


def broadcast_input_data(hcg: Any, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Send the first tensor parallel member's inputs to every member.

    Args:
        hcg: the hybrid communicate group of the job.
        inputs: positional inputs of the model, tensors or nested containers of them.
        kwargs: the same, by name.

    Returns:
        The same ``inputs`` and ``kwargs``; their tensors hold the first member's data now.
    """
    place = paddle.CPUPlace()
    for container in (inputs, kwargs):
        if container:
            # Fills the tensors in place; its result is not used.
            hybrid_parallel_util._broadcast_nested_data(hcg, "cpu", place, container)
    return inputs, kwargs


def apply() -> None:
    """Replace ``broadcast_input_data`` wherever it was imported."""
    replace_everywhere(hybrid_parallel_util.broadcast_input_data, broadcast_input_data)
