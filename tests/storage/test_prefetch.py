"""Many small reads of a remote file come in few requests, each exactly, and in bounded memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from paddleformers_fc.storage.paths import RemotePath, parse_path
from paddleformers_fc.storage.prefetch import (
    BUNDLE_BYTES,
    FREE_BYTES,
    GAP_BYTES,
    MAX_GAP_RATIO,
    MOST_REQUESTS,
    ExpectedRange,
    Prefetcher,
    bundle_requests,
)
from paddleformers_fc.storage.ranges import RangeReader
from paddleformers_fc.storage.remote import open_remote
from paddleformers_fc.storage.rows import ScatterList
from tests.storage.serving import Served, serving

SIZE = 6_000_000
DATA = random.Random(0).randbytes(SIZE)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "data").write_bytes(DATA)
    with serving(tmp_path) as one:
        yield one


@pytest.fixture
def path(served: Served) -> RemotePath:
    found = parse_path(f"{served.url}/data")
    assert isinstance(found, RemotePath)
    return found


def wanted(*ranges: tuple[int, int]) -> list[ExpectedRange]:
    return [ExpectedRange(begin, end, end - begin) for begin, end in ranges]


def requests_of(*ranges: tuple[int, int]) -> list[tuple[int, int]]:
    return [request for bundle in bundle_requests(wanted(*ranges)) for request in bundle.requests]


def test_neighbours_become_one_request_and_strangers_do_not() -> None:
    far = 4 * GAP_BYTES
    assert requests_of((100, 200), (0, 50), (far, far + 10), (40, 60), (7, 7)) == [(0, 200), (far, far + 10)]


def test_a_gap_that_costs_more_than_a_request_is_left_out() -> None:
    wide = 1_000_000 + GAP_BYTES
    assert requests_of((0, 1_000_000), (wide, wide + 5)) == [(0, wide + 5)]
    assert requests_of((0, 1_000_000), (wide + 1, wide + 5)) == [(0, 1_000_000), (wide + 1, wide + 5)]


def test_what_is_read_too_much_is_bounded() -> None:
    dice = random.Random(2)
    ranges = sorted((low, low + dice.randrange(1, 5000)) for low in (dice.randrange(10**8) for _ in range(1000)))
    for begin, end in requests_of(*ranges):
        inside = sum(high - low for low, high in ranges if begin <= low < end)
        assert end - begin <= max(FREE_BYTES, MAX_GAP_RATIO * inside)


def test_a_long_range_is_cut_and_bundles_are_bounded() -> None:
    found = list(bundle_requests(wanted((10, 10 + 3 * BUNDLE_BYTES + 1))))
    assert [bundle.size for bundle in found] == [BUNDLE_BYTES] * 3 + [1]
    far = 2 * GAP_BYTES
    found = list(bundle_requests(wanted(*((n * far, n * far + 4) for n in range(2 * MOST_REQUESTS + 2)))))
    assert [len(bundle.requests) for bundle in found] == [MOST_REQUESTS, MOST_REQUESTS, 2]


def test_announced_ranges_arrive_exactly_from_many_threads_in_few_requests(served: Served, path: RemotePath) -> None:
    dice = random.Random(1)
    ranges = [(low, low + dice.randrange(1, 3000)) for low in (dice.randrange(SIZE - 3000) for _ in range(2000))]
    with RangeReader() as reader:
        reader.expect(path, wanted(*ranges))

        def read(one: tuple[int, int]) -> bytes:
            buffer = bytearray(one[1] - one[0])
            reader.read_into(path, one[0], buffer)
            return bytes(buffer)

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(read, ranges)) == [DATA[begin:end] for begin, end in ranges]
    assert len(served.ranges) <= 4
    assert served.bytes <= SIZE


def test_memory_is_bounded_and_what_is_forgotten_is_fetched_again(path: RemotePath, served: Served) -> None:
    ahead, file = Prefetcher(1), open_remote(path)
    far = GAP_BYTES + 1
    places = [(n * (far + 100_000), n * (far + 100_000) + 100_000) for n in range(16)]
    ahead.expect(path, wanted(*places))
    bundles = ahead._expected[path].bundles
    for begin, end in places:
        buffer = memoryview(bytearray(end - begin))
        ahead.read_into(file, begin, buffer)
        assert bytes(buffer) == DATA[begin:end]
    assert len(bundles) == 1
    # Room for less than one bundle: only the last stays.
    ahead._room = 1
    other = RemotePath(f"{path.parent.url}/./data")
    ahead.expect(other, wanted((0, 10)))
    ahead.read_into(open_remote(other), 0, memoryview(bytearray(10)))
    assert bundles[0].answers is None
    served.forget()
    ahead.read_into(file, 0, memoryview(bytearray(10)))
    assert len(served.ranges) == len(places)


def test_a_read_across_requests_and_bundles_is_put_together(path: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddleformers_fc.storage.prefetch.BUNDLE_BYTES", 1000)
    with RangeReader() as reader:
        reader.expect(path, wanted((500, 9_500)))
        for offset, length in ((500, 9_000), (1_499, 2), (1_500, 1_000), (9_499, 1)):
            buffer = bytearray(length)
            reader.read_into(path, offset, buffer)
            assert bytes(buffer) == DATA[offset : offset + length]


def test_an_unexpected_range_is_requested_alone(served: Served, path: RemotePath) -> None:
    with RangeReader() as reader:
        reader.expect(path, wanted((0, 10), (10, 20)))
        buffer = bytearray(10)
        for offset in (0, 10, 15, 5_000_000):
            reader.read_into(path, offset, buffer)
            assert bytes(buffer) == DATA[offset : offset + 10]
    assert served.ranges == [("data", 0, 20), ("data", 15, 10), ("data", 5_000_000, 10)]


@pytest.mark.parametrize("announced", [True, False])
def test_rows_and_lines_arrive_where_they_belong(served: Served, path: RemotePath, announced: bool) -> None:
    out = np.zeros((1000, 64), np.uint8)
    offsets = np.arange(1000, dtype=np.int64) * 4000 + 17
    addresses = out.ctypes.data + 64 * np.arange(1000, dtype=np.int64)[::-1]
    lines = [bytearray(30), bytearray(0), bytearray(500)]
    with RangeReader() as reader:
        if announced:
            reader.expect(path, wanted((0, SIZE)))
        reader.read_rows(path, ScatterList.alike(offsets, addresses, 64))
        reader.read_several(path, 99, [memoryview(line) for line in lines])
    assert all(out[999 - row].tobytes() == DATA[low : low + 64] for row, low in enumerate(offsets))
    assert b"".join(lines) == DATA[99:629]
    assert len(served.ranges) <= 70
