"""Point-to-point messages over sockets, because gloo's do not work inside groups of more than two ranks.

``ProcessGroupGloo`` numbers messages with one counter per group that *every* member must advance, so a message between
two of three members is never delivered. Its send returns only after the receiver has asked for the message, so two
ranks that send before they receive deadlock. Here every rank has a mailbox: a listening socket whose address is in the
default store. The receiver queues messages by (group id, channel, sender). A send returns at once, because a thread per
receiver writes it. In a coalescing block, receives run at the end of the block, after all sends have started.

Time: a copy into bytes, one through loopback, one into the tensor. Memory: the receiver queues messages without a
bound; a pipeline has a handful of micro-batches in flight.
"""

from __future__ import annotations

import atexit
import os
import queue
import secrets
import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle.base import core
from paddle.distributed import collective

from .. import errors
from . import stores
from .ranks import PATIENCE_SECONDS

_HEADER = struct.Struct("<qqqq")  # group id, channel, sender's global rank, bytes that follow
_TOKEN_BYTES = 16
_RANK = struct.Struct("<q")
_PIECE = 1 << 20
_ADDRESS_KEY = "p2p-mailbox/{rank}"
TIMEOUT_VARIABLE = "FLEX_P2P_TIMEOUT"

MESSAGES = 0
"""The channel of ``send`` and ``recv``."""
EXCHANGES = 1
"""The channel of collectives that use messages, which are separate from pending receives."""
_FAREWELL = 2


