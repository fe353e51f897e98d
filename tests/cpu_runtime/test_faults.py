"""Paddle still lacks what the CPU runtime patches; a patch can go on the day on which this test fails."""

from __future__ import annotations

from collections.abc import Callable

import paddle
import pytest

from tests.harness.on_ranks import on_ranks


def missing(call: Callable[[], object]) -> str:
    """The error of a call."""
    with pytest.raises(Exception) as raised:
        call()
    return f"{raised.type.__name__}: {raised.value}"


@on_ranks(1, server="bare_ranks")
def test_paddle_still_lacks_what_is_patched() -> None:
    operators, one = paddle._C_ops, paddle.ones([2, 2])
    half = one.astype("bfloat16")
    for error, call in {
        "Do not support c_identity for cpu kernel": lambda: operators.c_identity(one, 0, True, True),
        "Do not support c_concat for cpu kernel": lambda: operators.c_concat(one, 0, 1, 0, True, True),
        "Do not support c_split for cpu kernel": lambda: operators.c_split(one, 0, 1, 0, True),
        "TypeError": paddle.device.synchronize,
        "AttributeError": lambda: paddle.distributed.ParallelEnv().device_id,
    }.items():
        assert error in missing(call)
    assert missing(one.cuda)
    for call in (lambda: operators.linear(half, half, None), lambda: operators.matmul(half, half)):
        assert "bfloat16" in missing(call)
