"""A client of the job's TCP store with a timeout on every wait.

Paddle's own client waits for answers without a timeout. It hangs if another service listens at the address, or after a
power failure of the node that serves the store. :class:`StoreClient` implements the same protocol over a separate
connection.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import time
import weakref
from collections.abc import Mapping

from ..errors import PeerError

_POLL_SECONDS = 0.02
OPENING_SECONDS = 60.0
"""Maximum seconds to open a connection to a store."""

_ADD, _GET, _SET, _WAIT = 0, 1, 3, 4
"""Commands of Paddle's store."""

_PREFIX = "/"
"""Paddle's client adds it to every key."""

_COMMAND, _LENGTH, _NUMBER = struct.Struct("=i"), struct.Struct("=Q"), struct.Struct("=q")
_REQUEST = struct.Struct("=iQ")
"""Head of a request: the command, and the length of the key that follows."""

_PROBE_KEY = "flex/probe"
_LONGEST_PART = 1 << 16
_PROBE_SECONDS = 60
_MAX_LOST_PROBES = 30
"""Lost probes after which a connection counts as broken: half an hour without network."""


def job_store_address() -> tuple[str, int] | None:
    """Return the address of the job's store, which rank 0 serves; None if the environment does not name it.

    Paddle reads ``PADDLE_MASTER``, then the first of ``PADDLE_TRAINER_ENDPOINTS``. ``MASTER_ADDR`` and ``MASTER_PORT``
    are not the store: the launcher's rendezvous listens there.
    """
    endpoint = os.environ.get("PADDLE_MASTER") or os.environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")[0]
    host, colon, port = endpoint.rpartition(":")
    return (host, int(port)) if colon else None


def hosts_of_ranks() -> tuple[str, ...]:
    """Return the host of each rank from the launcher's environment; empty if it is not set."""
    endpoints = os.environ.get("PADDLE_TRAINER_ENDPOINTS", "")
    return tuple(endpoint.rpartition(":")[0] for endpoint in endpoints.split(",")) if endpoints else ()


def on_several_nodes() -> bool:
    """Return whether the launcher has started ranks on more than one node."""
    return len(set(hosts_of_ranks())) > 1


class StoreClient:
    """A connection to Paddle's TCP store with a timeout on every wait. One thread at a time may use it.

    Args:
        address: host and port of the store.
        opening: maximum seconds for the connection and the first answer.
        timeout: maximum seconds for every later answer.

    Raises:
        PeerError: no connection, or no answer in the store's protocol. The error names the address.
    """

    def __init__(self, address: tuple[str, int], opening: float, timeout: float) -> None:
        self._host, self._opening, self._timeout = address, opening, timeout
        self._address = f"{address[0]}:{address[1]}"
        self.name = f"the store at {self._address}"
        self._open()

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return its new value.

        Raises:
            OSError: no answer in time; the connection cannot be used again.
        """
        self._send(_ADD, key, _NUMBER.pack(amount))
        return int(_NUMBER.unpack(self._receive(_NUMBER.size))[0])

    def post(self, amounts: Mapping[str, int]) -> None:
        """Add to counters, in order, without waiting for the new values, which the next request discards.

        Raises:
            OSError: the connection is broken; this may also surface in the next request.
        """
        self._send_bytes(b"".join(_request(_ADD, key, _NUMBER.pack(amount)) for key, amount in amounts.items()))
        self._discarded += _NUMBER.size * len(amounts)

    def set(self, key: str, value: str) -> None:
        """Store a text."""
        data = value.encode()
        self._send(_SET, key, _LENGTH.pack(len(data)) + data)

    def get(self, key: str) -> bytes:
        """Return a stored text.

        Raises:
            OSError: no answer in time; the connection cannot be used again.
        """
        self._send(_GET, key, b"")
        (size,) = _LENGTH.unpack(self._receive(_LENGTH.size))
        return bytes(self._receive(size))

    def wait(self, key: str, seconds: float) -> bool:
        """Wait until a key is stored, and return whether it was stored in time.

        The server answers as soon as the key is stored, so no polling is needed.

        Raises:
            OSError: the connection was closed.
            PeerError: the store can no longer be reached after the timeout.
        """
        self._send(_WAIT, key, b"")
        self._receive(0)  # Discards earlier replies, so that the next readable byte answers this request.
        if not _is_readable(self._socket, seconds):
            self._socket.close()  # A late answer must not be read as the answer to the next request.
            self._open()
            return False
        self._receive(_COMMAND.size)
        return True

    def _open(self) -> None:
        self._socket = self._connected(self._host, self._opening)
        self._discarded = 0
        weakref.finalize(self, self._socket.close)
        self._socket.settimeout(self._opening)
        try:
            self.add(_PROBE_KEY, 0)
        except OSError as error:
            raise self._unreachable("does not answer as the store of this job", self._opening, error) from error
        self._socket.settimeout(self._timeout)

    def _connected(self, address: tuple[str, int], seconds: float) -> socket.socket:
        end = time.monotonic() + seconds
        while True:
            try:
                connection = socket.create_connection(address, timeout=max(end - time.monotonic(), _POLL_SECONDS))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _keep_alive(connection)
                return connection
            except OSError as error:
                if time.monotonic() >= end:
                    raise self._unreachable("cannot be reached", seconds, error) from error
            time.sleep(_POLL_SECONDS)

    def _unreachable(self, problem: str, seconds: float, error: OSError) -> PeerError:
        return PeerError(
            f"The address of the job's store, {self._address}, {problem}.",
            where=self._address,
            evidence=[f"waited {seconds:g} s: {error}", *_settings()],
            next_step="Start the ranks with one launcher per node, whose PADDLE_MASTER they inherit, and let every "
            "node reach this address.",
        )

    def _send(self, command: int, key: str, rest: bytes) -> None:
        self._send_bytes(_request(command, key, rest))

    def _send_bytes(self, requests: bytes) -> None:
        try:
            self._socket.sendall(requests)
        except OSError:
            self._socket.close()  # The next bytes may belong to an earlier request.
            raise

    def _receive(self, size: int) -> bytearray:
        """Return the next bytes; skip replies to requests that were sent without waiting."""
        received, discarded = bytearray(), self._discarded
        try:
            while len(received) < discarded + size:
                part = self._socket.recv(min(discarded + size - len(received), _LONGEST_PART))
                if not part:
                    raise ConnectionResetError("the connection was closed")
                received += part
        except OSError:
            self._socket.close()  # The next bytes may belong to an earlier request.
            raise
        self._discarded = 0
        return received[discarded:]


def _request(command: int, key: str, rest: bytes) -> bytes:
    name = (_PREFIX + key).encode()
    return _REQUEST.pack(command, len(name)) + name + rest


def _is_readable(connection: socket.socket, seconds: float) -> bool:
    poll = select.poll()  # select.select does not support descriptors above 1,023.
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _keep_alive(connection: socket.socket) -> None:
    """Enable keep-alive probes, because firewalls drop connections that are idle between saves."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _MAX_LOST_PROBES)


def _settings() -> list[str]:
    """Return the environment variables that name addresses, for errors."""
    names = ("PADDLE_MASTER", "PADDLE_TRAINER_ENDPOINTS", "PADDLE_CURRENT_ENDPOINT")
    return [f"{name}={os.environ[name]}" for name in names if name in os.environ]
