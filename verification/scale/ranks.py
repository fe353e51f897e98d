"""The ranks of a large job: some run the package's code in threads, of the others only the messages exist.

The message of a rank that does not run is that of the last rank that runs, which the coordinator's never is. Where
messages differ between ranks, the package's own encoder creates it from the rank's simulated layout.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import msgspec
import numpy as np
import xxhash
from msgspec import structs

from paddleformers_fc.cpu_runtime.ranks import free_ports
from paddleformers_fc.cpu_runtime.stores import LOOPBACK, open_store
from paddleformers_fc.distributed import step_agreement
from paddleformers_fc.distributed.channel import (
    _FRAME,
    _ROUND_BYTES,
    NO_HEAD,
    NO_MARKS,
    Bytes,
    Channel,
    CollectiveChannel,
    Payload,
)
from paddleformers_fc.distributed.communicator import KEY_PREFIX, Communicator, Liveness
from paddleformers_fc.distributed.store_client import _ADD, StoreClient
from paddleformers_fc.execute import opening, save
from paddleformers_fc.execute.load import _PreflightMessage
from paddleformers_fc.execute.memory import HostPieces, HostTensors
from paddleformers_fc.execute.replicas import Writers
from paddleformers_fc.execute.save_plan import PlanCache, PlannedFile, planned_files
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.layout.shard_messages import decode_shards, encode_rank_shards
from paddleformers_fc.layout.shards import Shard, ShardsByRole
from paddleformers_fc.plan.simulate import SimulatedModel
from paddleformers_fc.storage.block_checksums import BlockComparison, compare_blocks
from paddleformers_fc.storage.checksum import DEFAULT_BLOCK_BYTES, FileChecksum, digest_of_blocks
from paddleformers_fc.storage.dtypes import to_numpy, to_safetensors
from paddleformers_fc.storage.files import write_file
from verification.scale.counting import READ, Meter, charged, current, peak_memory
from verification.simulate_ranks import Array, HostTensor, Roles, weight_of

EXCHANGES, SENT, RECEIVED, LARGEST = "exchanges", "bytes sent", "bytes received", "largest message"
REQUESTS, WAITING = "requests to the store", "requests while waiting"
BLOCKED, AGREEMENTS = "seconds that block training", "agreements"
LATENCY = "seconds from the last write to the rename"
STEP_SECONDS = 0.25
"""Of a step of training beside an asynchronous save."""

RANKS_PER_NODE = 8
_ARRIVALS = f"{KEY_PREFIX}/arrivals"
_PATIENCE = 3600.0
_PREPARING = "preparing to write"
_GENERATOR_BYTES = bytes(30_000)
"""As many as the state of the random generators of a process has."""
_LEADING_BLOCKS = 8
_ZEROS = np.zeros(1 << 24, np.uint8)
_T = TypeVar("_T")


class ScaleJob:
    """A job of which some ranks run.

    Args:
        model: the model over the grid of the job.
        running: the ranks that run, coordinator first.
        directory: the output directory of the job.
    """

    def __init__(self, model: SimulatedModel, running: Sequence[int], directory: Path) -> None:
        self.model, self.running, self.directory = model, tuple(running), directory
        self.world = model.grid.world_size
        self._absent = sorted(set(range(self.world)) - set(running))
        self._layouts = [model.roles(rank) for rank in range(self.world)]
        self._staging = directory
        self._given: dict[int, bytes] = {}
        self._doing, self._head = "", NO_HEAD
        self._frames = self._messages = b""
        self._barrier = threading.Barrier(len(running), self._complete)
        self._steps = threading.Barrier(len(running))
        self._own_seconds = 0.0
        self.written_at = 0.0
        self._begun = threading.Semaphore(0)
        (port,) = free_ports(1)
        self._address = LOOPBACK, port
        self._server = open_store(*self._address, True)
        self.connecting = {rank: Meter() for rank in running}
        self._channels = {rank: self._connect(rank) for rank in running}
        nodes = {rank // RANKS_PER_NODE for rank in self._absent}
        self._nodes = {node: StoreClient(self._address, _PATIENCE, _PATIENCE) for node in nodes}
        self._closed = False
        save._PLANS = PlanCache()  # The processes of a job begin without plans.
        self._arriving = threading.Thread(target=self._arrive, daemon=True)
        self._arriving.start()

    def close(self) -> None:
        """Close the connections to the store, then the store."""
        self._closed = True
        self._begun.release()
        self._arriving.join()
        self._channels.clear()
        self._nodes.clear()
        del self._server

    def run(self, work: Callable[[int, Channel], _T]) -> tuple[dict[int, Meter], dict[int, _T]]:
        """Run work on the ranks that run, and return the counts and the result of each."""
        meters, results, raised = {rank: Meter() for rank in self.running}, dict[int, _T](), list[Exception]()

        def of_rank(rank: int) -> None:
            try:
                with charged(meters[rank]):
                    results[rank] = work(rank, self._channels[rank])
            except Exception as error:  # It is raised by the caller; here it would end a thread alone.
                raised.append(error)
                self._barrier.abort()
                self._steps.abort()

        threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in self.running]
        with (
            mock.patch.object(save, "_write_tensors", self._begin_holes),
            mock.patch.object(step_agreement, "_loops", itertools.repeat(0)),
            mock.patch.object(opening, "compare_blocks", _compare_leading_blocks),
            peak_memory(list(meters.values())),
        ):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if raised:
            # The other ranks report a broken barrier.
            raise min(raised, key=lambda error: isinstance(error.__cause__, threading.BrokenBarrierError))
        return meters, results

    def weights(self, rank: int) -> Roles:
        """Return the live tensors of a rank, which have no memory."""
        return live_weights(self._layouts[rank])

    def part(self, rank: int, step: int) -> save.LivePart:
        """Return what a rank brings into a save."""
        config = {"config.json": save.config_bytes(self.model.model.config)} if rank == 0 else {}
        files = {**config, _generators(rank): _GENERATOR_BYTES}
        return save.live_part(self.weights(rank), self.model.model, files, save.JobRecord(step, step, {}), "warn")

    @contextlib.contextmanager
    def blocking(self) -> Iterator[None]:
        """Context manager around what blocks the training of a rank; the work of this class is not counted."""
        started = time.monotonic() - self._own_seconds
        yield
        current().add(BLOCKED, time.monotonic() - self._own_seconds - started)

    def train(self) -> None:
        """Run a step of training, in which no rank is a step ahead of another."""
        self._steps.wait()
        time.sleep(STEP_SECONDS)

    def exchange(self, rank: int, doing: str, payload: bytes, head: bytes) -> tuple[bytes, bytes]:
        """Return the frames of all ranks, and their messages."""
        self._given[rank], self._doing, self._head = payload, doing, head
        self._barrier.wait()
        return self._frames, self._messages

    def _connect(self, rank: int) -> Communicator:
        with charged(self.connecting[rank]):
            client = _CountingClient(self._address, _PATIENCE, _PATIENCE)
        client.arrived = self._begun.release if rank == self.running[0] else None
        client.agreed = self._agree if rank == self.running[0] else None
        return Communicator(_CountingChannel(self, rank), _PATIENCE, client)

    def _arrive(self) -> None:
        """Arrive at every barrier on the ranks that do not run, through the client of their node."""
        while self._begun.acquire() and not self._closed:
            for rank in self._absent:
                node = self._nodes[rank // RANKS_PER_NODE]
                number, place = divmod(node.add(_ARRIVALS, 1) - 1, self.world)
                if place == self.world - 1:
                    Liveness(node, rank, self.world, _PATIENCE)._decide(number, "")

    def _agree(self, key: str, word: int) -> None:
        """Add the state of the coordinator to an agreement of step ends for every rank that does not run."""
        own = word & ((1 << 3 * step_agreement._BITS) - 1)
        if self._absent and word > 0:
            self._nodes[self._absent[0] // RANKS_PER_NODE].add(key, own * len(self._absent))

    def _complete(self) -> None:
        started = time.monotonic()
        with charged(None):
            like = self._given[self.running[-1]]
            message_of = self._encoder(self._doing, like) if self._absent and like else None
            everyone = [
                self._given[rank] if rank in self._given
                else like if message_of is None
                else msgspec.msgpack.encode(message_of(rank))
                for rank in range(self.world)
            ]  # fmt: skip
            digests = {one: xxhash.xxh3_64_digest(one) if one else NO_HEAD for one in set(everyone)}
            lanes = self._head + bytes(0xFF ^ byte for byte in self._head)
            self._frames = lanes + b"".join(_FRAME.pack(len(one), digests[one]) for one in everyone)
            # Equal messages are sent by the first rank that has them.
            self._messages = b"".join(dict.fromkeys(everyone)) if len(digests) > 1 else b""
            self._given.clear()
        self._own_seconds += time.monotonic() - started

    def _encoder(self, doing: str, result: bytes) -> Callable[[int], object] | None:
        """Return the message of each rank that does not run; None if it is that of the last one that runs."""
        like = msgspec.msgpack.decode(result)
        if doing.startswith(_PREPARING) and like:  # Ranks that have a plan say nothing.
            return lambda rank: encode_rank_shards(self._layouts[rank])
        if doing == "writing":
            return self._written(like)
        if doing == "planning":
            return self._planning(msgspec.convert(like, _PreflightMessage))
        return None

    def _planning(self, like: _PreflightMessage) -> Callable[[int], object]:
        """Return the messages of ranks of which those with equal weights read the same."""
        decoder = msgspec.msgpack.Decoder(_PreflightMessage)
        known = {self._weights_of(rank): decoder.decode(payload).share for rank, payload in self._given.items()}

        def message_of(rank: int) -> object:
            weights = self._weights_of(rank)
            share = known.get(weights) or structs.replace(like.share, ranges=weights)
            return structs.replace(like, share=share)

        return message_of

    def _weights_of(self, rank: int) -> bytes:
        """Return a digest of the weights of a rank."""
        return xxhash.xxh3_128_digest(encode_rank_shards({MODEL_STATE: self._layouts[rank][MODEL_STATE]}))

    def _written(self, like: dict[str, Any]) -> Callable[[int], object]:
        """Write the files of the ranks that do not run, and return their messages."""
        known: dict[int, bytes] = {}
        for payload in self._given.values():
            known.update(msgspec.msgpack.decode(payload)["replicas"])

        def message_of(rank: int) -> object:
            files, groups = self._planned[rank]
            checksums = [self._write_holes(self._staging, file) for file in files]
            checksums.append(write_file(self._staging / _generators(rank), _GENERATOR_BYTES, root=self._staging))
            return {**like, "checksums": checksums, "replicas": {one: known.get(one, bytes(16)) for one in groups}}

        return message_of

    @cached_property
    def _planned(self) -> dict[int, tuple[list[PlannedFile], list[int]]]:
        """The files of each rank that does not run, and the groups of its replicas."""
        # As the coordinator assigns them, once for all members of a group.
        writers = Writers(decode_shards([encode_rank_shards(layout) for layout in self._layouts]))
        groups: dict[int, list[int]] = {}
        for number, members in enumerate(writers.assignment.groups):
            for rank in np.cumsum(members).tolist():
                groups.setdefault(rank, []).append(number)
        return {rank: ([*planned_files(writers.share_of(rank), rank)], groups.get(rank, [])) for rank in self._absent}

    def _begin_holes(self, staging: Path, file: PlannedFile, _: object) -> SimpleNamespace:
        """Return what closes a file of holes, in place of a writer of tensors."""
        checksum = self._write_holes(staging, file)
        return SimpleNamespace(close=lambda: checksum)

    def _write_holes(self, staging: Path, file: PlannedFile) -> FileChecksum:
        self._staging, path, header = staging, staging / file.path, file.layout.header
        size = len(header) + sum(file.layout.sizes)
        with charged(None):
            path.parent.mkdir(exist_ok=True)
            step = DEFAULT_BLOCK_BYTES
            starts = range(0, size, step)
            blocks = b"".join(_block_checksum(header[low : low + step], min(step, size - low)) for low in starts)
        with path.open("xb") as opened:
            opened.write(header)
            opened.truncate(size)
        return FileChecksum(file.path, size, digest_of_blocks(blocks), DEFAULT_BLOCK_BYTES, blocks)


class _CountingClient(StoreClient):
    """A connection to the store that counts its requests."""

    arrived: Callable[[], object] | None = None
    agreed: Callable[[str, int], object] | None = None

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        if self.arrived and key == _ARRIVALS and amount == 1:
            self.arrived()
        return super().add(key, amount)

    def post(self, amounts: Mapping[str, int]) -> None:
        """Add to counters of step ends."""
        current().add(REQUESTS, len(amounts))
        for key, amount in amounts.items():
            if self.agreed is not None:
                self.agreed(key, amount)
        super().post(amounts)

    def _send(self, command: int, key: str, rest: bytes) -> None:
        current().add(REQUESTS if any(rest) or command != _ADD else WAITING, 1)
        super()._send(command, key, rest)


class _CountingChannel(CollectiveChannel):
    """The collectives of one rank that runs; messages are divided into collectives by the package's own code."""

    def __init__(self, job: ScaleJob, rank: int) -> None:
        super().__init__(rank, job.world)
        self._job = job
        self._coming: Iterator[bytes] = iter(())

    def gather(
        self, doing: str, payload: bytes, head: bytes = NO_HEAD, to: int | None = None, marks: Bytes = NO_MARKS
    ) -> list[Payload] | None:
        """Return the payload of every rank."""
        current().add(EXCHANGES, 1)
        current().add(SENT, _FRAME.size + len(payload))
        frames, messages = self._job.exchange(self.rank, doing, payload, head)
        rounds = (messages[low : low + _ROUND_BYTES] for low in range(0, len(messages), _ROUND_BYTES))
        # Every block is read by some rank, and every rank sees the staging directory.
        mark = b"\0" if doing.startswith(_PREPARING) else b"\1"
        self._coming = chain([frames], [mark * marks.size] if marks.size else [], rounds)
        return super().gather(doing, payload, head, to, marks)

    def unite(self, array: Bytes, source: int | None, to: int | None) -> Bytes:
        """Return the maximum of an array over all ranks."""
        if source != self.rank and to in (None, self.rank):
            current().add(RECEIVED, array.size)
            current().raise_to(LARGEST, array.size)
        return np.frombuffer(next(self._coming), np.uint8)

    def all_to_all(self, outgoing: Mapping[int, Bytes], sizes: Mapping[int, int]) -> dict[int, Bytes]:
        """Not needed by ranks that share one file system, each of which reads for itself."""
        raise NotImplementedError


