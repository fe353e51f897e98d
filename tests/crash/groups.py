"""The ranks of a job as forked processes, each with a net under it, that can be killed, and asked what they did.

They talk through pipes in a star. The end of one rank is seen by the others as the end of its pipe, and ends the
exchange with an error, as the failure of a collective operation does.

Time: a fork of a process that has imported numpy and this package takes 1 ms.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from paddleformers_fc.distributed.channel import ALONE, Bytes, Channel, CollectiveChannel
from paddleformers_fc.errors import FlexError, PeerError
from tests.crash.net import Gate, Net, Operation, bytes_written, cast
from tests.harness.limits import LIMIT

DONE, REFUSED, BROKEN = 0, 3, 4
"""Exit codes: the job was done, ended with an error of ours, or with anything else."""
Links = Sequence[tuple[Connection, Connection]]
"""The pipe between the first rank and every other one."""


class PipeChannel(CollectiveChannel):
    """A rank's way to the others.

    Args:
        rank: this rank.
        links: of the job.

    Attributes:
        sent: bytes that this rank has written to its pipes.
    """

    def __init__(self, rank: int, links: Links) -> None:
        super().__init__(rank, len(links) + 1)
        self._ends = [links[rank - 1][1]] if rank else [end for end, _ in links]
        self.sent = 0
        # A pipe ends when no process has its other end.
        for end in (end for link in links for end in link if end not in self._ends):
            end.close()

    def unite(self, array: Bytes, source: int | None, to: int | None) -> Bytes:
        """The maximum over all ranks.

        Raises:
            PeerError: a rank has ended.
        """
        return np.maximum.reduce(self._all_gather(array))

    def all_to_all(self, outgoing: Mapping[int, Bytes], sizes: Mapping[int, int]) -> dict[int, Bytes]:
        """What some ranks have for this one.

        Raises:
            PeerError: a rank has ended.
        """
        everyone = self._all_gather(dict(outgoing))
        return {rank: everyone[rank][self.rank] for rank in sizes}

    def _all_gather(self, thing: Any) -> list[Any]:
        before = bytes_written()
        try:
            if self.rank:
                self._ends[0].send(thing)
                return list(self._ends[0].recv())
            everyone = [thing, *(end.recv() for end in self._ends)]
            for end in self._ends:
                end.send(everyone)
            return everyone
        except (OSError, EOFError) as error:
            # In a collective operation, all ranks fail if one fails.
            for end in self._ends:
                end.close()
            raise PeerError(f"Rank {self.rank} has lost another rank: {error}.") from error
        finally:
            self.sent += bytes_written() - before


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


@dataclass
class RankEnd:
    """How a rank ended.

    Attributes:
        code: exit code, negative for a signal.
        kinds: of every operation it has made, if it lived to tell.
        text: of the error it ended with.
        outside: what it did to files beside the net.
        unseen: bytes it has written that the net has not seen.
    """

    code: int = BROKEN
    kinds: list[str] = field(default_factory=list)
    text: str = ""
    outside: list[str] = field(default_factory=list)
    unseen: int = 0


def run_ranks(
    ranks: int, job: Callable[[Channel], None], watched: Path, gates: Mapping[int, Gate] | None = None
) -> list[RankEnd]:
    """Run the ranks of one job, in a process group of their own; how each has ended.

    Args:
        ranks: how many.
        job: what each does.
        watched: below it no file may be touched beside the net.
        gates: what happens at a rank's operations, by rank; nothing to those not named.
    """
    links = [Pipe() for _ in range(ranks - 1)]
    pids: list[int] = []
    reports: list[Connection] = []
    for rank in range(ranks):
        report, told = Pipe(duplex=False)
        pid = os.fork()
        if pid == 0:
            _join_group(0, pids)
            _live(rank, links, job, Net((gates or {}).get(rank, Gate())), watched, told)
        told.close()
        _join_group(pid, pids)
        pids.append(pid)
        reports.append(report)
    for end in (end for link in links for end in link):
        end.close()
    return [_ended(pid, report) for pid, report in zip(pids, reports, strict=True)]


def _join_group(pid: int, pids: Sequence[int]) -> None:
    """Both processes do it, because neither knows which of them comes first."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(pid, pids[0] if pids else pid)


def _live(
    rank: int, links: Links, job: Callable[[Channel], None], net: Net, watched: Path, told: Connection
) -> NoReturn:
    """What a forked rank does from its beginning to its end; an alarm ends one that hangs."""
    signal.alarm(math.ceil(LIMIT))
    end = RankEnd()
    try:
        channel = PipeChannel(rank, links) if links else ALONE
        net.watch(watched)
        before = bytes_written()
        try:
            with cast(net):
                job(channel)
            end.code = DONE
        except FlexError as error:
            end.code, end.text = REFUSED, error.render()
        end.unseen = bytes_written() - before - net.written - getattr(channel, "sent", 0)
        end.kinds, end.outside = net.kinds, net.outside
    except BaseException:
        end.code, end.text = BROKEN, traceback.format_exc()
    told.send(end)
    os._exit(end.code)


def _ended(pid: int, report: Connection) -> RankEnd:
    end = RankEnd()
    with report, contextlib.suppress(EOFError, OSError):  # It was killed.
        end = report.recv()
    end.code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return end
