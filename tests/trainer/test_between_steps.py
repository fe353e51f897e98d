"""The next update of the optimizer waits for reads of live tensors."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from paddleformers_fc.trainer.between_steps import BetweenSteps


def test_the_next_update_waits_for_a_read_that_is_under_way() -> None:
    begun, may_end, log = threading.Event(), threading.Event(), []

    def read() -> None:
        begun.set()
        may_end.wait()
        log.append("read")

    reads = BetweenSteps(lambda: False)
    with ThreadPoolExecutor(2) as threads:
        reads.add(threads.submit(read))
        begun.wait()
        update = threads.submit(lambda: (reads.on_optimizer_begin(None, None, None), log.append("updated")))
        assert log == []
        may_end.set()
        update.result()
    assert log == ["read", "updated"]


def test_a_read_is_waited_for_at_once_where_the_passes_change_weights() -> None:
    log: list[str] = []
    with ThreadPoolExecutor(1) as threads:
        BetweenSteps(lambda: True).add(threads.submit(lambda: log.append("read")))
        assert log == ["read"]


def test_an_error_of_a_read_is_raised_once_all_reads_have_ended() -> None:
    log: list[str] = []
    reads = BetweenSteps(lambda: False)
    with ThreadPoolExecutor(1) as threads:
        reads.add(threads.submit(lambda: [].pop()))
        reads.add(threads.submit(lambda: log.append("read")))
        with pytest.raises(IndexError):
            reads.finish()
        assert log == ["read"]
    reads.finish()
