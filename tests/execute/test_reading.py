"""Carrying out plans: the same bits with any threads, staging and over-read, and nothing left behind by a failure."""

from __future__ import annotations

import math
import os
import resource
import signal
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from paddleformers_fc.errors import Corrupt, MismatchError, StorageError
from paddleformers_fc.execute.reading import ArraySlot, execute_reads, fill_arrays, verify_equal
from paddleformers_fc.mapping.boxes import Box, whole
from paddleformers_fc.plan.items import EqualCheck, LoadPlan, ReadItem, StoredPart
from paddleformers_fc.plan.report import Report
from paddleformers_fc.storage import executor, files
from paddleformers_fc.storage.dtypes import to_numpy, to_safetensors
from paddleformers_fc.storage.executor import IMAGE_BYTES, WINDOW_BYTES, ReadOptions, ReadPool, run_workers
from paddleformers_fc.storage.operations import MAX_OVER_READ, Memory
from tests.harness.limits import LIMIT
from tests.harness.sampling import thorough

ROLE = "model_state"
NAMES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "uint8"]


def dtype_of(name: str) -> np.dtype[Any]:
    return to_numpy(to_safetensors(name))


def plan_of(items: list[ReadItem]) -> LoadPlan:
    ordered = sorted(items, key=lambda item: (item.stored.file, item.stored.begin))
    return LoadPlan(tuple(ordered), (), {}, Report())


def random_bytes(count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


@dataclass(frozen=True)
class Wanted:
    """One shard that is put together from slabs of one stored tensor.

    Args:
        shape: of the stored tensor.
        box: what is wanted of it.
        order: for every wanted axis the stored one.
        dtypes: stored and wanted.
        slabs: in how many pieces along its first axis the tensor is stored.
    """

    shape: tuple[int, ...]
    box: Box
    order: tuple[int, ...]
    dtypes: tuple[str, str]
    slabs: int


@st.composite
def wanted(draw: st.DrawFn) -> Wanted:
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    lo = tuple(draw(st.integers(0, length - 1)) for length in shape)
    hi = tuple(draw(st.integers(low + 1, length)) for low, length in zip(lo, shape, strict=True))
    stored = draw(st.sampled_from(NAMES))
    casts = [stored, "float32", "bfloat16"] if "float" in stored else [stored]
    order = tuple(draw(st.permutations(range(len(shape)))))
    return Wanted(shape, Box(lo, hi), order, (stored, draw(st.sampled_from(casts))), draw(st.integers(1, 3)))


class Stored:
    """Tensors in two files, with the items that read them and what they must become."""

    def __init__(self, root: Path, tensors: list[Wanted]) -> None:
        self.items: list[ReadItem] = []
        self.expected: dict[tuple[str, str], np.ndarray[Any, Any]] = {}
        contents = {"a": bytearray(b"head"), "b": bytearray(b"a longer head")}
        for number, one in enumerate(tensors):
            self._add(str(number), one, contents, number)
        for name, data in contents.items():
            (root / name).write_bytes(data)

    def _add(self, name: str, one: Wanted, contents: dict[str, bytearray], seed: int) -> None:
        dtype = dtype_of(one.dtypes[0])
        values = random_bytes(math.prod(one.shape) * dtype.itemsize, seed).view(dtype).reshape(one.shape)
        part = values[tuple(slice(low, high) for low, high in zip(one.box.lo, one.box.hi, strict=True))]
        target = part.transpose(one.order).astype(dtype_of(one.dtypes[1]))
        self.expected[ROLE, name] = target.ravel()
        edges = np.linspace(0, one.shape[0], one.slabs + 1).astype(int)
        for low, high in zip(edges[:-1], edges[1:], strict=True):
            slab = Box((int(low), *(0 for _ in one.shape[1:])), (int(high), *one.shape[1:]))
            common = slab.intersect(one.box) if low < high else None
            if common is None:
                continue
            file = "a" if low % 2 else "b"
            begin = len(contents[file])
            contents[file] += values[low:high].tobytes()
            filled = common.relative_to(one.box.lo)
            box = Box(tuple(filled.lo[axis] for axis in one.order), tuple(filled.hi[axis] for axis in one.order))
            stored = StoredPart(file, begin, slab.shape, common.relative_to(slab.lo), one.dtypes[0])
            self.items.append(ReadItem(ROLE, name, stored, 0, target.shape, box, one.order))

    def slots(self) -> dict[tuple[str, str], ArraySlot]:
        return {key: ArraySlot(np.zeros(array.size, array.dtype)) for key, array in self.expected.items()}


@pytest.mark.parametrize("order", ["as stored", "apart"])
def test_tensors_just_past_a_block_are_read_to_their_last_element(tmp_path: Path, order: str) -> None:
    tile = WINDOW_BYTES // 4
    sizes = [tile - 1, 1, tile, tile + 1, 1, 2 * tile + 1, 3]
    values = random_bytes(sum(sizes) * 4).view(np.float32)
    (tmp_path / "matrix").write_bytes(values.tobytes())
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    items = [item_of((size,), whole((size,)), (0,), str(n), 4 * starts[n]) for n, size in enumerate(sizes)]
    slots = empty_slots(items)
    count = execute_reads(plan_of(items if order == "as stored" else items[::-2] + items[-2::-2]), tmp_path, slots)
    assert count == values.nbytes
    for number, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        assert slots[ROLE, str(number)].array.tobytes() == values[start : start + size].tobytes(), number


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@thorough(200)
@given(
    st.lists(wanted(), min_size=1, max_size=6),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 100, 4096, 64 << 20]),
)
def test_shards_are_the_same_bits_with_any_options(
    tmp_path_factory: pytest.TempPathFactory, tensors: list[Wanted], threads: int, staging: int
) -> None:
    root = tmp_path_factory.getbasetemp()
    stored = Stored(root, tensors)
    slots = stored.slots()
    count = execute_reads(plan_of(stored.items), root, slots, ReadOptions(threads, staging))
    for key, expected in stored.expected.items():
        assert slots[key].array.tobytes() == expected.tobytes()
    needed = sum(item.stored.part.volume * dtype_of(item.stored.dtype).itemsize for item in stored.items)
    assert needed <= count <= MAX_OVER_READ * needed


