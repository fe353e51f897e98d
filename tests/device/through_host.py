"""Collectives of device tensors over gloo, which reads host memory: a copy to the host, gloo, and a copy back.

:func:`apply` replaces the methods of ``ProcessGroupGloo`` before the CPU runtime builds its collectives from them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

_METHODS = ("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "scatter", "scatter_tensor")


def apply() -> None:
    """Replace the methods in this process."""
    from paddle.base import core
    from paddle.distributed import parallel

    parallel._set_expected_place = lambda place: None  # Where it uses gloo Paddle would leave the device for the CPU.
    for name in _METHODS:
        setattr(core.ProcessGroupGloo, name, _through_host(getattr(core.ProcessGroupGloo, name)))
    core.EagerReducer = Reducer


class Reducer:
    """Averages the gradients of data parallel ranks as they come; Paddle's own hands device memory to gloo.

    Args:
        parameters: in the order of Paddle's ``EagerReducer``, whose other arguments are about its buckets.
        group: the process group.
    """

    def __init__(self, parameters: Any, groups: Any, sparse: Any, group: Any, *_: Any) -> None:
        self._group = group
        for parameter in parameters:
            parameter._register_backward_hook(partial(self._average, parameter))

    def prepare_for_backward(self, outputs: Any) -> None:
        """Nothing is prepared."""

    def _average(self, parameter: Any) -> None:
        import paddle

        with paddle.no_grad():
            parameter.grad.scale_(1 / self._group.size())
            self._group.all_reduce(parameter.grad)


def _through_host(method: Callable[..., Any]) -> Callable[..., Any]:
    def collective(self: Any, *arguments: Any, **named: Any) -> Any:
        moved: list[tuple[Any, Any]] = []
        on_host = [_to_host(argument, moved) for argument in arguments]
        task = method(self, *on_host, **named)
        if moved:
            task.wait()
            for tensor, host in moved:
                _to_device(tensor, host)
        return task

    return collective


def _to_host(argument: Any, moved: list[tuple[Any, Any]]) -> Any:
    import paddle

    if isinstance(argument, (list, tuple)):
        return [_to_host(one, moved) for one in argument]
    if not isinstance(argument, paddle.Tensor) or argument.place.is_cpu_place():
        return argument
    host = argument.detach().contiguous().cpu()
    moved.append((argument, host))
    return host


def _to_device(tensor: Any, host: Any) -> None:
    import paddle

    with paddle.no_grad():
        tensor.copy_(host if tensor.is_contiguous() else host._copy_to(tensor.place, True), True)
