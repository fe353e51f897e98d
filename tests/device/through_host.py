"""Collectives of device tensors over gloo, which reads host memory: a copy to the host, gloo, and a copy back.

:func:`apply` replaces the methods of ``ProcessGroupGloo`` before the CPU runtime builds its collectives from them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_METHODS = ("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "scatter", "scatter_tensor")


def apply() -> None:
    """Replace the methods in this process."""
    from paddle.base import core
    from paddle.distributed import parallel

    parallel._set_expected_place = lambda place: None  # Where it uses gloo Paddle would leave the device for the CPU.
    for name in _METHODS:
        setattr(core.ProcessGroupGloo, name, _through_host(getattr(core.ProcessGroupGloo, name)))


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
