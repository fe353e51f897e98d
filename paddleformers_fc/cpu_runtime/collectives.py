"""The collectives that ``ProcessGroupGloo`` lacks or computes wrongly.

Paddle's gloo has all_reduce, broadcast, reduce, all_gather, scatter and gather. Hybrid parallelism also calls their
``*_on_calc_stream`` variants, which are the same on a CPU, and reduce_scatter and all_to_all. Here reduce_scatter is an
all_reduce of which each rank keeps its part, and all_to_all sends messages (:mod:`.p2p`). Sums of float16 and bfloat16
are computed in float32 and rounded once, because gloo's own float16 sum is inf. Every collective is complete when it
returns, for every value of ``sync_op``.

Cost: reduce_scatter moves the full tensor to every rank (n times the bytes that NCCL moves); all_to_all moves only the
requested bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import paddle
from paddle.base import core

from . import p2p

_Gloo = core.ProcessGroupGloo
_SUM = core.ReduceOp.SUM
_HALVES = (paddle.float16, paddle.bfloat16)

_gloo_all_reduce = _Gloo.all_reduce
_gloo_reduce = _Gloo.reduce
_gloo_all_gather_into_tensor = _Gloo.all_gather_into_tensor


def _all_reduce(self: Any, tensor: Any, op: Any = _SUM, sync_op: bool = True) -> p2p.Done:
    return _reduced(tensor, True, lambda wide: _gloo_all_reduce(self, wide, op, True))


def _reduce(self: Any, tensor: Any, dst: int, op: Any = _SUM, sync_op: bool = True) -> p2p.Done:
    return _reduced(tensor, self.rank() == dst, lambda wide: _gloo_reduce(self, wide, dst, op, True))


def _reduced(tensor: Any, receives: bool, reduce: Callable[[Any], Any]) -> p2p.Done:
    if tensor.dtype not in _HALVES:
        reduce(tensor).wait()
        return p2p.DONE
    wide = tensor.detach().astype("float32")
    reduce(wide).wait()
    if receives:
        _overwrite(tensor, wide.astype(tensor.dtype))
    return p2p.DONE


def _completed(name: str, count: int | None = None) -> Callable[..., p2p.Done]:
    """Wrap a collective of gloo so that it is complete when it returns.

    Args:
        name: the name of the method.
        count: number of arguments before ``sync_op``, which the ``*_on_calc_stream`` variants lack; None if there are
            two overloads.
    """
    collective = getattr(_Gloo, name)

    def run(self: Any, *arguments: Any, sync_op: bool = True) -> p2p.Done:
        collective(self, *(arguments if count is None else (*arguments[:count], True))).wait()
        return p2p.DONE

    return run


def _all_gather_into_tensor(self: Any, out: Any, tensor: Any, sync_op: bool = True) -> p2p.Done:
    _gloo_all_gather_into_tensor(self, out, tensor.contiguous(), True).wait()
    return p2p.DONE


def _reduce_scatter_tensor(self: Any, out: Any, tensor: Any, op: Any = _SUM, sync_op: bool = True) -> p2p.Done:
    total = tensor.detach().clone()
    _all_reduce(self, total, op)
    share = int(np.prod(out.shape, dtype=np.int64))
    start = self.rank() * share
    _overwrite(out, total.flatten()[start : start + share])
    return p2p.DONE


def _reduce_scatter(self: Any, out: Any, tensors: Sequence[Any], op: Any = _SUM, sync_op: bool = True) -> p2p.Done:
    return _reduce_scatter_tensor(self, out, paddle.concat([tensor.flatten() for tensor in tensors]), op)


def _all_to_all(self: Any, outs: Sequence[Any], tensors: Sequence[Any], sync_op: bool = True) -> p2p.Done:
    for target, tensor in enumerate(tensors):
        p2p.send_array(self, target, p2p.to_array(tensor), p2p.EXCHANGES)
    for source, out in enumerate(outs):
        array = p2p.exchanged_array(self, source, p2p.array_dtype(out))
        if array.size:
            p2p.fill(out, array)
    return p2p.DONE


def _all_to_all_single(
    self: Any, out: Any, tensor: Any, out_sizes: Sequence[int], in_sizes: Sequence[int], sync_op: bool = True
) -> p2p.Done:
    rows = p2p.to_array(tensor)
    bounds = list(accumulate(in_sizes or [rows.shape[0] // self.size()] * self.size(), initial=0))
    for target in range(self.size()):
        p2p.send_array(self, target, rows[bounds[target] : bounds[target + 1]], p2p.EXCHANGES)
    received = [p2p.exchanged_array(self, source, rows.dtype) for source in range(self.size())]
    if sum(array.size for array in received):
        p2p.fill(out, np.concatenate(received))
    return p2p.DONE


def _all_to_all_tensor(self: Any, out: Any, tensor: Any, sync_op: bool = True) -> p2p.Done:
    return _all_to_all_single(self, out, tensor, (), ())


def _overwrite(target: Any, source: Any) -> None:
    """Write ``source`` into ``target`` in place; the shapes may differ."""
    with paddle.no_grad():
        paddle.assign(source.reshape(target.shape), target)


def apply() -> None:
    """Set the collectives on ``ProcessGroupGloo``, also under their ``*_on_calc_stream`` names."""
    methods: dict[str, Callable[..., Any]] = {
        "broadcast": _completed("broadcast", 2),
        "all_gather": _completed("all_gather"),
        "scatter": _completed("scatter"),
        "scatter_tensor": _completed("scatter_tensor", 3),
        "all_reduce": _all_reduce,
        "reduce": _reduce,
        "all_gather_into_tensor": _all_gather_into_tensor,
        "reduce_scatter_tensor": _reduce_scatter_tensor,
        "reduce_scatter": _reduce_scatter,
        "all_to_all": _all_to_all,
        "all_to_all_single": _all_to_all_single,
        "all_to_all_tensor": _all_to_all_tensor,
    }
    for name, method in methods.items():
        setattr(_Gloo, name, method)
        setattr(_Gloo, f"{name}_on_calc_stream", method)
    # Old names, which a few callers still use.
    for older, name in {"alltoall": "all_to_all", "alltoall_single": "all_to_all_single"}.items():
        setattr(_Gloo, older, methods[name])
