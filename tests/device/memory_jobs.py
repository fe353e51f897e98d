"""Jobs of one rank: the executors and the memory of single tensors."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

from tests.device.counting import (
    allocated_bytes,
    break_device,
    copied,
    event_waits,
    limit_memory,
    synchronisations,
)
from tests.device.running import FAKE, device
from tests.harness import tiny

_SHAPE = (6, 4, 5)
_CASTS = [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32"), ("int64", "int64")]


def read_every_way(root: str, staging_bytes: int) -> dict[str, Any]:
    """Fill device tensors by plans that read whole, strided, transposed, cast and in slabs; what came out wrong.

    Args:
        root: an empty directory.
        staging_bytes: bound of the host memory.
    """
    import paddle

    from paddleformers_fc.execute.memory import slot_of
    from paddleformers_fc.execute.reading import execute_reads
    from paddleformers_fc.execute.staging_pool import in_host_memory
    from paddleformers_fc.mapping.boxes import Box, whole
    from paddleformers_fc.storage.executor import ReadOptions
    from tests.execute.test_reading import Stored, Wanted, plan_of

    paddle.set_device(device())
    cases = [
        Wanted(_SHAPE, box, order, dtypes, slabs)
        for box in (whole(_SHAPE), Box((1, 0, 2), (6, 3, 5)))
        for order in permutations(range(3))
        for dtypes in _CASTS
        for slabs in (1, 3)
    ]
    stored = Stored(Path(root), cases)
    shapes = {(item.role, item.name): item.shape for item in stored.items}
    tensors = {}
    for number, (key, expected) in enumerate(stored.expected.items()):
        shape = shapes[key]
        tensor = paddle.zeros(list(shape if number % 4 else shape[::-1]), dtype=str(expected.dtype))
        tensors[key] = tensor if number % 4 else tensor.transpose([2, 1, 0])
    plan = plan_of(stored.items)
    before = copied()
    slots = {key: slot_of(tensor) for key, tensor in tensors.items()}
    execute_reads(plan, Path(root), slots, ReadOptions(staging_memory_bytes=staging_bytes))
    after = copied() - before
    wrong = [
        name
        for (role, name), expected in stored.expected.items()
        if tensors[role, name].contiguous().cpu().numpy().tobytes() != expected.tobytes()
    ]
    return {
        "tensors": len(tensors),
        "wrong": wrong,
        "on the host": sum(in_host_memory(tensor.place) for tensor in tensors.values()),
        "copied": after.to_device,
        "wanted": sum(array.nbytes for array in stored.expected.values()),
        "late": after.late_to_device,
    }


def save_in_pieces(strided: bool, staging_bytes: int) -> dict[str, Any]:
    """Take a range of a tensor of 20 MiB to the host twice, in pieces; what came, and what was copied when.

    Args:
        strided: whether the tensor is not contiguous.
        staging_bytes: bound of the host memory.
    """
    import numpy as np
    import paddle

    from paddleformers_fc.execute.memory import host_pieces
    from paddleformers_fc.execute.staging_pool import StagingPool, measured_transfers, pool_of

    paddle.set_device(device())
    rows, row = 5 * 1024, 1024
    numbers = np.arange(rows * row, dtype="float32").reshape(rows, row)
    tensor = paddle.to_tensor(numbers)
    if strided:
        tensor = paddle.to_tensor(np.ascontiguousarray(numbers.T)).transpose([1, 0])
    start, stop = 3 * row, (rows - 7) * row
    pool: StagingPool = pool_of(tensor.place, staging_bytes)
    waits = event_waits()
    for _ in range(2):
        pieces, begun = [], []
        before = copied()
        with measured_transfers() as figures:
            for piece in host_pieces(tensor, start, stop, staging_bytes):
                begun.append((copied() - before).late_to_host)
                pieces.append(piece.copy())
    return {
        "pieces": [piece.nbytes for piece in pieces],
        "right": np.concatenate(pieces).tobytes() == numbers.reshape(-1)[start:stop].tobytes(),
        "begun": begun,
        "waits": event_waits() - waits,
        "copied": (copied() - before).to_host,
        "held": pool.peak,
        "allocations": pool.allocations,
        "in flight": figures.in_flight,
        "measured": figures.bytes,
    }


def copy_on_a_broken_device() -> str:
    """Wait for a copy whose event the device never reports, because it has failed; the error."""
    import numpy as np
    import paddle

    from paddleformers_fc.execute import staging_pool

    paddle.set_device(device())
    source = paddle.to_tensor(np.arange(16, dtype="uint8"))
    staging_pool._QUIET_SECONDS = 0.05
    copy = staging_pool.begin_copies_to_host([(source, np.zeros(16, "uint8"))])
    break_device(True)
    try:
        copy.wait()
    except Exception as error:
        return type(error).__name__
    finally:
        break_device(False)
    return ""


def abandon_pieces() -> dict[str, Any]:
    """Stop a save after one piece, and another one before its first; the buffers that are left, and a save after it."""
    import numpy as np
    import paddle

    from paddleformers_fc.execute.memory import host_pieces
    from paddleformers_fc.execute.staging_pool import measured_transfers, pool_of

    paddle.set_device(device())
    staging_bytes = 3 * 4096
    numbers = np.arange(8 * 1024, dtype="float32")
    tensor = paddle.to_tensor(numbers)
    pool = pool_of(tensor.place, staging_bytes)
    with measured_transfers() as figures:
        for count in (0, 1):
            pieces = host_pieces(tensor, 0, numbers.size, staging_bytes)
            for _ in range(count):
                next(pieces)
            del pieces
        found = [piece.copy() for piece in host_pieces(tensor, 0, numbers.size, staging_bytes)]
    return {
        "right": np.concatenate(found).tobytes() == numbers.tobytes(),
        "held": pool.peak,
        "in flight": figures.in_flight,
    }


def load_through_the_pool(root: str, staging_bytes: int, count: int, rows: int) -> dict[str, Any]:
    """Load tensors of equal size twice; what came out wrong, and the staging memory that it took.

    Args:
        root: an empty directory.
        staging_bytes: bound of the host memory.
        count: number of tensors.
        rows: of every tensor; a row has 4 KiB.
    """
    import numpy as np
    import paddle

    from paddleformers_fc.execute.memory import slot_of
    from paddleformers_fc.execute.reading import execute_reads
    from paddleformers_fc.execute.staging_pool import measured_transfers, pool_of
    from paddleformers_fc.mapping.boxes import whole
    from paddleformers_fc.plan.items import LoadPlan, ReadItem, StoredPart
    from paddleformers_fc.plan.report import Report
    from paddleformers_fc.storage.executor import ReadOptions

    paddle.set_device(device())
    numbers = np.arange(count * rows * 1024, dtype="float32").reshape(count, rows, 1024)
    (Path(root) / "file").write_bytes(numbers.tobytes())
    shape, size = (rows, 1024), rows * 4096
    items = [
        ReadItem(
            "w", str(i), StoredPart("file", i * size, shape, whole(shape), "float32"), 0, shape, whole(shape), (0, 1)
        )
        for i in range(count)
    ]
    options = ReadOptions(threads=2, staging_memory_bytes=staging_bytes)
    tensors = [paddle.zeros(shape, dtype="float32") for _ in range(count)]
    pool = pool_of(tensors[0].place, options.host_copy_bytes)
    for _ in range(2):
        for tensor in tensors:
            tensor.zero_()
        slots = {("w", str(i)): slot_of(tensor, options.host_copy_bytes) for i, tensor in enumerate(tensors)}
        with measured_transfers() as figures:
            execute_reads(LoadPlan(tuple(items), (), {}, Report()), Path(root), slots, options)
    return {
        "wrong": [i for i, tensor in enumerate(tensors) if tensor.cpu().numpy().tobytes() != numbers[i].tobytes()],
        "held": pool.peak,
        "kept": pool.allocated,
        "allocations": pool.allocations,
        "in flight": figures.in_flight,
        "measured": figures.bytes,
    }


def fill_while_computing() -> list[float]:
    """Load into a tensor that the computation has not finished writing, and read it in the computation's order."""
    import numpy as np
    import paddle

    from paddleformers_fc.execute.memory import slot_of

    paddle.set_device(device())
    tensor = paddle.zeros([8], dtype="float32")
    tensor.fill_(5.0)
    slot = slot_of(tensor)
    slot.open().array()[:] = np.arange(8)
    slot.close()
    slot.finish_copy()
    paddle.device.synchronize(device())
    found: list[float] = tensor.numpy().tolist()
    return found