def matrix(root: Path, rows: int, columns: int, dtype: str = "float32", file: str = "matrix") -> np.ndarray[Any, Any]:
    """A stored matrix that is a file of its own."""
    values = random_bytes(rows * columns * dtype_of(dtype).itemsize).view(dtype_of(dtype)).reshape(rows, columns)
    (root / file).write_bytes(values.tobytes())
    return values


def item_of(
    shape: tuple[int, ...], part: Box, axes: tuple[int, ...], name: str = "w", begin: int = 0, file: str = "matrix"
) -> ReadItem:
    """A region of a stored float32 tensor that is a whole shard."""
    target = tuple(part.shape[axis] for axis in axes)
    return ReadItem(ROLE, name, StoredPart(file, begin, shape, part, "float32"), 0, target, whole(target), axes)


def rows_of(count: int, length: int, file: str = "matrix") -> list[ReadItem]:
    """Shards that are successive rows of a file."""
    return [item_of((length,), whole((length,)), (0,), str(row), row * length * 4, file) for row in range(count)]


def empty_slots(items: list[ReadItem]) -> dict[tuple[str, str], Any]:
    return {(item.role, item.name): ArraySlot(np.zeros(math.prod(item.shape), np.float32)) for item in items}


class CountingOs:
    """An ``os`` that counts reads and the threads that made them, and lets some of them meet."""

    def __init__(self, meeting: threading.Barrier | None = None) -> None:
        self._meeting = meeting
        self.reads: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def preadv(self, descriptor: int, buffers: Any, offset: int) -> int:
        self.reads.append(threading.current_thread().name)
        if self._meeting is not None:
            self._meeting.wait(LIMIT)
        return os.preadv(descriptor, buffers, offset)


