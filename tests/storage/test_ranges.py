"""Ranges arrive exactly, from many threads, through few descriptors."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from paddleformers_fc.errors import Corrupt, FormatError, OptionError, StorageError
from paddleformers_fc.storage import files
from paddleformers_fc.storage.ranges import RangeReader
from tests.harness.limits import LIMIT


class WatchedOs:
    """An ``os`` that reads ``per_call`` bytes at most, counts what is open, and can make readers meet."""

    def __init__(self, per_call: int = 1 << 30, meeting: threading.Barrier | None = None) -> None:
        self._per_call = per_call
        self._meeting = meeting
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self.most_open = 0
        self.opened = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, *arguments: Any) -> int:
        with self._lock:
            descriptor = os.open(*arguments)
            self._open.add(descriptor)
            self.opened += 1
            self.most_open = max(self.most_open, len(self._open))
        return descriptor

    def close(self, descriptor: int) -> None:
        with self._lock:
            self._open.remove(descriptor)
            os.close(descriptor)

    def preadv(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if self._meeting is not None:
            self._meeting.wait(LIMIT)
        return os.preadv(descriptor, [buffers[0][: self._per_call]], offset)

    @property
    def still_open(self) -> int:
        return len(self._open)


@pytest.fixture
def data_files(tmp_path: Path) -> list[Path]:
    """Eight files; byte ``i`` of file ``n`` is ``(i + n) % 256``."""
    paths = [tmp_path / f"{number}.bin" for number in range(8)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes((position + number) % 256 for position in range(4096)))
    return paths


@pytest.fixture
def reader() -> Iterator[RangeReader]:
    with RangeReader() as one:
        yield one


def test_a_range_arrives_in_the_callers_memory(reader: RangeReader, data_files: list[Path]) -> None:
    array = np.zeros(8, np.float32)
    reader.read_into(data_files[0], 100, array)
    assert array.tobytes() == data_files[0].read_bytes()[100:132]
    part = np.zeros((4, 3), ml_dtypes.bfloat16)
    reader.read_into(data_files[1], 7, part[1:3])
    assert part.tobytes() == bytes(6) + data_files[1].read_bytes()[7:19] + bytes(6)


def test_an_empty_range_reads_nothing_even_at_the_end(reader: RangeReader, data_files: list[Path]) -> None:
    reader.read_into(data_files[0], 4096, np.zeros((0, 4), np.float32))
    reader.read_into(data_files[0], 4096, memoryview(bytearray()))


def test_short_reads_continue_until_the_buffer_is_full(data_files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "os", WatchedOs(per_call=7))
    buffer = bytearray(1000)
    with RangeReader() as reader:
        reader.read_into(data_files[2], 50, buffer)
    assert bytes(buffer) == data_files[2].read_bytes()[50:1050]


@pytest.mark.parametrize("per_call", [3, 10, 1000])
def test_several_buffers_are_filled_one_after_the_other(
    data_files: list[Path], monkeypatch: pytest.MonkeyPatch, per_call: int
) -> None:
    monkeypatch.setattr(files, "os", WatchedOs(per_call))
    memory = memoryview(bytearray(1000))
    with RangeReader() as reader:
        reader.read_several(data_files[2], 50, [memory[:10], memory[10:10], memory[10:500], memory[500:]])
        assert bytes(memory) == data_files[2].read_bytes()[50:1050]
        with pytest.raises(Corrupt, match="byte 4096"):
            reader.read_several(data_files[2], 4000, [memory[:10], memory[10:500]])


@pytest.mark.parametrize(("offset", "got"), [(4000, 96), (4096, 0), (9999, 0)])
def test_a_file_that_ends_early_is_corrupt_and_the_error_has_the_position(
    reader: RangeReader, data_files: list[Path], offset: int, got: int
) -> None:
    with pytest.raises(Corrupt) as caught:
        reader.read_into(data_files[3], offset, bytearray(200))
    assert "3.bin ends too early" in caught.value.what
    assert caught.value.where.endswith(f"3.bin, byte {offset + got}")
    assert caught.value.evidence == (f"wanted 200 bytes from byte {offset}, got {got}",)


def test_a_missing_file_is_corrupt_and_takes_no_descriptor(data_files: list[Path]) -> None:
    with RangeReader(max_open_files=1) as reader:
        with pytest.raises(Corrupt, match="gone is missing"):
            reader.read_into(data_files[0].with_name("gone"), 0, bytearray(1))
        reader.read_into(data_files[0], 0, bytearray(1))


def test_a_directory_is_refused(reader: RangeReader, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="not a regular file"):
        reader.read_into(tmp_path, 0, bytearray(1))


def test_an_error_of_the_operating_system_names_the_file(
    data_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class BrokenOs(WatchedOs):
        def preadv(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
            raise OSError(5, "Input/output error")

    machine = BrokenOs()
    monkeypatch.setattr(files, "os", machine)
    with RangeReader() as reader, pytest.raises(StorageError, match=r"(?s)4\.bin: Input/output error.*EIO"):
        reader.read_into(data_files[4], 0, bytearray(1))
    assert machine.still_open == 0


@pytest.mark.skipif(not hasattr(os, "O_NOATIME"), reason="the system has no such flag")
def test_a_read_leaves_the_time_of_access_and_a_file_of_another_user_is_read_too(
    data_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class SomebodyElse(WatchedOs):
        def open(self, *arguments: Any) -> int:
            if arguments[1] & os.O_NOATIME:
                raise PermissionError(errno.EPERM, "Operation not permitted")
            return super().open(*arguments)

    os.utime(data_files[0], (1, 2))
    buffer = bytearray(4)
    with RangeReader() as reader:
        reader.read_into(data_files[0], 0, buffer)
    assert data_files[0].stat().st_atime == 1
    machine = SomebodyElse()
    monkeypatch.setattr(files, "os", machine)
    with RangeReader() as reader:
        reader.read_into(data_files[1], 0, buffer)
    assert bytes(buffer) == bytes([1, 2, 3, 4])
    assert machine.opened == 1
    assert machine.still_open == 0


@pytest.mark.parametrize("buffer", [b"1234", np.zeros((4, 4))[:, 0], memoryview(bytearray(8))[::2]])
def test_memory_that_cannot_take_the_bytes_is_refused(reader: RangeReader, data_files: list[Path], buffer: Any) -> None:
    with pytest.raises(FormatError):
        reader.read_into(data_files[0], 0, buffer)


def test_a_file_is_opened_once_and_closed_with_the_reader(
    data_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = WatchedOs()
    monkeypatch.setattr(files, "os", machine)
    with RangeReader() as reader:
        for offset in range(10):
            reader.read_into(data_files[0], offset, bytearray(1))
        assert (machine.opened, machine.still_open) == (1, 1)
    assert machine.still_open == 0
    with pytest.raises(StorageError, match="the reader is closed"):
        reader.read_into(data_files[0], 0, bytearray(1))
    reader.close()


def test_the_least_recently_used_file_makes_room(data_files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    machine = WatchedOs()
    monkeypatch.setattr(files, "os", machine)
    with RangeReader(max_open_files=2) as reader:
        for number in (0, 1, 0, 2, 0):
            reader.read_into(data_files[number], 0, bytearray(1))
        assert machine.opened == 3, "file 0 stayed open, file 1 made room for file 2"
    assert machine.most_open == 2


def test_many_threads_share_few_descriptors(data_files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    machine = WatchedOs(per_call=13)
    monkeypatch.setattr(files, "os", machine)

    def read(job: int) -> bool:
        path, offset = data_files[job % 8], job * 7 % 4000
        buffer = bytearray(96)
        reader.read_into(path, offset, buffer)
        return bytes(buffer) == bytes((position + job % 8) % 256 for position in range(offset, offset + 96))

    with RangeReader(max_open_files=3) as reader, ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(600), timeout=LIMIT))
    assert machine.most_open <= 3
    assert machine.still_open == 0


def test_two_threads_read_one_file_at_the_same_time(data_files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    machine = WatchedOs(meeting=threading.Barrier(2))
    monkeypatch.setattr(files, "os", machine)
    with RangeReader(max_open_files=1) as reader, ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(reader.read_into, data_files[0], 0, bytearray(9)) for _ in range(2)]
        for job in jobs:
            job.result(LIMIT)
    assert machine.still_open == 0


def test_two_threads_that_open_one_file_at_the_same_time_keep_one_descriptor(
    data_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = threading.Barrier(2)

    class MeetingOs(WatchedOs):
        def open(self, *arguments: Any) -> int:
            meeting.wait(LIMIT)
            return super().open(*arguments)

    machine = MeetingOs()
    monkeypatch.setattr(files, "os", machine)
    with RangeReader(max_open_files=2) as reader, ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(reader.read_into, data_files[0], 0, bytearray(9)) for _ in range(2)]
        for job in jobs:
            job.result(LIMIT)
        assert (machine.opened, machine.still_open) == (2, 1)
    assert machine.still_open == 0


def test_a_thread_that_waits_for_a_file_continues_as_soon_as_another_has_opened_it(
    data_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = threading.Event()

    class Condition(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            waiting.set()
            return super().wait(timeout)

    class SlowOs(WatchedOs):
        def open(self, *arguments: Any) -> int:
            assert waiting.wait(LIMIT)
            return super().open(*arguments)

    machine = SlowOs(meeting=threading.Barrier(2))
    monkeypatch.setattr(files, "os", machine)
    with RangeReader(max_open_files=1) as reader, ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(reader, "_change", Condition())
        jobs = [pool.submit(reader.read_into, data_files[0], 0, bytearray(9)) for _ in range(2)]
        for job in jobs:
            job.result(LIMIT)
    assert machine.opened == 1


def test_a_thread_waits_for_a_descriptor_instead_of_exceeding_the_bound(
    data_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, may_leave = threading.Event(), threading.Event()

    class SlowOs(WatchedOs):
        def preadv(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
            entered.set()
            assert may_leave.wait(LIMIT)
            return super().preadv(descriptor, buffers, offset)

    machine = SlowOs()
    monkeypatch.setattr(files, "os", machine)
    with RangeReader(max_open_files=1) as reader, ThreadPoolExecutor(2) as pool:
        first = pool.submit(reader.read_into, data_files[0], 0, bytearray(9))
        assert entered.wait(LIMIT)
        second = pool.submit(reader.read_into, data_files[1], 0, bytearray(9))
        assert not second.done()
        may_leave.set()
        first.result(LIMIT)
        second.result(LIMIT)
    assert machine.most_open == 1


def test_a_reader_closed_during_reads_closes_the_file_after_the_last_of_them(
    data_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, meeting, first_has_ended = RangeReader(), threading.Barrier(2), threading.Event()

    class ClosingOs(WatchedOs):
        def preadv(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
            place = meeting.wait(LIMIT)
            reader.close()
            assert place == 0 or first_has_ended.wait(LIMIT)
            assert self.still_open == 1
            return super().preadv(descriptor, buffers, offset)

    machine = ClosingOs()
    monkeypatch.setattr(files, "os", machine)
    buffers = [bytearray(4), bytearray(4)]
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(reader.read_into, data_files[0], 0, buffer) for buffer in buffers]
        next(as_completed(jobs, LIMIT)).result()
        first_has_ended.set()
        for job in jobs:
            job.result(LIMIT)
    assert buffers == [b"\x00\x01\x02\x03"] * 2
    assert machine.still_open == 0


class UnwillingOs(WatchedOs):
    """Gives every descriptor back, and reports a failure for some, as a network file system may."""

    def __init__(self, *unwilling: int) -> None:
        super().__init__()
        self._unwilling = unwilling
        self._closed = 0

    def close(self, descriptor: int) -> None:
        super().close(descriptor)
        self._closed += 1
        if self._closed in self._unwilling:
            raise OSError(errno.EIO, "Input/output error")


def test_a_file_that_cannot_be_closed_keeps_no_other_open(
    data_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = UnwillingOs(1, 3)
    monkeypatch.setattr(files, "os", machine)
    reader = RangeReader()
    for path in data_files[:4]:
        reader.read_into(path, 0, bytearray(9))
    with pytest.raises(StorageError, match=data_files[0].name):
        reader.close()
    assert (machine.opened, machine.still_open) == (4, 0)
    reader.close()


def test_what_went_wrong_inside_counts_before_a_file_that_cannot_be_closed(
    data_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "os", UnwillingOs(1))
    with pytest.raises(Corrupt, match="ends too early"), RangeReader() as reader:
        reader.read_into(data_files[0], 0, bytearray(5000))


def test_a_second_descriptor_of_a_file_that_cannot_be_closed_leaves_no_user_behind(
    data_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = threading.Barrier(2)

    class MeetingOs(UnwillingOs):
        def open(self, *arguments: Any) -> int:
            meeting.wait(LIMIT)
            return super().open(*arguments)

    machine = MeetingOs(1)
    monkeypatch.setattr(files, "os", machine)
    reader = RangeReader(max_open_files=2)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(reader.read_into, data_files[0], 0, bytearray(9)) for _ in range(2)]
        assert sorted(isinstance(job.exception(LIMIT), StorageError) for job in jobs) == [False, True]
    reader.close()
    assert machine.still_open == 0


def test_a_bound_of_no_files_is_refused() -> None:
    with pytest.raises(OptionError, match="max_open_files is 0"):
        RangeReader(max_open_files=0)
