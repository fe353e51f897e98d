"""Tensor parallel operators without a CPU kernel, and the input data of a tensor parallel group.

``c_identity``, ``c_concat`` and ``c_softmax_with_cross_entropy`` are replaced in ``paddle._C_ops``, so that Paddle's
layers and autograd code stay unchanged. ``c_split`` is replaced one level higher, because the backward of
``c_split_eager`` gathers along axis 0 what its forward split along the last axis. ``broadcast_input_data``, which sends
the first member's batch to all members, fails on a CPU only because it asks for the name of an accelerator.

Time: the collectives, and one small broadcast per tensor of a batch. The cross entropy adds three all_reduces of
``[tokens, 1]`` float32 and keeps the softmax, ``[tokens, vocab / ranks]`` float32, for its backward, as the fused
kernel does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle import _C_ops
from paddle.autograd import PyLayer
from paddle.base import core
from paddle.distributed import collective
from paddle.distributed.fleet.layers.mpu import mp_ops
from paddle.distributed.fleet.utils import hybrid_parallel_util

from ..upstream import replace_everywhere

Operation = Callable[[Any, Any], Any]


def _group(ring_id: int) -> Any:
    return collective._get_group_map()[ring_id]


def gather_last_axis(tensor: Any, group: Any) -> Any:
    """Concatenate the members' tensors along the last axis: ``[..., n]`` of each becomes ``[..., n * ranks]``."""
    stacked = paddle.empty([group.nranks, *tensor.shape], tensor.dtype)
    group.process_group.all_gather_into_tensor(stacked, tensor, True)
    return paddle.concat(list(stacked.unbind(0)), axis=-1)


def own_part_of_last_axis(tensor: Any, group: Any) -> Any:
    """Return a copy of this member's equal share of the last axis."""
    share = tensor.shape[-1] // group.nranks
    begin = group.rank * share
    return tensor[..., begin : begin + share].clone()


class Collective(PyLayer):
    """A collective whose gradient is another collective; each takes a tensor and the group."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, group: Any, collective: Operation, gradient: Operation) -> Any:
        ctx.group, ctx.gradient = group, gradient
        return collective(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return ctx.gradient(gradient, ctx.group)


class _Split:
    """``c_split_eager``, called by its ``apply``."""

    @staticmethod
    def apply(tensor: Any, group: Any, rank: int, nranks: int) -> Any:
        return Collective.apply(tensor, group, own_part_of_last_axis, gather_last_axis)


class _SoftmaxCrossEntropy(PyLayer):
    """``log(sum(exp(x))) - x[label]`` over a vocabulary that is split equally and in order over the members."""

    @staticmethod
    def forward(ctx: Any, logits: Any, label: Any, group: Any, ignore_index: int) -> Any:
        wide = logits.astype("float32")
        largest = wide.max(-1, keepdim=True)
        group.process_group.all_reduce(largest, core.ReduceOp.MAX)
        shifted = wide - largest
        exponentials = shifted.exp()
        total = exponentials.sum(-1, keepdim=True)
        group.process_group.all_reduce(total)

        share = logits.shape[-1]
        own_label = label.astype("int64") - group.rank * share
        is_own = paddle.logical_and(own_label >= 0, own_label < share)
        own_label = paddle.where(is_own, own_label, paddle.zeros_like(own_label))
        picked = paddle.take_along_axis(shifted, own_label, -1, broadcast=False)
        picked = paddle.where(is_own, picked, paddle.zeros_like(picked))
        group.process_group.all_reduce(picked)

        counted = (label != ignore_index).astype("float32")
        softmax = exponentials / total
        ctx.dtype = logits.dtype
        ctx.save_for_backward(softmax, own_label, is_own.astype("float32"), counted)
        loss = (total.log() - picked) * counted
        ctx.mark_non_differentiable(softmax)
        return softmax, loss

    @staticmethod
    def backward(ctx: Any, _: Any, gradient: Any) -> Any:
        softmax, own_label, is_own, counted = ctx.saved_tensor()
        target = paddle.nn.functional.one_hot(own_label.squeeze(-1), softmax.shape[-1]) * is_own
        return ((softmax - target) * (gradient * counted)).astype(ctx.dtype)


def c_identity(tensor: Any, ring_id: int, use_calc_stream: bool = True, use_model_parallel: bool = True) -> Any:
    """Return a copy. Paddle's ``c_identity_eager``, which calls this, does the all_reduce of the backward."""
    return tensor.clone()


def c_concat(
    tensor: Any, rank: int, nranks: int, ring_id: int, use_calc_stream: bool = True, use_model_parallel: bool = True
) -> Any:
    """Concatenate the members' tensors along the last axis; the backward keeps this member's part."""
    return Collective.apply(tensor, _group(ring_id), gather_last_axis, own_part_of_last_axis)


def c_softmax_with_cross_entropy(
    logits: Any, label: Any, ignore_index: int, ring_id: int, rank: int, nranks: int
) -> tuple[Any, Any]:
    """Compute softmax and loss of logits whose vocabulary is split over the group.

    Args:
        logits: ``[..., vocab / nranks]``, this member's part.
        label: ``[..., 1]`` indices into the full vocabulary.

    Returns:
        The softmax (this member's part) and the loss ``[..., 1]``, both float32; no gradient flows through the softmax.
    """
    softmax, loss = _SoftmaxCrossEntropy.apply(logits, label, _group(ring_id), ignore_index)
    return softmax, loss


def broadcast_input_data(hcg: Any, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Send the first tensor parallel member's inputs to every member.

    Args:
        hcg: the hybrid communicate group of the job.
        inputs: positional inputs of the model, tensors or nested containers of them.
        kwargs: the same, by name.

    Returns:
        ``inputs`` and ``kwargs``, whose tensors now contain the first member's data.
    """
    place = paddle.CPUPlace()
    for container in (inputs, kwargs):
        if container:
            # Fills the tensors in place.
            hybrid_parallel_util._broadcast_nested_data(hcg, "cpu", place, container)
    return inputs, kwargs


def input_data() -> None:
    """Replace ``broadcast_input_data`` wherever it was imported."""
    replace_everywhere(hybrid_parallel_util.broadcast_input_data, broadcast_input_data)


def apply() -> None:
    """Replace the four operators where Paddle looks them up."""
    for operator in (c_identity, c_concat, c_softmax_with_cross_entropy):
        setattr(_C_ops, operator.__name__, operator)
    mp_ops.__dict__["c_split_eager"] = _Split