def test_items_that_share_some_of_their_boxes_are_each_filled_by_all_of_theirs(tmp_path: Path) -> None:
    values = matrix(tmp_path, 4, 4)
    shape, straight, across, all_of_it = (4, 4), (0, 1), (1, 0), whole((4, 4))
    rows = [Box((row, 0), (row + 1, 4)) for row in range(4)]
    items, expected = [], {}
    for source in range(4):
        for target in range(4):
            stored = StoredPart("matrix", 0, shape, rows[source], "float32")
            items.append(ReadItem(ROLE, f"{source}{target}", stored, 0, shape, rows[target], straight))
            expected[f"{source}{target}"] = np.zeros(shape, np.float32)
            expected[f"{source}{target}"][target] = values[source]
    for name, axes in (("straight", straight), ("across", across)):
        items.append(
            ReadItem(ROLE, name, StoredPart("matrix", 0, shape, all_of_it, "float32"), 0, shape, all_of_it, axes)
        )
        expected[name] = values.transpose(axes)
    slots = empty_slots(items)
    execute_reads(plan_of(items), tmp_path, slots)
    for name, filled in expected.items():
        assert slots[ROLE, name].array.tobytes() == filled.tobytes(), name


def test_one_large_tensor_is_read_by_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = matrix(tmp_path, 4, WINDOW_BYTES // 4)
    machine = CountingOs(threading.Barrier(4))
    monkeypatch.setattr(files, "os", machine)
    items = [item_of(values.shape, whole(values.shape), (0, 1))]
    slots = empty_slots(items)
    execute_reads(plan_of(items), tmp_path, slots, ReadOptions(threads=4))
    assert len(set(machine.reads)) == 4
    assert slots[ROLE, "w"].array.tobytes() == values.tobytes()


def test_small_tensors_that_follow_one_another_are_read_by_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = matrix(tmp_path, 5000, 16)
    monkeypatch.setattr(files, "os", machine := CountingOs())
    items = rows_of(*values.shape)
    slots = empty_slots(items)
    assert execute_reads(plan_of(items), tmp_path, slots) == values.nbytes
    assert len(machine.reads) == math.ceil(5000 / files.MAX_BUFFERS)
    assert all(slots[ROLE, str(row)].array.tobytes() == values[row].tobytes() for row in range(5000))


@pytest.mark.parametrize("start", [-1, 1])
def test_bytes_beside_a_tensor_are_not_filled(tmp_path: Path, start: int) -> None:
    """For any plan: the stored bytes may be anything."""
    values = matrix(tmp_path, 2, 8)
    memory = np.zeros(24, np.float32)
    items = rows_of(*values.shape)
    items[1] = msgspec.structs.replace(items[1], start=start)
    slots = {(ROLE, str(row)): ArraySlot(memory[8 * row : 8 * row + 8]) for row in range(2)}
    with pytest.raises(MismatchError, match="exceeds the memory of its tensor"):
        execute_reads(plan_of(items), tmp_path, slots)
    assert not memory[8:].any()


def test_memory_beside_the_targets_is_bounded_for_all_threads_together(tmp_path: Path) -> None:
    values = matrix(tmp_path, 2048, 4096)
    items = [item_of(values.shape, whole(values.shape), (1, 0))]
    slots = empty_slots(items)
    tracemalloc.start()
    try:
        execute_reads(plan_of(items), tmp_path, slots, ReadOptions(threads=16, staging_memory_bytes=256 << 10))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert slots[ROLE, "w"].array.tobytes() == values.T.tobytes()
    assert peak < 600 << 10


@dataclass
class StandIn:
    """A slot whose host array travels from when it is full until somebody waits for it.

    Args:
        size: of the shard, in float32.
        held: the bytes that all slots hold at a time, as they come and go.
        travelling: how many slots travel at a time, as they set out and arrive; the first is 0.
        met: how many travelled when a slot was opened.
    """

    size: int
    held: list[int]
    travelling: list[int] = field(default_factory=lambda: [0])
    met: list[int] = field(default_factory=list)
    result: bytes = b""
    _array: Any = None
    _travels: bool = False

    @property
    def host_bytes(self) -> int:
        return self.size * 4

    def open(self) -> Memory:
        self.met.append(self.travelling[-1])
        self.held.append(self.held[-1] + self.host_bytes)
        self._array = np.zeros(self.size, np.float32)
        return Memory.of(self._array)

    def close(self) -> None:
        self._travels = True
        self.travelling.append(self.travelling[-1] + 1)

    def finish_copy(self) -> None:
        if self._travels:
            self.travelling.append(self.travelling[-1] - 1)
            self.result = self._array.tobytes()
        self.held.append(self.held[-1] - self.host_bytes)
        self._array, self._travels = None, False


def test_host_copies_are_bounded_too(tmp_path: Path) -> None:
    values = matrix(tmp_path, 40, 1000)
    items = rows_of(*values.shape)
    large = item_of(values.shape, whole(values.shape), (1, 0), "large")
    held = [0]
    slots: dict[tuple[str, str], Any] = {(ROLE, str(row)): StandIn(1000, held) for row in range(40)}
    slots[ROLE, "large"] = StandIn(40_000, held)
    execute_reads(
        plan_of([*items, large]), tmp_path, slots, ReadOptions(threads=1, staging_memory_bytes=2 * IMAGE_BYTES + 10_000)
    )
    assert slots[ROLE, "large"].result == values.T.tobytes()
    assert all(slots[ROLE, str(row)].result == values[row].tobytes() for row in range(40))
    assert max(held) == 160_000, "what is larger than the bound passes alone"
    assert held[-1] == 0


def test_host_arrays_travel_while_the_next_are_read_and_all_have_arrived_at_the_end(tmp_path: Path) -> None:
    values = matrix(tmp_path, 40, 1000)
    held, travelling, met = [0], [0], []
    slots = {(ROLE, str(row)): StandIn(1000, held, travelling, met) for row in range(40)}
    options = ReadOptions(threads=1, staging_memory_bytes=2 * IMAGE_BYTES + 16_000)
    execute_reads(plan_of(rows_of(*values.shape)), tmp_path, slots, options)
    assert all(slots[ROLE, str(row)].result == values[row].tobytes() for row in range(40))
    assert met == [0, 0, *[2] * 38], "groups of two, each read while the one before it travels"
    assert max(held) == 16_000
    assert held[-1] == travelling[-1] == 0


def test_nothing_travels_any_more_when_a_read_has_failed(tmp_path: Path) -> None:
    values = matrix(tmp_path, 40, 1000)
    held, travelling = [0], [0]
    slots: dict[tuple[str, str], Any] = {(ROLE, str(row)): StandIn(1000, held, travelling) for row in range(40)}
    os.truncate(tmp_path / "matrix", values.nbytes // 2)
    options = ReadOptions(threads=1, staging_memory_bytes=2 * IMAGE_BYTES + 16_000)
    with pytest.raises(Corrupt):
        execute_reads(plan_of(rows_of(*values.shape)), tmp_path, slots, options)
    assert max(travelling) == 4
    assert held[-1] == travelling[-1] == 0


def descriptors() -> set[str]:
    return {os.readlink(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd") if _is_open(int(one))}


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """After the test there are no more threads and open files than before."""
    threads, files_before = set(threading.enumerate()), descriptors()
    yield
    for thread in set(threading.enumerate()) - threads:
        # One that an interrupt met before it was known to its pool does nothing but end.
        thread.join(LIMIT)
    assert set(threading.enumerate()) == threads
    assert descriptors() == files_before


@dataclass
class Watched:
    """A slot that is filled in place and records the live views of all such slots.

    Args:
        views: of all slots, as they were opened.
        alive: how many were held at every opening.
    """

    views: list[weakref.ref[np.ndarray[Any, Any]]]
    alive: list[int]
    host_bytes: int = 0
    memory: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(4, np.float32))

    def open(self) -> Memory:
        self.alive.append(sum(view() is not None for view in self.views))
        view = self.memory[:]
        self.views.append(weakref.ref(view))
        return Memory.of(view)

    def close(self) -> None:
        """Nothing to hand over."""

    def finish_copy(self) -> None:
        """Nothing to wait for."""


def test_what_is_filled_in_place_is_forgotten_when_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "WINDOW_BYTES", 1 << 20)
    values = matrix(tmp_path, 2000, 8192)
    items = [item_of(values.shape, Box((row, 0), (row + 1, 4)), (0, 1), f"{row:04}") for row in range(2000)]
    views: list[weakref.ref[np.ndarray[Any, Any]]] = []
    alive: list[int] = []
    slots = {(ROLE, item.name): Watched(views, alive) for item in items}
    execute_reads(plan_of(items), tmp_path, slots, ReadOptions(threads=1))
    assert all(slots[ROLE, f"{row:04}"].memory.tobytes() == values[row, :4].tobytes() for row in range(2000))
    assert len(alive) == 2000
    assert max(alive) < 300, "those of a few windows"


@dataclass
class Trap:
    """A slot that does something when the stream of reads comes to it."""

    size: int
    spring: Callable[[], object]
    host_bytes: int = 0

    def open(self) -> Memory:
        self.spring()
        return Memory.of(np.zeros(self.size, np.float32))

    def close(self) -> None:
        """Nothing to hand over."""

    def finish_copy(self) -> None:
        """Nothing to wait for."""


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize("axes", [(0, 1), (1, 0)])
def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path, threads: int, axes: tuple[int, ...]) -> None:
    values = matrix(tmp_path, 1024, 4096)
    part = Box((0, 1024), (1024, 2048))
    items = [item_of(values.shape, part, axes, f"{number:02}") for number in range(40)]
    slots = empty_slots(items)
    slots[ROLE, "20"] = Trap(1024 * 1024, lambda: os.truncate(tmp_path / "matrix", 5_000_000))
    with pytest.raises(Corrupt, match=r"matrix ends too early") as caught:
        execute_reads(plan_of(items), tmp_path, slots, ReadOptions(threads))
    offset = int(caught.value.where.rsplit(" ", 1)[1])
    assert offset >= 5_000_000, "the first byte that is not there, or that of a row behind it"


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("part", [Box((0, 0), (64, 1024)), Box((0, 0), (64, 512))])
def test_a_failure_of_the_device_is_named(part: Box) -> None:
    """The memory of a process read where nothing is mapped: the kernel itself answers EIO."""
    items = [item_of((64, 1024), part, (0, 1), file="mem")]
    with pytest.raises(StorageError, match=r"(?s)/proc/self/mem: Input/output error.*EIO"):
        execute_reads(plan_of(items), Path("/proc/self"), empty_slots(items))


@pytest.mark.usefixtures("nothing_left")
def test_too_many_open_files_are_reported_as_such(tmp_path: Path) -> None:
    items = []
    for number in range(64):
        matrix(tmp_path, 1, 4, file=str(number))
        items.append(item_of((4,), whole((4,)), (0,), str(number), file=str(number)))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    following = os.open(os.devnull, os.O_RDONLY)
    os.close(following)
    resource.setrlimit(resource.RLIMIT_NOFILE, (following, hard))
    try:
        with pytest.raises(StorageError, match="ulimit -n"):
            execute_reads(plan_of(items), tmp_path, empty_slots(items))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("count", [1, 2, 4])
def test_as_many_tasks_are_under_way_as_there_are_threads_and_one_of_them_is_the_callers(count: int) -> None:
    by: list[threading.Thread] = []
    barrier = threading.Barrier(count)

    def work(take: Callable[[], int | None]) -> int:
        total = 0
        while (found := take()) is not None:
            by.append(threading.current_thread())
            barrier.wait(LIMIT)
            total += found
        return total

    with ThreadPoolExecutor(count) as pool:
        assert run_workers(pool, count, iter([1] * count), work) == count
    assert threading.current_thread() in by
    assert len(set(by)) == count


@pytest.mark.usefixtures("nothing_left")
def test_one_task_wakes_no_thread(tmp_path: Path) -> None:
    values = matrix(tmp_path, 4, 4)
    items = rows_of(*values.shape)
    arrays = {(ROLE, one.name): np.zeros(4, np.float32) for one in items}
    with ReadPool(ReadOptions(threads=4)) as pool:
        assert fill_arrays(pool, tmp_path, items, arrays) == values.nbytes
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("flex-read")]


