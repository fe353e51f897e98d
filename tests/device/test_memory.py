"""The memory of device tensors: filled and read through copies alone, in order with the computation."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file

import paddleformers_fc
from paddleformers_fc.execute import staging_pool, stream
from paddleformers_fc.execute.memory import host_pieces, slot_of
from paddleformers_fc.execute.reading import execute_reads
from paddleformers_fc.execute.staging_pool import in_host_memory, measured_transfers, pool_of
from paddleformers_fc.mapping.boxes import Box, whole
from paddleformers_fc.plan.items import LoadPlan, ReadItem, StoredPart
from paddleformers_fc.plan.report import Report
from paddleformers_fc.storage.executor import ReadOptions
from tests.device.counting import allocated_bytes, break_device, copied, event_waits, limit_memory, synchronisations
from tests.device.running import FAKE, device
from tests.execute.test_reading import Stored, Wanted, plan_of
from tests.harness import tiny
from tests.harness.on_ranks import on_ranks

MIB = 1024 * 1024
SHAPE = (6, 4, 5)
CASTS = [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32"), ("int64", "int64")]
READS = [
    Wanted(SHAPE, box, order, dtypes, slabs)
    for box in (whole(SHAPE), Box((1, 0, 2), (6, 3, 5)))
    for order in permutations(range(3))
    for dtypes in CASTS
    for slabs in (1, 3)
]
"""Whole, strided, transposed, cast and in slabs."""


# With one byte every row is a piece, for which a part of the reads is enough.
@pytest.mark.parametrize(("staging_bytes", "every"), [(1, 7), (4096, 5), (64 * MIB, 1)])
@on_ranks(1, server="device_ranks")
def test_every_way_of_reading_fills_device_tensors(tmp_path: Path, staging_bytes: int, every: int) -> None:
    paddle.set_device(device())
    stored = Stored(tmp_path, READS[::every])
    shapes = {(item.role, item.name): item.shape for item in stored.items}
    tensors = {}
    for number, (key, expected) in enumerate(stored.expected.items()):
        shape = shapes[key]
        tensor = paddle.zeros(list(shape if number % 4 else shape[::-1]), dtype=str(expected.dtype))
        tensors[key] = tensor if number % 4 else tensor.transpose([2, 1, 0])
    before = copied()
    slots = {key: slot_of(tensor) for key, tensor in tensors.items()}
    execute_reads(plan_of(stored.items), tmp_path, slots, ReadOptions(staging_memory_bytes=staging_bytes))
    after = copied() - before
    assert len(tensors) == -(-96 // every)
    for key, expected in stored.expected.items():
        assert not in_host_memory(tensors[key].place)
        assert tensors[key].contiguous().cpu().numpy().tobytes() == expected.tobytes(), key
    if device() == FAKE:
        wanted = sum(array.nbytes for array in stored.expected.values())
        assert after.to_device == after.late_to_device == wanted, "on a side stream"


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(("staging_bytes", "piece"), [(64 * MIB, 16 * MIB), (3 * MIB, MIB)])
@on_ranks(1, server="device_ranks")
def test_the_next_piece_is_copied_while_one_is_written(strided: bool, staging_bytes: int, piece: int) -> None:
    paddle.set_device(device())
    rows, row = 5 * 1024, 1024
    numbers = np.arange(rows * row, dtype="float32").reshape(rows, row)
    tensor = paddle.to_tensor(numbers)
    if strided:
        tensor = paddle.to_tensor(np.ascontiguousarray(numbers.T)).transpose([1, 0])
    start, stop = 3 * row, (rows - 7) * row
    size = (stop - start) * 4
    pool, waits = pool_of(tensor.place, staging_bytes), event_waits()
    for _ in range(2):
        pieces, begun, before = [], [], copied()
        with measured_transfers() as figures:
            for one in host_pieces(tensor, start, stop, staging_bytes):
                begun.append((copied() - before).late_to_host)
                pieces.append(one.copy())
    assert np.concatenate(pieces).tobytes() == numbers.reshape(-1)[start:stop].tobytes()
    assert [one.nbytes for one in pieces] == [piece] * (size // piece) + [size % piece]
    assert pool.peak == 2 * piece < staging_bytes
    assert pool.allocations == 2, "the second save uses the buffers of the first"
    assert (figures.in_flight, figures.bytes) == (2, size)
    if device() == FAKE:
        assert (copied() - before).to_host == size
        # Under ``strided`` Paddle destroys the event of a computation, and waits for it on a CustomDevice alone.
        assert strided or event_waits() == waits, "a wait in a call stops every other thread of the interpreter"
        assert begun == [min(number * piece, size) for number in range(2, len(pieces) + 2)]


@pytest.mark.skipif(device() != FAKE, reason="a device that can be told to fail")
@on_ranks(1, server="device_ranks")
def test_a_copy_that_a_device_never_reports_raises_the_error_of_the_device() -> None:
    paddle.set_device(device())
    source = paddle.to_tensor(np.arange(16, dtype="uint8"))
    staging_pool._QUIET_SECONDS = 0.05
    copy = staging_pool.begin_copies_to_host([(source, np.zeros(16, "uint8"))])
    break_device(True)
    with pytest.raises(Exception):  # noqa: B017
        copy.wait()
    break_device(False)


@on_ranks(1, server="device_ranks")
def test_the_buffers_of_an_abandoned_save_are_used_again() -> None:
    paddle.set_device(device())
    staging_bytes = 3 * 4096
    numbers = np.arange(8 * 1024, dtype="float32")
    tensor = paddle.to_tensor(numbers)
    with measured_transfers() as figures:
        for count in (0, 1):  # Stop before the first chunk, then after it.
            pieces = host_pieces(tensor, 0, numbers.size, staging_bytes)
            for _ in range(count):
                next(pieces)
            del pieces
        found = [piece.copy() for piece in host_pieces(tensor, 0, numbers.size, staging_bytes)]
    assert np.concatenate(found).tobytes() == numbers.tobytes()
    assert (pool_of(tensor.place, staging_bytes).peak, figures.in_flight) == (2 * 4096, 2)


def loaded_twice(root: Path, count: int, rows: int) -> tuple[Any, Any]:
    """Load tensors of rows of 4 KiB twice, through 8 MiB at most; the staging memory, and the figures of the copies."""
    paddle.set_device(device())
    numbers = np.arange(count * rows * 1024, dtype="float32").reshape(count, rows, 1024)
    (root / "file").write_bytes(numbers.tobytes())
    shape, size = (rows, 1024), rows * 4096
    items = []
    for number in range(count):
        stored = StoredPart("file", number * size, shape, whole(shape), "float32")
        items.append(ReadItem("w", str(number), stored, 0, shape, whole(shape), (0, 1)))
    options = ReadOptions(threads=2, staging_memory_bytes=8 * MIB)
    tensors = [paddle.zeros(shape, dtype="float32") for _ in range(count)]
    pool = pool_of(tensors[0].place, options.host_copy_bytes)
    for _ in range(2):
        for tensor in tensors:
            tensor.zero_()
        slots = {("w", str(i)): slot_of(tensor, options.host_copy_bytes) for i, tensor in enumerate(tensors)}
        with measured_transfers() as figures:
            execute_reads(LoadPlan(tuple(items), (), {}, Report()), root, slots, options)
    assert [one.cpu().numpy().tobytes() for one in tensors] == [one.tobytes() for one in numbers]
    assert figures.bytes == numbers.nbytes
    return pool, figures


@on_ranks(1, server="device_ranks")
def test_staging_memory_of_a_load_is_bounded_and_used_again(tmp_path: Path) -> None:
    pool, figures = loaded_twice(tmp_path, 24, 256)
    assert pool.peak == pool.allocated == 4 * MIB, "two groups of two shards"
    assert pool.allocations == 4
    assert figures.in_flight == 4, "one group of shards is copied while the next one is read"


@on_ranks(1, server="device_ranks")
def test_a_shard_beyond_the_staging_memory_is_read_in_pieces(tmp_path: Path) -> None:
    pool, figures = loaded_twice(tmp_path, 2, 2049)
    assert pool.peak < 6 * MIB
    assert figures.in_flight == 2, "one piece is copied while the next one is read"


@on_ranks(1, server="device_ranks")
def test_a_load_waits_for_the_computation_before_it() -> None:
    paddle.set_device(device())
    tensor = paddle.zeros([8], dtype="float32")
    tensor.fill_(5.0)
    slot = slot_of(tensor)
    slot.open().array()[:] = np.arange(8)
    slot.close()
    slot.finish_copy()
    paddle.device.synchronize(device())
    assert tensor.numpy().tolist() == list(range(8))


def built(directory: Path, **changes: Any) -> Any:
    """A tiny model on the device."""
    paddle.set_device(device())
    args = tiny.training_arguments(tiny.SINGLE, directory / "unused", device=device())
    return tiny.build("llama", tiny.SINGLE, args, **changes)


@on_ranks(1, server="device_ranks")
def test_weights_that_are_still_being_received_are_waited_for(tmp_path: Path) -> None:
    """They arrive on a stream of communication, as late as they may."""
    model = built(tmp_path)
    names = dict(model.named_parameters())
    received = {name: np.full(tensor.shape, 7, np.float32) for name, tensor in names.items()}
    older = {name: tensor.cpu().numpy() for name, tensor in names.items()}
    communication = (
        paddle.device.Stream(paddle.CustomPlace(device(), 0)) if device() == FAKE else paddle.device.Stream()
    )

    def receive(arrays: dict[str, Any]) -> list[Any]:
        host = {name: paddle.to_tensor(array, place=paddle.CPUPlace()) for name, array in arrays.items()}
        with paddle.no_grad(), paddle.device.stream_guard(communication):
            for name, tensor in names.items():
                tensor.copy_(host[name], False)
        return list(host.values())  # Wait until they have arrived.

    kept = receive(received)
    paddleformers_fc.save(tmp_path / "saved", model)
    saved = paddleformers_fc.open(tmp_path / "saved")
    assert all((saved.read(one.name) == 7).all() for one in saved.tensors())
    kept += receive(older)
    paddleformers_fc.load(tmp_path / "saved", model)
    paddle.device.synchronize()
    assert all((tensor.cpu().numpy() == 7).all() for tensor in names.values())
    assert kept


@pytest.mark.parametrize("where", ["host", "model"])
@on_ranks(1, server="device_ranks")
def test_a_stream_waits_for_the_device_once_per_round_and_not_once_per_tensor(tmp_path: Path, where: str) -> None:
    model = built(tmp_path)
    paddleformers_fc.save(tmp_path / "saved", model)
    paddleformers_fc.open(tmp_path / "saved").export(tmp_path / "exported")
    expected = load_file(tmp_path / "exported/model.safetensors")
    begin, assemble = stream.begin_copies_to_host, stream.Stream._assemble
    rounds: list[int] = []
    batches: list[int] = []

    def begin_and_count(ends: Any) -> Any:
        rounds.append(len(ends))
        return begin(ends)

    def assemble_and_count(self: Any, batch: Any, failures: Any) -> Any:
        batches.append(len(batch.rounds))
        return assemble(self, batch, failures)

    dict(paddleformers_fc.stream(model, device=where))  # The plan is kept.
    stream.begin_copies_to_host, stream.Stream._assemble = begin_and_count, assemble_and_count
    waits, events = synchronisations(), event_waits()
    found = dict(paddleformers_fc.stream(model, device=where))
    waits, events = synchronisations() - waits, event_waits() - events
    for name, tensor in found.items():
        assert in_host_memory(tensor.place) == (where == "host")
        assert tensor.cpu().numpy().tobytes() == expected[name].tobytes(), name
    assert sum(rounds) == len(found) > 10, "a copy for every tensor"
    assert batches == [1, 1]
    assert len(rounds) == 2, "which are waited for together in every round"
    if device() == FAKE:
        # One before the stream; tensors on the device are waited for once per batch.
        assert (waits, events) == (3 if where == "host" else 5, 0)


@pytest.mark.skipif(device() != FAKE, reason="a real accelerator has no limit that a test can set")
@on_ranks(1, server="device_ranks")
def test_a_save_and_a_load_need_no_memory_of_a_device_for_tensors(tmp_path: Path) -> None:
    model = built(tmp_path, hidden_size=256, vocab_size=4096)
    before = {name: tensor.cpu().numpy() for name, tensor in model.named_parameters()}
    assert sum(one.nbytes for one in before.values()) > 8 * MIB
    paddle.device.empty_cache()
    limit_memory(allocated_bytes() + MIB)
    with pytest.raises(OSError):
        paddle.zeros([MIB], dtype="float32")
    paddleformers_fc.save(tmp_path / "saved", model)
    with paddle.no_grad():
        for tensor in model.parameters():
            tensor.fill_(0.0)
    paddleformers_fc.load(tmp_path / "saved", model)
    assert all(one.cpu().numpy().tobytes() == before[name].tobytes() for name, one in model.named_parameters())