def hosts_of(world: int) -> tuple[str, ...]:
    """Return the host of each rank of a job."""
    return tuple(f"node-{rank // RANKS_PER_NODE}" for rank in range(world))


def live_weights(layout: ShardsByRole) -> Roles:
    """Return the live tensors of a rank, which have no memory."""
    return {
        role: {name: weight_of(shard, _broadcast(shard)) for name, shard in shards.items()}
        for role, shards in layout.items()
    }


def _broadcast(shard: Shard) -> Array:
    shape = shard.box.shape if shard.flat is None else (shard.size,)
    return np.broadcast_to(np.zeros((1,) * len(shape), to_numpy(to_safetensors(shard.dtype))), shape)


def capture_zeros(part: save.LivePart) -> HostTensors:
    """Capture tensors that have no memory, as zeros."""
    return {
        role: {name: _zeros(one.local_tensor) for name, one in names.items()} for role, names in part.tensors.items()
    }


def _zeros(tensor: HostTensor) -> HostPieces:
    def pieces(start: int, stop: int) -> Iterator[Bytes]:
        left = (stop - start) * tensor.array.itemsize
        while left > 0:
            yield _ZEROS[:left]
            left -= _ZEROS.size

    return pieces


def _generators(rank: int) -> str:
    return f"trainer/rng-{rank:05d}.json"


@cache
def _block_checksum(begin: bytes, length: int) -> bytes:
    hasher = xxhash.xxh3_64(begin)
    hasher.update(_ZEROS[: length - len(begin)].data)
    return hasher.digest()


def _compare_leading_blocks(
    directory: Any, wanted: Sequence[tuple[FileChecksum, Sequence[int]]], *args: Any
) -> BlockComparison:
    """Compare the first blocks of every file, and count the rest: reading terabytes of holes shows nothing."""
    for checksum, numbers in wanted:
        current().add(READ, sum(checksum.block_bytes for _ in numbers[_LEADING_BLOCKS:]))
    return compare_blocks(directory, [(one, numbers[:_LEADING_BLOCKS]) for one, numbers in wanted], *args)