def test_no_thread_begins_another_task_after_one_has_failed() -> None:
    class Pool(ThreadPoolExecutor):
        def submit(self, *arguments: Any, **named: Any) -> Future[Any]:
            started.append(super().submit(*arguments, **named))
            return started[-1]

    started: list[Future[Any]] = []
    caller, drawn = threading.current_thread(), []

    def work(draw: Callable[[], int | None]) -> int:
        if threading.current_thread() is not caller:
            raise StorageError("a disk is gone")
        assert started[0].exception(LIMIT) is not None
        drawn.append(draw())
        return 0

    with Pool(1) as pool, pytest.raises(StorageError, match="a disk is gone"):
        run_workers(pool, 2, iter(range(9)), work)
    assert drawn == [None]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own way with an interrupt; a process that a shell has started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible", "nothing_left")
@pytest.mark.parametrize("threads", [1, 4])
def test_an_interrupt_joins_threads_and_closes_files(tmp_path: Path, threads: int) -> None:
    values = matrix(tmp_path, 1024, 4096)
    part, count = Box((0, 0), (1024, 512)), 2000
    items = [item_of(values.shape, part, (0, 1), f"{number:04}") for number in range(count)]
    array, reached = np.zeros(1024 * 512, np.float32), threading.Event()
    slots: dict[tuple[str, str], Any] = {(ROLE, f"{number:04}"): ArraySlot(array) for number in range(count)}
    main = threading.main_thread().ident
    assert main is not None
    slots[ROLE, "0020"] = Trap(array.size, lambda: signal.pthread_kill(main, signal.SIGINT))
    slots[ROLE, f"{count - 1:04}"] = Trap(array.size, reached.set)
    with pytest.raises(KeyboardInterrupt):
        execute_reads(plan_of(items), tmp_path, slots, ReadOptions(threads))
    assert not reached.is_set(), "4 GiB were not read to the end"


