"""Carrying out plans: items and pieces fill what they are to fill, and nothing is left behind by a failure."""

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
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import paddle
import pytest
from hypothesis import given, settings, strategies as st

from paddleformers_fc.errors import Corrupt, MismatchError, StorageError
from paddleformers_fc.execute import memory
from paddleformers_fc.execute.memory import AveragedTensor, HostPieces, host_view, slot_of, update_averages
from paddleformers_fc.execute.reading import ArraySlot, cut_large_shards, execute_reads, fill_arrays
from paddleformers_fc.mapping.boxes import Box, whole
from paddleformers_fc.plan.items import LoadPlan, ReadItem, StoredPart
from paddleformers_fc.plan.report import Report
from paddleformers_fc.storage import executor, files
from paddleformers_fc.storage.dtypes import to_numpy, to_safetensors
from paddleformers_fc.storage.executor import IMAGE_BYTES, WINDOW_BYTES, ReadOptions, ReadPool, run_workers
from paddleformers_fc.storage.operations import Memory
from tests.execute.test_hygiene import traces
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


def divisible(array: np.ndarray[Any, Any]) -> ArraySlot:
    """A slot that stands for memory of a device, without a device."""
    return ArraySlot(array, array.nbytes, array.size)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@thorough(200)
@given(st.lists(wanted(), min_size=1, max_size=6), st.sampled_from([1, 40, 300]))
def test_pieces_of_a_shard_of_many_tensors_are_the_shard(
    tmp_path_factory: pytest.TempPathFactory, tensors: list[Wanted], most: int
) -> None:
    root = tmp_path_factory.getbasetemp()
    stored = Stored(root, [replace(one, dtypes=("float32", "float32")) for one in tensors])
    starts = dict(zip(stored.expected, np.cumsum([0, *(one.size for one in stored.expected.values())]), strict=False))
    expected = np.concatenate(list(stored.expected.values()))
    fused = [msgspec.structs.replace(item, name="w", start=int(starts[item.role, item.name])) for item in stored.items]
    filled = np.zeros(expected.size, expected.dtype)
    slots = {(ROLE, "w"): divisible(filled)}
    items, pieces = cut_large_shards(plan_of(fused).items, slots, most)
    execute_reads(plan_of(list(items)), root, pieces)
    assert filled.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("axes", "most", "sizes"),
    [
        ((0, 1), 3200, [3200]),
        ((0, 1), 1000, [992, 992, 992, 224]),
        ((0, 1), 1, [32] * 100),
        pytest.param((1, 0), 1000, [3200], id="a transposed shard is not cut"),
    ],
)
def test_a_piece_has_whole_rows_and_fits_if_a_row_does(axes: tuple[int, ...], most: int, sizes: list[int]) -> None:
    array = np.zeros(800, np.float32)
    items = (item_of((100, 8), whole((100, 8)), axes),)
    pieces, slots = cut_large_shards(items, {(ROLE, "w"): divisible(array)}, most)
    assert [slots[item.role, item.name].host_bytes for item in pieces] == sizes
    assert (pieces == items) == (len(sizes) == 1)


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


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads of all reads, one for each call of the system."""
    read, threads = os.preadv, []

    def counted(*arguments: Any) -> int:
        threads.append(threading.current_thread().name)
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", counted)
    return threads


def test_items_that_share_some_of_their_boxes_are_each_filled_by_all_of_theirs(tmp_path: Path) -> None:
    values = matrix(tmp_path, 4, 4)
    rows = [Box((row, 0), (row + 1, 4)) for row in range(4)]
    items = [item_of((4, 4), whole((4, 4)), axes, str(axes)) for axes in ((0, 1), (1, 0))]
    expected = {item.name: values.transpose(item.axes) for item in items}
    for (source, stored), (target, part) in product(enumerate(rows), enumerate(rows)):
        item = item_of((4, 4), stored, (0, 1), f"{source}{target}")
        items.append(msgspec.structs.replace(item, shape=(4, 4), part=part))
        expected[item.name] = np.zeros((4, 4), np.float32)
        expected[item.name][target] = values[source]
    slots = empty_slots(items)
    execute_reads(plan_of(items), tmp_path, slots)
    for name, filled in expected.items():
        assert slots[ROLE, name].array.tobytes() == filled.tobytes(), name


def test_one_large_tensor_is_read_by_several_threads(tmp_path: Path, reads: list[str]) -> None:
    values = matrix(tmp_path, 4, WINDOW_BYTES // 4)
    meeting, items = threading.Barrier(4), [item_of(values.shape, whole(values.shape), (0, 1))]
    slots, counted = empty_slots(items), os.preadv

    def meet(*arguments: Any) -> int:
        meeting.wait(LIMIT)
        return counted(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", meet)
        execute_reads(plan_of(items), tmp_path, slots, ReadOptions(threads=4))
    assert len(set(reads)) == 4
    assert slots[ROLE, "w"].array.tobytes() == values.tobytes()


def test_small_tensors_that_follow_one_another_are_read_by_one_call(tmp_path: Path, reads: list[str]) -> None:
    values = matrix(tmp_path, 5000, 16)
    items = rows_of(*values.shape)
    slots = empty_slots(items)
    assert execute_reads(plan_of(items), tmp_path, slots) == values.nbytes
    assert len(reads) == math.ceil(5000 / files.MAX_BUFFERS)
    assert all(slots[ROLE, str(row)].array.tobytes() == values[row].tobytes() for row in range(5000))


@pytest.mark.parametrize("start", [-1, 1])
def test_bytes_next_to_a_tensor_are_not_filled(tmp_path: Path, start: int) -> None:
    """For any plan: the stored bytes may be anything."""
    values = matrix(tmp_path, 2, 8)
    memory = np.zeros(24, np.float32)
    items = rows_of(*values.shape)
    items[1] = msgspec.structs.replace(items[1], start=start)
    slots = {(ROLE, str(row)): ArraySlot(memory[8 * row : 8 * row + 8]) for row in range(2)}
    with pytest.raises(MismatchError, match="exceeds the memory of its tensor"):
        execute_reads(plan_of(items), tmp_path, slots)
    assert not memory[8:].any()


def test_memory_other_than_the_targets_is_bounded_for_all_threads_together(tmp_path: Path) -> None:
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


@dataclass(eq=False)
class HostSlot:
    """A slot with a host array, whose numbers are there only when its copy is finished, as on an accelerator.

    Args:
        target: a flat array of the shard's dtype and size.
        log: the calls of this slot.
    """

    target: np.ndarray[Any, Any]
    log: list[str] = field(default_factory=list)
    staged: Any = None
    elements: int = 0

    @property
    def host_bytes(self) -> int:
        return self.target.nbytes

    def part(self, start: int, stop: int) -> HostSlot:
        raise AssertionError("This slot is filled at once.")

    def open(self) -> Memory:
        self.log.append("open")
        self.staged = np.zeros_like(self.target)
        return Memory.of(self.staged)

    def close(self) -> None:
        self.log.append("close")

    def finish_copy(self) -> None:
        self.log.append("finish_copy")
        self.target[:] = self.staged
        self.staged = None


def test_host_arrays_of_a_failed_read_are_given_back(tmp_path: Path) -> None:
    values = matrix(tmp_path, 40, 1000)
    os.truncate(tmp_path / "matrix", values.nbytes // 2)
    slots = {(ROLE, str(row)): HostSlot(np.zeros(1000, np.float32)) for row in range(40)}
    options = ReadOptions(threads=1, staging_memory_bytes=2 * IMAGE_BYTES + 16_000)
    with pytest.raises(Corrupt):
        execute_reads(plan_of(rows_of(*values.shape)), tmp_path, slots, options)
    sent = sum("close" in slot.log for slot in slots.values())
    assert 0 < sent <= 22, "nothing is sent after the failure"
    assert all(slot.staged is None for slot in slots.values())


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """After the test there are no more threads and open files than before."""
    threads, before = set(threading.enumerate()), traces()
    yield
    for thread in set(threading.enumerate()) - threads:
        # One that an interrupt met before it was known to its pool does nothing but end.
        thread.join(LIMIT)
    assert traces() == before


class Trap(ArraySlot, kw_only=True):
    """A slot that is filled in place and does something when the reads come to it."""

    spring: Callable[[np.ndarray[Any, Any]], object]

    def open(self) -> Memory:
        view = self.array[:]
        self.spring(view)
        return Memory.of(view)


def test_a_target_filled_in_place_is_released_when_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "WINDOW_BYTES", 1 << 20)
    values = matrix(tmp_path, 2000, 8192)
    items = [item_of(values.shape, Box((row, 0), (row + 1, 4)), (0, 1), f"{row:04}") for row in range(2000)]
    views: list[weakref.ref[np.ndarray[Any, Any]]] = []
    alive: list[int] = []

    def note(view: np.ndarray[Any, Any]) -> None:
        alive.append(sum(one() is not None for one in views))
        views.append(weakref.ref(view))

    slots = {(ROLE, item.name): Trap(np.zeros(4, np.float32), spring=note) for item in items}
    execute_reads(plan_of(items), tmp_path, slots, ReadOptions(threads=1))
    assert all(slots[ROLE, f"{row:04}"].array.tobytes() == values[row, :4].tobytes() for row in range(2000))
    assert len(alive) == 2000
    assert max(alive) < 300, "those of a few windows"


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize("axes", [(0, 1), (1, 0)])
def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path, threads: int, axes: tuple[int, ...]) -> None:
    values = matrix(tmp_path, 1024, 4096)
    part = Box((0, 1024), (1024, 2048))
    items = [item_of(values.shape, part, axes, f"{number:02}") for number in range(40)]
    slots = empty_slots(items)
    slots[ROLE, "20"] = Trap(
        np.zeros(1024 * 1024, np.float32), spring=lambda _: os.truncate(tmp_path / "matrix", 5_000_000)
    )
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
    slots[ROLE, "0020"] = Trap(array, spring=lambda _: signal.pthread_kill(main, signal.SIGINT))
    slots[ROLE, f"{count - 1:04}"] = Trap(array, spring=lambda _: reached.set())
    with pytest.raises(KeyboardInterrupt):
        execute_reads(plan_of(items), tmp_path, slots, ReadOptions(threads))
    assert not reached.is_set(), "4 GiB were not read to the end"


# ---- The memory of live tensors: filled in place or through a host tensor, and averaged.


DTYPES = ["float32", "bfloat16", "float16", "int64", "bool"]


def load(root: Path, tensor: Any, dtype: str) -> bytes:
    """Fill a tensor with stored numbers; their bytes."""
    shape = tuple(tensor.shape)
    count = int(np.prod(shape)) * to_numpy(to_safetensors(dtype)).itemsize
    data = np.random.default_rng(0).integers(0, 2, count, dtype=np.uint8).tobytes()
    (root / "file").write_bytes(data)
    axes = tuple(range(len(shape)))
    item = ReadItem("model_state", "w", StoredPart("file", 0, shape, whole(shape), dtype), 0, shape, whole(shape), axes)
    execute_reads(LoadPlan((item,), (), {}, Report()), root, {("model_state", "w"): slot_of(tensor)})
    return data


def memory_of(tensor: Any) -> np.ndarray[Any, Any]:
    """The numbers of a contiguous tensor, in its own memory."""
    view = host_view(tensor)
    assert view is not None
    return view


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_contiguous_tensor_is_filled_where_it_lies_and_another_through_a_host_tensor(
    tmp_path: Path, dtype: str
) -> None:
    base, width = paddle.zeros([3, 5], dtype=dtype), to_numpy(to_safetensors(dtype)).itemsize
    place, turned = base.data_ptr(), base.transpose([1, 0])
    assert host_view(turned) is None
    assert [slot_of(tensor).host_bytes for tensor in (base, turned)] == [0, 15 * width]
    assert load(tmp_path, base, dtype) == memory_of(base).tobytes()
    data = load(tmp_path, turned, dtype)
    assert memory_of(base).view(f"u{width}").reshape(3, 5).T.tobytes() == data, "the memory that both share is filled"
    assert not turned.is_contiguous()
    assert base.data_ptr() == place


def test_paddle_has_what_only_a_gpu_needs() -> None:
    assert callable(paddle.CUDAPlace)
    assert callable(paddle.zeros([1]).pin_memory)


# ---- Moving averages, against one expression of numpy.


def in_pieces(values: np.ndarray, size: int) -> HostPieces:
    """The elements of an array in pieces, as of the memory of a device."""

    def pieces(start: int, stop: int) -> Iterator[np.ndarray]:
        return (values[low : min(low + size, stop)] for low in range(start, stop, size))

    return pieces


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.lists(st.integers(0, 200), min_size=1, max_size=4),
    block=st.integers(1, 64),
    piece=st.integers(1, 64),
    threads=st.integers(1, 3),
    first=st.integers(0, 5),
)
def test_the_bits_depend_on_no_bound_of_a_block_or_a_thread(
    sizes: list[int], block: int, piece: int, threads: int, first: int
) -> None:
    random = np.random.default_rng(sum(sizes))
    sources = [random.normal(size=first + size).astype(np.float32) for size in sizes]
    before = [random.normal(size=size).astype(np.float32) for size in sizes]
    wanted = [old + (new[first:] - old) * np.float32(0.1) for old, new in zip(before, sources, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "THREADS", threads)
        patch.setattr(memory, "BLOCK_ELEMENTS", block)
        patch.setattr(memory, "_CHUNK_ELEMENTS", 3 * block)
        averages = [AveragedTensor(old, in_pieces(new, piece), first) for old, new in zip(before, sources, strict=True)]
        update_averages(averages, 0.1)
    for found, expected in zip(before, wanted, strict=True):
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def test_a_copy_forgets_what_was_there() -> None:
    average = np.array([np.nan, np.inf, 3], np.float32)
    update_averages([AveragedTensor(average, in_pieces(np.array([1, 2, 3], np.float32), 2))], 1.0)
    assert average.tolist() == [1, 2, 3]


def test_an_error_in_a_thread_is_raised() -> None:
    def broken(start: int, stop: int) -> Iterator[np.ndarray]:
        raise KeyError("gone")

    average = np.zeros(1 << 20, np.float32)
    with pytest.raises(KeyError):
        update_averages([AveragedTensor(average, broken)], 0.5)
