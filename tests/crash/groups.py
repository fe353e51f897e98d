"""The ranks of a job as forked processes, each with a net under it, that can be killed, and asked what they did.

They talk through sockets in a star. The end of one rank is seen by the others as the end of its socket, and ends the
exchange with an error, as the failure of a collective operation does.

Time: a fork of a process that has imported numpy and this package takes 1 ms.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from paddleformers_fc.distributed.channel import ALONE, Bytes, Channel, CollectiveChannel
from paddleformers_fc.errors import FlexError, PeerError
from tests.crash.net import Gate, Net, Operation, bytes_written, cast
from tests.harness.limits import LIMIT

DONE, REFUSED, BROKEN = 0, 3, 4
"""Exit codes: the job was done, ended with an error of ours, or with anything else."""
_LENGTH = struct.Struct("<I")


class SocketChannel(CollectiveChannel):
    """A rank's way to the others.

    Args:
        rank: this rank.
        world_size: number of ranks.
        sockets: of the first rank, to every other one; of every other rank, to the first.
    """

    def __init__(self, rank: int, world_size: int, sockets: list[socket.socket]) -> None:
        super().__init__(rank, world_size)
        self._sockets = sockets

    def unite(self, array: Bytes, source: int | None, to: int | None) -> Bytes:
        """The maximum over all ranks.

        Raises:
            PeerError: a rank has ended.
        """
        everyone = self._all_gather(array.tobytes())
        return np.maximum.reduce([np.frombuffer(one, np.uint8) for one in everyone])

    def all_to_all(self, outgoing: Mapping[int, Bytes], sizes: Mapping[int, int]) -> dict[int, Bytes]:
        """What some ranks have for this one.

        Raises:
            PeerError: a rank has ended.
        """
        payload = msgspec.msgpack.encode({rank: array.tobytes() for rank, array in outgoing.items()})
        everyone = [msgspec.msgpack.decode(one, type=dict[int, bytes]) for one in self._all_gather(payload)]
        return {rank: np.frombuffer(everyone[rank][self.rank], np.uint8) for rank in sizes}

    def _all_gather(self, payload: bytes) -> list[bytes]:
        try:
            if self.rank == 0:
                everyone = [payload, *(_received(one) for one in self._sockets)]
                for one in self._sockets:
                    for text in everyone:
                        _send(one, text)
                return everyone
            _send(self._sockets[0], payload)
            return [_received(self._sockets[0]) for _ in range(self.world_size)]
        except OSError as error:
            # As in a collective operation, the failure of one is everyone's.
            for one in self._sockets:
                one.close()
            raise PeerError(f"Rank {self.rank} has lost another rank: {error}.") from error


def _send(connection: socket.socket, payload: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


def _received(connection: socket.socket) -> bytes:
    return _exactly(connection, _LENGTH.unpack(_exactly(connection, _LENGTH.size))[0])


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionResetError("it has ended")
        data += part
    return bytes(data)


@dataclass(frozen=True)
class KillAt(Gate):
    """The end of a process, or of all ranks of its job, at one operation; a write is torn first.

    Args:
        change: of the operation, among those that change something.
        all_ranks: whether the others are killed too.
    """

    change: int
    all_ranks: bool

    def before(self, operation: Operation) -> None:
        """Die if it is time."""
        if operation.change == self.change:
            operation.tear()
            if self.all_ranks:
                os.killpg(0, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class RefuseAt(Gate):
    """The operating system refuses an operation.

    Args:
        number: of the operation.
        errno: why.
        lasting: whether it refuses all that follow as well.
    """

    number: int
    errno: int
    lasting: bool

    def before(self, operation: Operation) -> None:
        """Refuse if it is time; to look is always allowed."""
        due = operation.number >= self.number if self.lasting else operation.number == self.number
        if due and operation.kind != "look":
            operation.tear()
            raise OSError(self.errno, os.strerror(self.errno), operation.path)


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended.

    Args:
        code: exit code, negative for a signal.
        kinds: of every operation it has made, if it lived to tell.
        text: of the error it ended with.
        outside: what it did to files beside the net.
        unseen: bytes it has written that the net has not seen.
    """

    code: int
    kinds: tuple[str, ...] = ()
    text: str = ""
    outside: tuple[str, ...] = ()
    unseen: int = 0


class Group:
    """The ranks of one job, running. They have a process group of their own.

    Args:
        ranks: how many.
        job: what each does.
        gates: what happens at a rank's operations, by rank; nothing to those not named.
        watched: below it no file may be touched beside the net.
    """

    def __init__(
        self,
        ranks: int,
        job: Callable[[Channel], None],
        watched: Path,
        gates: dict[int, Gate] | None = None,
    ) -> None:
        pairs = [socket.socketpair() for _ in range(ranks - 1)]
        pipes = [os.pipe() for _ in range(ranks)]
        self._reports = [read for read, _ in pipes]
        self.pids: list[int] = []
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                leader = self.pids[0] if self.pids else 0
                _become(rank, leader, pairs, pipes)
                ends = [ours for ours, _ in pairs] if rank == 0 else [pairs[rank - 1][1]]
                channel = SocketChannel(rank, ranks, ends) if ranks > 1 else ALONE
                net = Net((gates or {}).get(rank, Gate()))
                _run(channel, job, net, watched, pipes[rank][1])
            self.pids.append(pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.setpgid(pid, self.pids[0])
        for one in (end for pair in pairs for end in pair):
            one.close()
        for _, write in pipes:
            os.close(write)

    def end(self) -> list[RankEnd]:
        """Wait until every rank has ended; how each did. A rank that hangs is ended by an alarm."""
        reports = [_read_all(descriptor) for descriptor in self._reports]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]
        return [_rank_end(code, text) for code, text in zip(codes, reports, strict=True)]


def _become(
    rank: int, leader: int, pairs: list[tuple[socket.socket, socket.socket]], pipes: list[tuple[int, int]]
) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(0, leader)
    signal.alarm(math.ceil(LIMIT))
    for number, (ours, theirs) in enumerate(pairs, start=1):
        if rank != 0:
            ours.close()
        if rank != number:
            theirs.close()
    for number, (read, write) in enumerate(pipes):
        os.close(read)
        if number != rank:
            os.close(write)


def _run(channel: Channel, job: Callable[[Channel], None], net: Net, watched: Path, report: int) -> None:
    """What a forked rank does from its beginning to its end."""
    code, text = BROKEN, ""
    try:
        net.watch(watched)
        before = bytes_written()
        try:
            with cast(net):
                job(channel)
            code = DONE
        except FlexError as error:
            code, text = REFUSED, error.render()
        unseen = bytes_written() - before - net.written
        document = {"kinds": net.kinds, "text": text, "outside": net.outside, "unseen": unseen}
    except BaseException:
        document = {"text": traceback.format_exc()}
    os.write(report, json.dumps(document).encode())
    sys.stdout.flush()
    os._exit(code)


def _read_all(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as pipe:
        return pipe.read()


def _rank_end(code: int, document: bytes) -> RankEnd:
    if not document:
        return RankEnd(code)
    found: dict[str, Any] = json.loads(document)
    kinds, outside = tuple(found.get("kinds", ())), tuple(found.get("outside", ()))
    return RankEnd(code, kinds, found["text"], outside, found.get("unseen", 0))
