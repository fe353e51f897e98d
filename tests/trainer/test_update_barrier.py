"""The next update of the optimizer waits for reads of live tensors."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from paddleformers_fc.trainer.ema import UpdateBarrier
from tests.harness.waiting import pause, wait_until


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
        update = threads.submit(lambda: (reads.on_optimizer_begin(None, None, None), log.append("updated")))
        assert log == []
        may_end.set()
        update.result()
    assert log == ["read", "updated"]


def test_the_thread_of_the_update_does_a_part_of_a_read_before_it_waits() -> None:
    helped = threading.Event()
    reads = UpdateBarrier(lambda: False)
    with ThreadPoolExecutor(1) as threads:
        reads.add(threads.submit(helped.wait), helped.set)
        reads.on_optimizer_begin(None, None, None)
    assert helped.is_set()


def test_a_read_is_waited_for_at_once_where_the_passes_change_weights() -> None:
    log: list[str] = []
    with ThreadPoolExecutor(1) as threads:
        UpdateBarrier(lambda: True).add(threads.submit(lambda: (pause(), log.append("read"))))
        assert log == ["read"]


def test_an_error_of_a_read_is_raised_once_all_reads_have_ended() -> None:
    log: list[str] = []
    reads = UpdateBarrier(lambda: False)
    with ThreadPoolExecutor(1) as threads:
        reads.add(threads.submit(lambda: [].pop()))
        reads.add(threads.submit(lambda: log.append("read")))
        with pytest.raises(IndexError):
            reads.finish()
        assert log == ["read"]
    reads.finish()


def test_work_of_a_reading_thread_is_done_on_the_thread_of_the_update() -> None:
    reads, done_on = UpdateBarrier(lambda: False), []

    def work() -> int:
        done_on.append(threading.get_ident())
        return 7

    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(lambda: reads.call(work)) for _ in range(2)]
        for one in found:
            reads.add(one)
        reads.on_optimizer_begin(None, None, None)
        assert [one.result() for one in found] == [7, 7]
    assert done_on == [threading.get_ident()] * 2


def test_work_of_a_reading_thread_is_done_between_two_passes() -> None:
    reads, answer = UpdateBarrier(lambda: False), []
    asking = threading.Thread(target=lambda: answer.append(reads.call(lambda: "done")), daemon=True)
    asking.start()
    wait_until(lambda: (reads.on_substep_end(None, None, None), bool(answer))[1], "work is done")
    assert reads.waited == 0


def test_an_error_of_such_work_is_raised_where_it_was_requested() -> None:
    reads = UpdateBarrier(lambda: False)

    def read() -> str:
        with pytest.raises(ZeroDivisionError):
            reads.call(lambda: 1 // 0)
        return "went on"

    with ThreadPoolExecutor(1) as threads:
        reads.add(threads.submit(read))
        reads.finish()


def test_work_that_is_requested_beside_a_read_is_done_at_an_update() -> None:
    reads, answer = UpdateBarrier(lambda: False), []
    asking = threading.Thread(target=lambda: answer.append(reads.call(lambda: "done")), daemon=True)
    asking.start()
    wait_until(lambda: (reads.finish(), bool(answer))[1], "work is done")
    assert answer == ["done"]


def test_the_time_of_waiting_is_counted() -> None:
    reads = UpdateBarrier(lambda: False)
    with ThreadPoolExecutor(1) as threads:
        reads.add(threads.submit(pause))
        reads.finish()
    assert reads.waited > 0
