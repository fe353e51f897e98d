"""The next update of the optimizer waits for reads of live tensors."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from paddleformers_fc.trainer.ema import UpdateBarrier
from tests.harness.waiting import pause


def test_the_next_update_waits_for_a_read_that_is_under_way() -> None:
    begun, may_end, log = threading.Event(), threading.Event(), []

    def read() -> None:
        begun.set()
        may_end.wait()
        log.append("read")

    reads = UpdateBarrier(lambda: False)
    with ThreadPoolExecutor(2) as threads:
        reads.add(threads.submit(read))
        begun.wait()
        update = threads.submit(lambda: (reads.finish(), log.append("updated")))
        assert log == []
        may_end.set()
        update.result()
    assert log == ["read", "updated"]


def test_a_read_is_waited_for_at_once_where_the_passes_change_weights() -> None:
    log: list[str] = []
    with ThreadPoolExecutor(1) as threads:
        UpdateBarrier(lambda: True).add(threads.submit(lambda: (pause(), log.append("read"))))
        assert log == ["read"]


def test_an_update_waits_for_all_reads_and_leaves_their_errors_to_others() -> None:
    log: list[str] = []
    reads = UpdateBarrier(lambda: False)
    with ThreadPoolExecutor(1) as threads:
        reads.add(threads.submit(lambda: [].pop()))
        reads.add(threads.submit(lambda: log.append("read")))
        reads.finish()
        assert log == ["read"]


def test_the_time_of_waiting_is_counted() -> None:
    reads = UpdateBarrier(lambda: False)
    with ThreadPoolExecutor(1) as threads:
        reads.add(threads.submit(pause))
        reads.finish()
    assert reads.waited > 0
