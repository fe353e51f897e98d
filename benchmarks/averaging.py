"""What a moving average of weights costs: its bandwidth beside that of a plain copy, and the time that training loses.

``python -m benchmarks.averaging [--write PAGE]``. A rank averages 200 million float32 elements in 100 tensors.

* The update is timed alone, in turn with a copy of the same elements. It moves 12 bytes per element, two reads and a
  write; the copy moves 8.
* A training of steps of one second of matrix products runs ten steps with an update and ten steps without, in turn.
  The products use all cores, so the update contends with them for cores and memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.pages import replace_measured

ELEMENTS, TENSORS = 200_000_000, 100
INTERVAL, STEP_SECONDS = 10, 1.0
DECAY = 0.999


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that some work takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def bandwidth(rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the median rate of a copy and of updates in GB/s, and the ratio of each update to the copies."""
    from paddleformers_fc.execute import memory
    from paddleformers_fc.execute.memory import AveragedTensor

    size = ELEMENTS // TENSORS
    values = [np.full(size, 1.0, np.float32) for _ in range(TENSORS)]
    averages = [np.zeros(size, np.float32) for _ in range(TENSORS)]

    def pieces(array: Any) -> Callable[[int, int], Any]:
        return lambda start, stop: iter((array[start:stop],))

    tensors = [AveragedTensor(old, pieces(new)) for old, new in zip(averages, values, strict=True)]

    def copy() -> None:
        for old, new in zip(averages, values, strict=True):
            np.copyto(old, new)

    def update(threads: int) -> None:
        memory.THREADS = threads
        memory.update_averages(tensors, 1 - DECAY)

    ways: dict[str, tuple[Callable[[], object], int]] = {
        "plain copy, 1 thread": (copy, 8),
        "update, 1 thread": (lambda: update(1), 12),
        "update, 2 threads": (lambda: update(2), 12),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, (work, moved) in ways.items():
            seconds = timed(work)
            if number:
                rates[name].append(moved * ELEMENTS / seconds / 1e9)
    first, *others = ways
    ratios = {
        name: statistics.median(own / copied for own, copied in zip(rates[name], rates[first], strict=True))
        for name in others
    }
    return {name: statistics.median(found) for name, found in rates.items()}, ratios


def slowdown(rounds: int) -> tuple[float, float]:
    """Return the median seconds of ten steps without an update, and the median of their relative increase with one."""
    import paddle
    from paddle.distributed import ShardedWeight

    from paddleformers_fc.trainer.ema import MovingAverage, TrainedPart
    from paddleformers_fc.trainer.live_roles import UpdateBarrier

    shape = (ELEMENTS // TENSORS,)
    parts = {}
    for number in range(TENSORS):
        tensor = paddle.full(shape, 1.0, "float32")
        weight = ShardedWeight(f"weight.{number}", tensor, shape, shape, (0,))
        parts[f"weight.{number}"] = TrainedPart(weight, tensor)
    update_barrier = UpdateBarrier(lambda: False)
    average = MovingAverage(DECAY, INTERVAL, lambda: parts, update_barrier)
    one, other = paddle.randn([1024, 1024]), paddle.randn([1024, 1024])
    once = statistics.median(timed(lambda: paddle.matmul(one, other)) for _ in range(20))
    products = max(1, round(STEP_SECONDS / once))

    def steps(first: int, updates: bool) -> None:
        for step in range(first, first + INTERVAL):
            for _ in range(products):
                paddle.matmul(one, other)
            update_barrier.finish()
            if updates:
                average.on_step_end(SimpleNamespace(global_step=step))

    steps(1, updates=True)  # Memory is allocated, and the average begins.
    plain, increases = [], []
    for number in range(1, rounds + 1):
        without = timed(partial(steps, 0, updates=False))
        # The update after the first of ten steps runs beside the others.
        with_update = timed(partial(steps, INTERVAL * number, updates=True))
        plain.append(without)
        increases.append(with_update / without - 1)
    average.wait_for_update()
    return statistics.median(plain), statistics.median(increases)


def table(rounds: int) -> str:
    """Measure, and return the report as Markdown."""
    rates, ratios = bandwidth(rounds)
    lines = [f"| {ELEMENTS // 10**6} million elements | GB/s | of the copy |", "|---|---:|---:|"]
    lines += [f"| {name} | {rate:.1f} | {ratios.get(name, 1.0):.2f} |" for name, rate in rates.items()]
    seconds, increase = slowdown(rounds)
    lines += [
        "",
        f"Ten steps of {seconds / INTERVAL:.2f} s take {seconds:.2f} s without an update, and {100 * increase:+.1f} % "
        f"with one ({os.cpu_count()} cores, all of them busy with the steps).",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds after the warm-up")
    parser.add_argument("--write", type=Path, help="a page whose measured part is replaced")
    options = parser.parse_args()
    text = table(options.rounds)
    print(text)
    if options.write:
        replace_measured(options.write, text)


if __name__ == "__main__":
    main()