def save_and_load_while_weights_arrive(root: str) -> list[list[str]]:
    """Save and load a model whose weights arrive on a stream of communication, as late as they may.

    Args:
        root: an empty directory.
    Returns:
        the names of weights that a checkpoint has, or a load leaves, with other numbers than it should.
    """
    import numpy as np
    import paddle

    import paddleformers_fc

    paddle.set_device(device())
    directory = Path(root)
    args = tiny.training_arguments(tiny.SINGLE.to_json(), str(directory / "unused"), device=device())
    model = tiny.build("llama", tiny.SINGLE.to_json(), args)
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
        return list(host.values())  # Until they have arrived.

    kept = receive(received)
    paddleformers_fc.save(directory / "saved", model)
    saved = paddleformers_fc.open(directory / "saved")
    torn = [one.name for one in saved.tensors() if not (saved.read(one.name) == 7).all()]
    kept += receive(older)
    paddleformers_fc.load(directory / "saved", model)
    paddle.device.synchronize()
    left = [name for name, tensor in names.items() if not (tensor.cpu().numpy() == 7).all()]
    return [torn, left]


def save_and_load_on_a_full_device(root: str, spare: int) -> dict[str, Any]:
    """Save and load where the device has hardly any memory left.

    Args:
        root: an empty directory.
        spare: bytes that may still be allocated.
    Returns:
        the bytes of the model, whether a tensor beyond the limit was allocated, and the weights that differ at the end.
    """
    import paddle

    import paddleformers_fc

    paddle.set_device(device())
    args = tiny.training_arguments(tiny.SINGLE.to_json(), str(Path(root) / "unused"), device=device())
    model = tiny.build("llama", tiny.SINGLE.to_json(), args, hidden_size=256, vocab_size=4096)
    before = {name: tensor.cpu().numpy() for name, tensor in model.named_parameters()}
    paddle.device.empty_cache()
    limit_memory(allocated_bytes() + spare)
    try:
        paddle.zeros([spare], dtype="float32")
        refused = False
    except OSError:
        refused = True
    paddleformers_fc.save(Path(root) / "saved", model)
    with paddle.no_grad():
        for tensor in model.parameters():
            tensor.fill_(0.0)
    paddleformers_fc.load(Path(root) / "saved", model)
    changed = [name for name, one in model.named_parameters() if one.cpu().numpy().tobytes() != before[name].tobytes()]
    return {"bytes": sum(one.nbytes for one in before.values()), "refused": refused, "changed": changed}