class Done:
    """The task of a completed operation."""

    def wait(self, *_: Any) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Return at once."""


DONE = Done()


class Mailbox:
    """The messages that this rank exchanges with the other ranks.

    Args:
        store: the job's default store, through which addresses are found.
        rank: this process' global rank.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self.rank = rank
        self._addresses: list[str] = []
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._arrived: defaultdict[tuple[int, int, int], queue.SimpleQueue[bytearray]] = defaultdict(queue.SimpleQueue)
        self._arrived_lock = threading.Lock()
        self._writers: dict[int, _Writer] = {}
        self._world_size = 1
        self._gone: set[int] = set()
        self._somebody_went = threading.Condition()
        host = stores.own_host()
        self._server = socket.create_server((host, 0), backlog=128)
        port = self._server.getsockname()[1]
        store.set(_ADDRESS_KEY.format(rank=rank), f"{host}:{port}:{self._token.hex()}")
        threading.Thread(target=self._accept, name="mailbox", daemon=True).start()

    def read_addresses(self, store: Any, world_size: int) -> None:
        """Read the addresses of all mailboxes now, while rank 0 certainly still serves the store."""
        for rank in range(world_size):
            key = _ADDRESS_KEY.format(rank=rank)
            store.wait(key)
            self._addresses.append(bytes(store.get(key)).decode())
        self._world_size = world_size
        if self.rank != 0:
            # When this connection ends, each side knows that the other has ended; see leave().
            self._writer(0)

    def post(self, group_id: int, channel: int, target: int, payload: bytes) -> None:
        """Queue ``payload`` for global rank ``target``, and return.

        Raises:
            PeerError: an earlier message to that rank could not be delivered.
        """
        if target == self.rank:
            self._queue(group_id, channel, self.rank).put(bytearray(payload))
            return
        self._writer(target).put(_HEADER.pack(group_id, channel, self.rank, len(payload)), payload)

    def take(self, group_id: int, channel: int, source: int) -> bytearray:
        """Return the next message from global rank ``source``, in the order of sending.

        Raises:
            PeerError: none arrived within ``FLEX_P2P_TIMEOUT`` seconds (default 1800).
        """
        timeout = float(os.environ.get(TIMEOUT_VARIABLE, PATIENCE_SECONDS))
        try:
            return self._queue(group_id, channel, source).get(timeout=timeout)
        except queue.Empty:
            raise errors.PeerError(
                f"Rank {self.rank} waited {timeout:g} s for a message from rank {source} that never came.",
                where=f"process group {group_id}",
                next_step=f"Read the log of rank {source}, or allow more time with {TIMEOUT_VARIABLE}.",
            ) from None

    def flush(self) -> None:
        """Wait until the operating system has every message; it delivers them even if this process ends."""
        for writer in self._writers.values():
            writer.flush()

    def leave(self) -> None:
        """Send the remaining messages, and wait until all ranks have finished. Call it at the end of a rank's work.

        Other ranks may still connect to this one, or ask rank 0 for an address. So every rank notifies rank 0 and waits
        until that process ends, and rank 0 waits for the notice or the end of every rank. No rank waits forever.
        """
        if self.rank != 0:
            with suppress(errors.PeerError):  # Rank 0 has ended already, so no rank needs this one.
                self._writer(0).put(_HEADER.pack(0, _FAREWELL, self.rank, 0), b"")
        self.flush()
        if self.rank != 0:
            self._writer(0).wait_for_end(PATIENCE_SECONDS)
            return
        with self._somebody_went:
            self._somebody_went.wait_for(lambda: len(self._gone) >= self._world_size - 1, PATIENCE_SECONDS)

    def _writer(self, target: int) -> _Writer:
        if target not in self._writers:
            self._writers[target] = _Writer(self._connect(target), target)
        return self._writers[target]

    def _queue(self, group_id: int, channel: int, source: int) -> queue.SimpleQueue[bytearray]:
        with self._arrived_lock:
            return self._arrived[(group_id, channel, source)]

    def _connect(self, target: int) -> socket.socket:
        host, port, token = self._addresses[target].split(":")
        connection = socket.create_connection((host, int(port)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(bytes.fromhex(token) + _RANK.pack(self.rank))
        return connection

    def _accept(self) -> None:
        while True:
            connection, _ = self._server.accept()
            threading.Thread(target=self._read, args=(connection,), name="mailbox-reader", daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        # Close connections that lack the token.
        introduction = _receive(connection, _TOKEN_BYTES + _RANK.size)
        if introduction is None or introduction[:_TOKEN_BYTES] != self._token:
            connection.close()
            return
        self._read_messages(connection)
        self._note_departure(*_RANK.unpack(introduction[_TOKEN_BYTES:]))

    def _note_departure(self, rank: int) -> None:
        with self._somebody_went:
            self._gone.add(rank)
            self._somebody_went.notify_all()

    def _read_messages(self, connection: socket.socket) -> None:
        while (header := _receive(connection, _HEADER.size)) is not None:
            group_id, channel, source, size = _HEADER.unpack(header)
            payload = _receive(connection, size)
            if payload is None:
                return  # The sender died within a message; the receive times out.
            if channel == _FAREWELL:
                self._note_departure(source)
            else:
                self._queue(group_id, channel, source).put(payload)


class _Writer:
    """A connection and the thread that writes to it."""

    def __init__(self, connection: socket.socket, target: int) -> None:
        self._connection = connection
        self._target = target
        self._pending: queue.Queue[tuple[bytes, bytes]] = queue.Queue()
        self._failure: OSError | None = None
        threading.Thread(target=self._run, name=f"mailbox-writer-{target}", daemon=True).start()

    def put(self, header: bytes, payload: bytes) -> None:
        if self._failure is not None:
            raise errors.PeerError(
                f"A message to rank {self._target} could not be delivered.",
                evidence=[str(self._failure)],
                next_step=f"Read the log of rank {self._target}: it has most likely ended.",
            )
        self._pending.put((header, payload))

    def flush(self) -> None:
        self._pending.join()

    def wait_for_end(self, seconds: float) -> None:
        """Wait until the receiver's process has ended. It never sends anything over this connection."""
        self._connection.settimeout(seconds)
        with suppress(OSError):
            self._connection.recv(1)

    def _run(self) -> None:
        while True:
            header, payload = self._pending.get()
            try:
                if self._failure is None:
                    self._connection.sendall(header)
                    self._connection.sendall(payload)
            except OSError as failure:
                self._failure = failure
            finally:
                self._pending.task_done()


def _receive(connection: socket.socket, size: int) -> bytearray | None:
    """Return exactly ``size`` bytes; None if the connection ends first."""
    received = bytearray(size)
    view = memoryview(received)
    filled = 0
    while filled < size:
        try:
            count = connection.recv_into(view[filled : filled + _PIECE])
        except OSError:
            return None
        if count == 0:
            return None
        filled += count
    return received


_mailbox: Mailbox | None = None
# By id() of the ProcessGroupGloo. The object is stored too, so that its id() is not reused.
_group_ids: dict[int, tuple[Any, int]] = {}


def open_mailbox(store: Any, rank: int, world_size: int) -> None:
    """Open this process' mailbox, once, and read the addresses of the other ranks.

    Args:
        store: the job's default store.
        rank: this process' global rank.
        world_size: number of ranks, all of which call this.
    """
    global _mailbox
    if _mailbox is None:
        _mailbox = Mailbox(store, rank)
        _mailbox.read_addresses(store, world_size)
        atexit.register(flush)


def flush() -> None:
    """Wait until the operating system has all messages of this process; registered to run at its exit."""
    if _mailbox is not None:
        _mailbox.flush()


def leave() -> None:
    """Call :meth:`Mailbox.leave`, if this rank has a mailbox."""
    if _mailbox is not None:
        _mailbox.leave()


def register(process_group: Any, group_id: int) -> None:
    """Store the number of a process group, which gloo's own object does not expose."""
    _group_ids[id(process_group)] = (process_group, group_id)


@dataclass(frozen=True)
class Address:
    """The destinations of messages of one process group.

    Args:
        group_id: Paddle's number of the group.
        ranks: the members' global ranks, by rank inside the group.
    """

    group_id: int
    ranks: tuple[int, ...]


def address_of(process_group: Any) -> Address:
    """Return the address of a ``ProcessGroupGloo``."""
    _, group_id = _group_ids[id(process_group)]
    if group_id == 0:
        return Address(0, tuple(range(process_group.size())))
    return Address(group_id, tuple(collective._get_group_map()[group_id].ranks))


def mailbox() -> Mailbox:
    """Return this process' mailbox.

    Raises:
        PeerError: the parallel environment was not initialized.
    """
    if _mailbox is None:
        raise errors.PeerError(
            "A message was sent before the parallel environment was initialized.",
            next_step="Call paddle.distributed.init_parallel_env() or fleet.init() first.",
        )
    return _mailbox


def to_array(tensor: Any) -> np.ndarray[Any, Any]:
    """Return a tensor's elements as a C-contiguous numpy array; bfloat16 as uint16, which has the same bytes."""
    detached = tensor.detach()
    if detached.dtype == paddle.bfloat16:
        detached = detached.view("uint16")
    return np.ascontiguousarray(detached.numpy())


def fill(tensor: Any, array: np.ndarray[Any, Any]) -> None:
    """Write an array (bfloat16 as uint16) into a tensor of the same number of elements, in place."""
    stop_gradient = tensor.stop_gradient
    with paddle.no_grad():
        value = paddle.to_tensor(array.reshape(tensor.shape))
        if tensor.dtype == paddle.bfloat16:
            value = value.view("bfloat16")
        paddle.assign(value, tensor)
    tensor.stop_gradient = stop_gradient


def array_dtype(tensor: Any) -> np.dtype[Any]:
    """Return the numpy dtype that :func:`to_array` returns for a tensor."""
    return np.dtype("uint16" if tensor.dtype == paddle.bfloat16 else str(tensor.dtype).rsplit(".", 1)[-1])


def send_array(process_group: Any, target: int, array: np.ndarray[Any, Any], channel: int = MESSAGES) -> None:
    """Send an array to rank ``target`` of the group."""
    address = address_of(process_group)
    mailbox().post(address.group_id, channel, address.ranks[target], array.tobytes())


def exchanged_array(process_group: Any, source: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return the next array from rank ``source`` of the group on :data:`EXCHANGES`, flattened."""
    address = address_of(process_group)
    return np.frombuffer(mailbox().take(address.group_id, EXCHANGES, address.ranks[source]), dtype=dtype)


class _Receive:
    """The task of a receive, which runs when it is waited for.

    Messages of a sender are delivered in the order of the receives, independent of the order of the waits.
    """

    def __init__(
        self, process_group: Any, source: int, dtype: np.dtype[Any], deliver: Callable[[np.ndarray[Any, Any]], None]
    ) -> None:
        self._address = address_of(process_group)
        self._source = self._address.ranks[source]
        self._dtype = dtype
        self._deliver = deliver
        self._done = False
        self._queue = _pending_receives[(self._address.group_id, self._source)]
        self._queue.append(self)

    def wait(self, *_: Any) -> bool:
        while not self._done:
            self._queue.popleft()._receive()
        return True

    def is_completed(self) -> bool:
        return self._done

    def synchronize(self) -> None:
        self.wait()

    def _receive(self) -> None:
        message = mailbox().take(self._address.group_id, MESSAGES, self._source)
        self._deliver(np.frombuffer(message, dtype=self._dtype))
        self._done = True


# Receives that were not waited for yet, by (group id, global rank of the sender).
_pending_receives: defaultdict[tuple[int, int], deque[_Receive]] = defaultdict(deque)


# The receives of the current coalescing block, which run at its end; None outside a block.
_coalesced: list[_Receive] | None = None


def _start_coalescing(self: Any, *_: Any) -> None:
    global _coalesced
    _coalesced = []


def _end_coalescing(self: Any, *_: Any) -> None:
    global _coalesced
    receives, _coalesced = _coalesced or [], None
    for receive in receives:
        receive.wait()


def _start_receive(receive: _Receive, sync_op: bool) -> _Receive:
    if _coalesced is not None:
        _coalesced.append(receive)
    elif sync_op:
        receive.wait()
    return receive


def _checked_fill(tensor: Any, source: int, array: np.ndarray[Any, Any]) -> None:
    expected = int(np.prod(tensor.shape, dtype=np.int64))
    if array.size != expected:
        raise errors.PeerError(
            f"A message from group rank {source} has {array.size} elements, expected {expected}.",
            evidence=[f"the receiving tensor is {tensor.dtype} {list(tensor.shape)}"],
            next_step="Check that sender and receiver agree on the order, shape and dtype of their messages.",
        )
    fill(tensor, array)


def _send(self: Any, tensor: Any, dst: int, sync_op: bool = True) -> Done:
    send_array(self, dst, to_array(tensor))
    return DONE


def _recv(self: Any, tensor: Any, src: int, sync_op: bool = True) -> _Receive:
    receive = _Receive(self, src, array_dtype(tensor), lambda array: _checked_fill(tensor, src, array))
    return _start_receive(receive, sync_op)


def _part(size: int, parts: int, index: int) -> slice:
    """Return the range of one tensor parallel rank in a flat tensor that is sent in parts."""
    share = size // parts
    return slice(index * share, (index + 1) * share)


def _send_partial(self: Any, tensor: Any, dst: int, parts: int, index: int, sync_op: bool = True) -> Done:
    array = to_array(tensor).reshape(-1)
    send_array(self, dst, array[_part(array.size, parts, index)])
    return DONE


def _recv_partial(self: Any, tensor: Any, src: int, parts: int, index: int, sync_op: bool = True) -> _Receive:
    def deliver(part: np.ndarray[Any, Any]) -> None:
        full = to_array(tensor).reshape(-1).copy()
        full[_part(full.size, parts, index)] = part
        fill(tensor, full)

    return _start_receive(_Receive(self, src, array_dtype(tensor), deliver), sync_op)


def _all_gather_partial(self: Any, out: Any, tensor: Any, parts: int, index: int, sync_op: bool = True) -> Done:
    mine = to_array(tensor).reshape(-1)
    mine = mine[_part(mine.size, parts, index)]
    for target in range(self.size()):
        send_array(self, target, mine, EXCHANGES)
    received = [exchanged_array(self, source, mine.dtype) for source in range(self.size())]
    fill(out, np.concatenate(received))
    return DONE


def apply() -> None:
    """Set the point-to-point methods of ``ProcessGroupGloo``."""
    methods: dict[str, Callable[..., Any]] = {
        "send": _send,
        "recv": _recv,
        "send_partial": _send_partial,
        "recv_partial": _recv_partial,
        "all_gather_partial": _all_gather_partial,
    }
    for name, method in methods.items():
        setattr(core.ProcessGroupGloo, name, method)
        # The "calc stream" variants are ordered with computation; on a CPU everything is.
        setattr(core.ProcessGroupGloo, f"{name}_on_calc_stream", method)
    for name, method in {"_start_coalescing": _start_coalescing, "_end_coalescing": _end_coalescing}.items():
        setattr(core.ProcessGroupGloo, name, method)