def test_signals_during_reads_change_nothing(tmp_path: Path) -> None:
    values = matrix(tmp_path, 2048, 4096)
    part = Box((0, 1024), (2048, 1536))
    items = [item_of(values.shape, part, (1, 0)), item_of(values.shape, part, (0, 1), "v")]
    seen: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: seen.append(number))
    suite = signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        slots = empty_slots(items)
        execute_reads(plan_of(items), tmp_path, slots, ReadOptions(threads=1))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *suite)  # The limit of the suite.
    assert seen
    assert slots[ROLE, "w"].array.tobytes() == values[:, 1024:1536].T.tobytes()
    assert slots[ROLE, "v"].array.tobytes() == values[:, 1024:1536].tobytes()


@pytest.mark.usefixtures("nothing_left")
def test_pairs_that_differ_anywhere_are_found(tmp_path: Path) -> None:
    values = matrix(tmp_path, 1000, 1024)
    other = values.copy()
    other.view(np.uint8)[-1, -1] ^= 1
    (tmp_path / "other").write_bytes(other.tobytes())
    whole_box = whole(values.shape)
    sides = [StoredPart(file, 0, values.shape, whole_box, "float32") for file in ("matrix", "other")]
    top = [StoredPart(file, 0, values.shape, Box((0, 0), (999, 1024)), "float32") for file in ("matrix", "other")]
    verify_equal((EqualCheck("top", *top), EqualCheck("itself", sides[0], sides[0])), tmp_path)
    with pytest.raises(MismatchError) as caught:
        verify_equal((EqualCheck("top", *top), EqualCheck("all", *sides)), tmp_path)
    assert caught.value.evidence == ("all: matrix and other differ",)