def stream_from_device(root: str, where: str) -> dict[str, Any]:
    """Stream the weights of a model on the device, by a plan that was kept.

    Args:
        root: an empty directory.
        where: ``host``, or ``model`` for tensors on the device.
    Returns:
        the number of tensors and of batches, the copies to the host of every round, how often the host has waited for
        the device, and the tensors that are not those of an export or not where they should be.
    """
    import paddle
    from safetensors.numpy import load_file

    import paddleformers_fc
    from paddleformers_fc.execute import stream
    from paddleformers_fc.execute.staging_pool import in_host_memory

    paddle.set_device(device())
    directory = Path(root)
    args = tiny.training_arguments(tiny.SINGLE.to_json(), str(directory / "unused"), device=device())
    model = tiny.build("llama", tiny.SINGLE.to_json(), args)
    paddleformers_fc.save(directory / "saved", model)
    paddleformers_fc.open(directory / "saved").export(directory / "exported")
    expected = load_file(directory / "exported/model.safetensors")
    begin, assemble = stream.begin_copies_to_host, stream.Stream._assemble
    rounds: list[int] = []
    batches: list[int] = []

    def begin_and_count(ends: Any) -> Any:
        rounds.append(len(ends))
        return begin(ends)

    def assemble_and_count(self: Any, batch: Any, failures: Any) -> Any:
        batches.append(len(batch.rounds))
        return assemble(self, batch, failures)

    dict(paddleformers_fc.stream(model, device=where))
    stream.begin_copies_to_host, stream.Stream._assemble = begin_and_count, assemble_and_count
    waits, events = synchronisations(), event_waits()
    found = dict(paddleformers_fc.stream(model, device=where))
    return {
        "tensors": len(found),
        "batches": batches,
        "rounds": rounds,
        "synchronisations": synchronisations() - waits,
        "event waits": event_waits() - events,
        "wrong": [
            name
            for name, tensor in found.items()
            if in_host_memory(tensor.place) != (where == "host")
            or tensor.cpu().numpy().tobytes() != expected[name].tobytes()
        ],
    }
