"""The next update of the optimizer waits for reads of live tensors."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from paddleformers_fc.trainer.ema import UpdateBarrier
from tests.harness.waiting import pause


def test_the_next_update_waits_for_all_reads_and_leaves_their_errors_to_others() -> None:
    may_end, log = threading.Event(), []
    reads = UpdateBarrier(lambda: False)
    with ThreadPoolExecutor(2) as threads:
        reads.add(threads.submit(lambda: [].pop()))
        reads.add(threads.submit(lambda: (may_end.wait(), log.append("read"))))
        update = threads.submit(lambda: (reads.finish(), log.append("updated")))
        pause()
        assert log == []
        may_end.set()
        update.result()
    assert log == ["read", "updated"]
    assert reads.waited > 0


def test_a_read_is_waited_for_at_once_where_the_passes_change_weights() -> None:
    log: list[str] = []
    with ThreadPoolExecutor(1) as threads:
        UpdateBarrier(lambda: True).add(threads.submit(lambda: (pause(), log.append("read"))))
        assert log == ["read"]
